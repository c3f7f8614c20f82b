//! Tests two hosts with an agent each, as network namespaces. QEMUs that do not know the agents migrate between the
//! hosts.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;

use hotlift_testkit::namespace::{DESTINATION, Link, Namespace, SOURCE};
use hotlift_testkit::pki::Pki;
use hotlift_testkit::skip;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::back_and_forth::used;
use crate::guest::Guest;
use crate::hotlift::{Hotlift, Running};
use crate::large_devices::large_devices;
use crate::need;
use crate::route::{Multifd, Side};
use crate::vm::{Accelerator, Machine, Memory, PC_7, Release, Vm, until};

/// RFC 3849: addresses for examples.
pub const SOURCE_6: &str = "2001:db8::1";
pub const DESTINATION_6: &str = "2001:db8::2";

/// RFC 5737: an address that no host here has.
const ELSEWHERE: &str = "203.0.113.9";

/// MTU of Ethernet.
const MTU: u16 = 1500;

/// The first port of migrations.
const PORT: u16 = 49152;

/// A host and its agent.
pub struct Host<'a> {
    pub namespace: &'a Namespace,
    pub folder: PathBuf,
    pub agent: Running,
    /// True if its table outlives it.
    table_stays: bool,
}

/// Two linked hosts, before they have agents.
pub struct Hosts {
    pub link: Link,
    pki: Pki,
    pub folder: TempDir,
}

impl Hosts {
    pub fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skip!("root", "network namespaces and nftables need it");
            return None;
        }
        let link = Link::new(MTU, 0).expect("a link");
        for (host, address) in [(&link.source, SOURCE_6), (&link.destination, DESTINATION_6)] {
            let address = format!("{address}/64");
            // Without duplicate address detection, which takes seconds.
            host.tool("ip", &["address", "add", &address, "dev", "veth", "nodad"])
                .expect("an address");
            // The kernel assigns no migration port to an outgoing connection.
            let reserved = "net.ipv4.ip_local_reserved_ports=49152-49215";
            host.tool("sysctl", &["-qw", reserved])
                .expect("reserved ports");
        }
        link.source
            .tool("ip", &["route", "add", "default", "dev", "veth"])
            .expect("a route");
        Some(Self {
            link,
            pki: Pki::new(),
            folder: tempfile::tempdir().expect("a folder"),
        })
    }

    /// Starts the source's agent with these lines of configuration.
    pub fn source(&self, config: &str) -> Host<'_> {
        self.start("source", &self.link.source, &self.source_pki(), config)
    }

    /// Starts the destination's agent with these lines of configuration.
    fn destination(&self, config: &str) -> Host<'_> {
        let names = [DESTINATION, DESTINATION_6];
        let pki = self.certificates("destination", &names, &self.pki);
        self.start("destination", &self.link.destination, &pki, config)
    }

    pub fn source_pki(&self) -> PathBuf {
        self.certificates("source", &[SOURCE, SOURCE_6], &self.pki)
    }

    fn certificates(&self, name: &str, names: &[&str], pki: &Pki) -> PathBuf {
        let folder = self.folder.path().join(name).join("pki");
        if !folder.exists() {
            pki.host_in(&folder, names);
        }
        folder
    }

    fn start<'a>(
        &self,
        name: &str,
        namespace: &'a Namespace,
        pki: &Path,
        config: &str,
    ) -> Host<'a> {
        let folder = self.folder.path().join(name);
        fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("agent.toml");
        fs::write(&file, text(&folder, pki, config)).expect("a configuration");
        let flag = format!("--config={}", file.display());
        let mut agent = namespace
            .within(|| Hotlift::start(&["agent", "run", &flag]))
            .expect("the host");
        agent.wait_for("listening on ");
        Host {
            namespace,
            folder,
            agent,
            table_stays: !config.contains("plaintext = \"allow\""),
        }
    }
}

/// Returns a configuration with the common lines and these.
pub fn text(folder: &Path, pki: &Path, config: &str) -> String {
    let (pki, control) = (pki.display(), folder.join("sock"));
    let control = control.display();
    format!("tls = \"{pki}\"\ncontrol = \"{control}\"\nusers = [\"root\"]\n{config}\n")
}

impl Host<'_> {
    /// Returns the agent's answer to a query.
    pub fn ask(&self, question: &[&str]) -> Value {
        let control = format!("--control={}", self.folder.join("sock").display());
        let all = [&["agent"], question, &[&control, "--json"]].concat();
        let (status, output) = Hotlift::start(&all).wait();
        assert!(status.success(), "{output:?}");
        serde_json::from_str(&output[0]).expect("JSON")
    }

    /// Returns the metrics for Prometheus.
    pub fn metrics(&self) -> String {
        let connect = || TcpStream::connect(("127.0.0.1", 16522));
        let stream = self.namespace.within(connect).expect("the host");
        let mut stream = stream.expect("the metrics' address");
        let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
        stream.write_all(request.as_bytes()).expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        answer
    }

    /// Sends a command to the agent.
    fn command(&self, words: &[&str]) -> (bool, String) {
        let control = format!("--control={}", self.folder.join("sock").display());
        let (status, output) = Hotlift::start(&[&["agent"], words, &[&control]].concat()).wait();
        (status.success(), output.join("\n"))
    }

    /// Ends the agent, which must leave only the table that blocks plaintext; returns all its output.
    pub fn end(self) -> String {
        self.agent.signal(Signal::TERM);
        let (status, output) = self.agent.wait();
        let output = output.join("\n");
        assert!(status.success(), "{output}");
        assert_eq!(
            table(self.namespace).is_some(),
            self.table_stays,
            "{output}"
        );
        if self.table_stays {
            remove_table(self.namespace);
        }
        assert!(!self.folder.join("sock").exists(), "the socket is left");
        output
    }
}

/// Returns the agent's table as nft lists it, without its counters.
pub fn table(namespace: &Namespace) -> Option<String> {
    let line = ["-n", "-s", "-t", "list", "table", "inet", "hotlift_agent"];
    namespace.tool("nft", &line).ok()
}

/// Removes the table as an operator does.
pub fn remove_table(namespace: &Namespace) {
    let remove = || Hotlift::start(&["agent", "rules", "--remove"]).wait();
    let (status, output) = namespace.within(remove).expect("the host");
    assert!(status.success(), "{output:?}");
    assert_eq!(table(namespace), None);
}

fn program() -> Machine {
    Machine {
        name: PC_7,
        accelerator: Accelerator::Kvm,
        memory: Memory::File,
        guest: Guest::program(),
    }
}

/// Returns libvirt's settings: multifd for `--parallel`, and always the return path.
fn side(multifd: Multifd) -> Side {
    Side::new(multifd).with("return-path")
}

/// Returns the settings with two channels.
fn parallel() -> Side {
    side(Multifd::Channels(2))
}

/// Starts a machine at each end, set up for a migration to `port` of `address`.
fn pair(link: &Link, side: &Side, address: &str, port: u16) -> Option<(Vm, Vm, String)> {
    pair_of(Release::V7, link, side, (address, port), &[])
}

/// Starts a pair of a given release, with more `devices` as in QEMU's command line.
fn pair_of(
    release: Release,
    link: &Link,
    side: &Side,
    (address, port): (&str, u16),
    devices: &[String],
) -> Option<(Vm, Vm, String)> {
    let machine = Machine {
        name: release.machine(),
        ..program()
    };
    let running = || Vm::running_with(release, &machine, devices);
    let waiting = || Vm::waiting_with(release, &machine, devices);
    let here = link.source.within(running);
    let there = link.destination.within(waiting);
    let (mut here, mut there) = (here.expect("the source")?, there.expect("the destination")?);
    for vm in [&mut here, &mut there] {
        side.apply(vm);
    }
    let host = match address.contains(':') {
        true => format!("[{address}]"),
        false => address.to_owned(),
    };
    let uri = format!("tcp:{host}:{port}");
    there
        .qmp
        .migrate_incoming(&uri, true)
        .expect("migrate-incoming");
    Some((here, there, uri))
}

/// Migrates, and verifies that the guest is there, intact, and runs nowhere else.
fn moves(here: &mut Vm, there: &mut Vm, uri: &str) {
    let before = here.count().expect("it counts");
    // A QEMU with a failed migration needs a moment before it accepts the next.
    until(
        || "the source's QEMU begins a migration".to_owned(),
        || here.qmp.migrate(uri).ok(),
    );
    here.reaches("completed");
    there.reaches("completed");
    assert!(!here.is_running(), "the source runs, too");
    there.continues_from(before);
    there.prove();
}

#[test]
fn the_memory_of_a_migration_with_255_channels_goes_back_to_the_system() {
    // An idle agent has 20 MiB; 255 channels leave some 300 MiB in heaps of threads.
    const MOST: u64 = 64 << 20;
    let hosts = need!(Hosts::new());
    let (source, destination) = (hosts.source(""), hosts.destination(""));
    let side = side(Multifd::Channels(255));
    let (mut here, mut there, uri) = need!(pair(&hosts.link, &side, DESTINATION, PORT));
    moves(&mut here, &mut there, &uri);
    for host in [&source, &destination] {
        let bytes = || used(&host.agent).2;
        until(
            || format!("an agent has {} MiB", bytes() >> 20),
            || (bytes() < MOST).then_some(()),
        );
        println!("an agent has {} MiB", bytes() >> 20);
    }
    source.end();
    destination.end();
}

#[test]
fn an_unchanged_migrate_command_goes_through_the_agents() {
    let hosts = need!(Hosts::new());
    let (source, destination) = (hosts.source(""), hosts.destination(""));
    for (multifd, method, address) in [
        (Multifd::Channels(2), "none", DESTINATION),
        (Multifd::Off, "none", DESTINATION),
        (Multifd::Channels(3), "none", DESTINATION_6),
        (Multifd::Off, "none", DESTINATION_6),
        (Multifd::Channels(2), "zlib", DESTINATION),
        (Multifd::Channels(2), "zstd", DESTINATION_6),
    ] {
        println!("multifd {multifd} with {method} to {address}");
        let side = side(multifd).method(method);
        let (mut here, mut there, uri) = need!(pair(&hosts.link, &side, address, PORT));
        moves(&mut here, &mut there, &uri);
    }
    let rows = until(
        || "six migrations are shown as completed".to_owned(),
        || {
            let rows = source.ask(&["list"]);
            let all = rows.as_array().expect("rows").clone();
            let is_over = |row: &Value| row["status"] == "completed";
            (all.len() == 6 && all.iter().all(is_over)).then_some(all)
        },
    );
    assert!(
        rows.iter().all(|row| row["kind"] == "migration"),
        "{rows:?}"
    );
    let metrics = source.metrics();
    for line in [
        "hotlift_agent_ended_total{direction=\"outgoing\",kind=\"migration\",outcome=\"completed\"} 6",
        "hotlift_agent_tls_failures_total 0",
        "hotlift_agent_migration_downtime_seconds_count{direction=\"outgoing\"} 6",
        "# TYPE hotlift_agent_sent_bytes_total counter",
        "hotlift_agent_downtimes_total{direction=\"outgoing\"} 6",
        "# TYPE hotlift_migration_rate_bytes_per_second gauge",
    ] {
        assert!(metrics.contains(line), "{line} is missing in\n{metrics}");
    }
    for (host, direction) in [(&source, "outgoing"), (&destination, "incoming")] {
        let status = until(
            || format!("the downtime of six {direction} migrations is known"),
            || {
                let status = host.ask(&["status"]);
                let is_known = status["downtime"][direction]["migrations"] == 6;
                is_known.then_some(status)
            },
        );
        let downtime = &status["downtime"][direction];
        let seconds = |name: &str| downtime[name].as_f64().expect("seconds");
        let [p50, p95, max] = ["p50-seconds", "p95-seconds", "max-seconds"].map(seconds);
        assert!(0.0 < p50 && p50 <= p95 && p95 == max, "{status}");
    }
    let (here, there) = (source.end(), destination.end());
    for (output, direction) in [(&here, "outgoing"), (&there, "incoming")] {
        let over = output.lines().filter(|line| {
            line.contains("state=completed kind=migration") && line.contains(direction)
        });
        assert_eq!(over.count(), 6, "{output}");
    }
    // Source and destination log the same id, which connects their entries.
    let ids = here
        .lines()
        .filter_map(|line| line.split_once(" state=completed"));
    for (id, _) in ids {
        assert!(there.contains(id), "{id} of\n{here}\nis not in\n{there}");
    }
}

#[test]
fn devices_with_more_state_than_an_agent_keeps_in_memory_go_through_it() {
    let hosts = need!(Hosts::new());
    let (source, destination) = (hosts.source(""), hosts.destination(""));
    let devices = large_devices();
    for multifd in [Multifd::Channels(2), Multifd::Off] {
        let pair = pair_of(
            Release::V7,
            &hosts.link,
            &side(multifd),
            (DESTINATION, PORT),
            &devices,
        );
        let (mut here, mut there, uri) = need!(pair);
        moves(&mut here, &mut there, &uri);
    }
    source.end();
    destination.end();
}

/// Starts a server at the destination that sends first; returns the client's address.
fn server(link: &Link, port: u16) -> thread::JoinHandle<SocketAddr> {
    let bind = || TcpListener::bind((DESTINATION, port));
    let listener = link.destination.within(bind).expect("the host");
    let listener = listener.expect("a listener");
    thread::spawn(move || {
        let (mut stream, from) = listener.accept().expect("a client");
        stream.write_all(b"NBDMAGIC").expect("the greeting");
        let mut output = Vec::new();
        stream
            .read_to_end(&mut output)
            .expect("the output of the client");
        assert_eq!(output, b"option");
        stream.write_all(b"reply").expect("the reply");
        from
    })
}

/// Connects as a client at the source, and talks until the server closes.
fn client(link: &Link, port: u16) -> std::io::Result<()> {
    let connect = || TcpStream::connect((DESTINATION, port));
    let mut stream = link.source.within(connect).expect("the host")?;
    let mut greeting = [0; 8];
    stream.read_exact(&mut greeting)?;
    assert_eq!(&greeting, b"NBDMAGIC");
    stream.write_all(b"option")?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply)?;
    assert_eq!(reply, b"reply");
    Ok(())
}

#[test]
fn a_protocol_whose_server_speaks_first_is_carried_as_it_is() {
    let hosts = need!(Hosts::new());
    let (source, destination) = (hosts.source(""), hosts.destination(""));
    let served = server(&hosts.link, PORT + 7);
    client(&hosts.link, PORT + 7).expect("a tunnel");
    let from = served.join().expect("the server");
    assert_eq!(
        from.ip().to_string(),
        DESTINATION,
        "its own host's agent connects"
    );
    for output in [source.end(), destination.end()] {
        assert!(output.contains("state=completed kind=tunnel"), "{output}");
    }
}

#[test]
fn several_connections_to_one_server_are_carried_at_the_same_time() {
    let hosts = need!(Hosts::new());
    let (_source, _destination) = (hosts.source(""), hosts.destination(""));
    let bind = || TcpListener::bind((DESTINATION, PORT + 7));
    let listener = hosts.link.destination.within(bind).expect("the host");
    let listener = listener.expect("a listener");
    let connect = || TcpStream::connect((DESTINATION, PORT + 7));
    let connect = || hosts.link.source.within(connect).expect("the host");
    // Like the disks of a VM: all are copied to one NBD server.
    let clients = [(); 3].map(|()| connect().expect("a tunnel"));
    let servers = [(); 3].map(|()| listener.accept().expect("a client").0);
    for mut server in &servers {
        server.write_all(b"NBDMAGIC").expect("the greeting");
    }
    for mut client in &clients {
        let mut greeting = [0; 8];
        client.read_exact(&mut greeting).expect("the greeting");
    }
}

#[test]
fn plaintext_to_a_host_without_agent_is_sent_only_if_allowed() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("plaintext = \"refuse\"");
    {
        let (mut here, mut there, uri) = need!(pair(&hosts.link, &parallel(), DESTINATION, PORT));
        here.qmp.migrate(&uri).expect("migrate");
        here.reaches("failed");
        assert!(here.is_running(), "the guest stays");
        source
            .agent
            .wait_for("no agent answers for 192.0.2.2:49152");
        assert_eq!(there.migration().status(), "none", "nothing came there");
    }
    source.end();
    let named = format!("plaintext = \"allow\"\n[peers]\n\"{DESTINATION}\" = \"{DESTINATION}\"");
    let mut source = hosts.source(&named);
    {
        let (mut here, mut there, uri) = need!(pair(&hosts.link, &parallel(), DESTINATION, PORT));
        here.qmp.migrate(&uri).expect("migrate");
        here.reaches("failed");
        source
            .agent
            .wait_for("a migration without it would be unencrypted");
        assert_eq!(there.migration().status(), "none", "nothing came there");
    }
    source.end();
    let source = hosts.source("plaintext = \"allow\"");
    let (mut here, mut there, uri) = need!(pair(&hosts.link, &parallel(), DESTINATION, PORT));
    moves(&mut here, &mut there, &uri);
    let served = server(&hosts.link, PORT + 7);
    client(&hosts.link, PORT + 7).expect("a connection");
    let from = served.join().expect("the server");
    assert_eq!(from.ip().to_string(), SOURCE);
    let output = source.end();
    assert!(
        output.contains("the migration is not encrypted"),
        "{output}"
    );
}

#[test]
fn an_agent_without_the_right_certificate_gets_nothing_under_any_policy() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("plaintext = \"allow\"");
    let other = Pki::new();
    let pki = hosts.certificates("stranger", &[DESTINATION], &other);
    let mut stranger = hosts.start("stranger", &hosts.link.destination, &pki, "");
    let (mut here, mut there, uri) = need!(pair(&hosts.link, &parallel(), DESTINATION, PORT));
    here.qmp.migrate(&uri).expect("migrate");
    here.reaches("failed");
    assert!(here.is_running(), "the guest stays");
    source
        .agent
        .wait_for("TLS handshake with the other agent failed");
    stranger.agent.wait_for("refused a connection");
    assert_eq!(there.migration().status(), "none", "nothing came there");
}

/// So slow that a migration runs until the test acts on it.
const SLOW: &str = "max-bandwidth = \"1M\"\nmethod = \"none\"";

#[test]
fn a_killed_agent_leaves_the_guest_at_the_source_and_its_successor_works() {
    let hosts = need!(Hosts::new());
    for which in ["source", "destination"] {
        println!("that of the {which}");
        let mut source = hosts.source(SLOW);
        let mut destination = hosts.destination("");
        let (mut here, mut there, uri) = need!(pair(&hosts.link, &parallel(), DESTINATION, PORT));
        here.qmp.migrate(&uri).expect("migrate");
        source.agent.wait_for("state=active");
        destination.agent.wait_for("state=active");
        let killed = match which {
            "source" => &source,
            _ => &destination,
        };
        killed.agent.signal(Signal::KILL);
        here.reaches("failed");
        assert!(here.is_running(), "the guest stays");
        until(|| "the destination ends".to_owned(), || there.ended());
        drop((source, destination));
        // The table that a killed agent left is replaced.
        let (source, destination) = (hosts.source(""), hosts.destination(""));
        let (_there, mut there, uri) = need!(pair(&hosts.link, &parallel(), DESTINATION, PORT + 1));
        Side::new(Multifd::Channels(2))
            .with("return-path")
            .apply(&mut here);
        moves(&mut here, &mut there, &uri);
        source.end();
        destination.end();
    }
}

/// QEMU before 10.2 has no state for this, and its guest may then run nowhere.
#[test]
fn an_agent_that_is_killed_while_the_devices_load_lets_the_guest_run_again_at_the_source() {
    let hosts = need!(Hosts::new());
    let postcopy = side(Multifd::Off)
        .with("postcopy-ram")
        .parameters(json!({ "max-bandwidth": 1 << 20 }));
    for (which, port) in [("source", PORT), ("destination", PORT + 1)] {
        println!("that of the {which}");
        let mut source = hosts.source("");
        let mut destination = hosts.destination("");
        let made = pair_of(
            Release::V11,
            &hosts.link,
            &postcopy,
            (DESTINATION, port),
            &[],
        );
        let (mut here, there, uri) = need!(made);
        here.qmp.migrate(&uri).expect("migrate");
        source.agent.wait_for("state=active");
        destination.agent.wait_for("state=active");
        // More than the opening: the destination has answered it and accepts pages.
        until(
            || "no pages move".to_owned(),
            || (here.migration().ram?.transferred > 1 << 20).then_some(()),
        );
        let before = here.count().expect("it counts");
        // Its socket buffers the devices, and it loads none of them.
        there.signal(Signal::STOP);
        here.start_postcopy();
        here.wait_for_status("postcopy-device");
        // The source's agent reads no more, so that the source's QEMU still has data to send when the agent is killed.
        let to_agent = format!("dport = :{port}");
        until(
            || "the source's QEMU does not wait for room".to_owned(),
            || {
                let line = ["--tcp", "--numeric", "--options", &to_agent];
                let sockets = hosts.link.source.tool("ss", &line).expect("ss");
                sockets.contains("timer:(persist").then_some(())
            },
        );
        let killed = match which {
            "source" => &source,
            _ => &destination,
        };
        killed.agent.signal(Signal::KILL);
        here.wait_for_status("failed");
        assert!(here.is_running(), "the guest runs nowhere");
        here.continues_from(before);
    }
}

#[test]
fn an_agent_connects_only_to_its_own_host() {
    let hosts = need!(Hosts::new());
    let peers = format!("[peers]\n\"{ELSEWHERE}\" = \"{DESTINATION}\"");
    let mut source = hosts.source(&peers);
    let destination = hosts.destination("ports = \"49152-49160\"");
    // Hosts with floating addresses set it, so that a socket can be bound to any address.
    for key in ["ipv4.ip_nonlocal_bind", "ipv6.ip_nonlocal_bind"] {
        let set = format!("net.{key}=1");
        let there = &hosts.link.destination;
        there.tool("sysctl", &["-qw", &set]).expect("the setting");
    }
    for (address, port, why) in [
        (ELSEWHERE, PORT, "this host has no such address"),
        (DESTINATION, PORT + 20, "its port is none of 49152-49160"),
    ] {
        let connect = || TcpStream::connect((address, port));
        let stream = hosts.link.source.within(connect).expect("the host");
        let mut stream = stream.expect("the source's agent answers");
        stream.write_all(b"GET / HTTP/1.1\r\n").expect("a word");
        let mut answer = Vec::new();
        // Any kind of end is accepted.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty());
        source.agent.wait_for(why);
    }
    let output = destination.end();
    assert_eq!(output.matches("state=refused").count(), 2, "{output}");
}

#[test]
fn a_configuration_is_reloaded_and_a_bad_one_changes_nothing() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("max-bandwidth = \"5M\"");
    let file = source.folder.join("agent.toml");
    fs::write(&file, "max-bandwidth = 5\n").expect("a file");
    source.agent.signal(Signal::HUP);
    let line = source.agent.wait_for("is unchanged");
    assert!(line.contains("agent.toml line 1, max-bandwidth"), "{line}");
    assert_eq!(source.ask(&["status"])["max-bandwidth"], 5 << 20);
    let text = text(
        &source.folder,
        &hosts.source_pki(),
        "max-bandwidth = \"7M\"\nredirect-port = 5",
    );
    fs::write(&file, text).expect("a file");
    source.agent.signal(Signal::HUP);
    source
        .agent
        .wait_for("'redirect-port' takes effect after a restart");
    source.agent.wait_for("was read again");
    assert_eq!(source.ask(&["status"])["max-bandwidth"], 7 << 20);
    source.end();
}

#[test]
fn a_migration_has_more_channels_than_a_relay_alone_takes() {
    let hosts = need!(Hosts::new());
    let (source, destination) = (hosts.source("channels = 65"), hosts.destination(""));
    let (mut here, mut there, uri) = need!(pair(&hosts.link, &parallel(), DESTINATION, PORT));
    moves(&mut here, &mut there, &uri);
    source.end();
    destination.end();
}

#[test]
fn migrations_share_the_hosts_budget_by_weight_and_wait_for_a_slot() {
    let hosts = need!(Hosts::new());
    let mut source =
        hosts.source("max-bandwidth = \"2M\"\ncpu-limit = 1.0\nmethod = \"none\"\nmigrations = 2");
    let _destination = hosts.destination("");
    let mut pairs = Vec::new();
    for number in 0..3 {
        let pair = pair(&hosts.link, &parallel(), DESTINATION, PORT + number);
        let (mut here, there, uri) = need!(pair);
        here.qmp.migrate(&uri).expect("migrate");
        let state = if number < 2 {
            "state=active"
        } else {
            "state=waiting"
        };
        source.agent.wait_for(state);
        pairs.push((here, there));
    }
    let active = |source: &Host<'_>| -> Vec<Value> {
        let rows = source.ask(&["list"]);
        let rows = rows.as_array().expect("rows").iter();
        rows.filter(|row| row["status"] == "active")
            .cloned()
            .collect()
    };
    let whole = 2_u32 << 20;
    let sum = |rows: &[Value], key: &str| -> f64 {
        rows.iter()
            .map(|row| row[key].as_f64().expect("a number"))
            .sum()
    };
    // The first one's share is divided again by its own thread.
    let rows = until(
        || format!("two that have no more than all: {:?}", active(&source)),
        || {
            let rows = active(&source);
            let is_divided = sum(&rows, "bandwidth") <= f64::from(whole) + 2.0;
            (rows.len() == 2 && is_divided && sum(&rows, "cores") <= 1.002).then_some(rows)
        },
    );
    let id = rows[0]["id"].as_str().expect("an id").to_owned();
    let (is_done, output) = source.command(&["limit", &id, "--weight", "300"]);
    assert!(is_done, "{output}");
    until(
        || "three quarters go to the one with weight 300".to_owned(),
        || {
            let rows = active(&source);
            let of = |row: &&Value| row["id"].as_str() == Some(&id);
            let share = rows.iter().find(of)?["bandwidth"].as_u64()?;
            (share.abs_diff(u64::from(whole) / 4 * 3) <= 2).then_some(())
        },
    );
    let (is_done, output) = source.command(&["limit", &id, "--max-bandwidth", "100K"]);
    assert!(is_done, "{output}");
    until(
        || "what it may not use goes to the other".to_owned(),
        || {
            let rows = active(&source);
            let share = |is_it: bool| {
                let row = rows
                    .iter()
                    .find(|row| (row["id"].as_str() == Some(&id)) == is_it);
                row?["bandwidth"].as_u64()
            };
            (share(true)? == 100 << 10 && share(false)? > 1 << 20).then_some(())
        },
    );
    // An ended migration makes room for the waiting one.
    let (is_done, output) = source.command(&["cancel", &id]);
    assert!(is_done, "{output}");
    source.agent.wait_for("state=cancelled");
    source.agent.wait_for("state=active");
    for (here, _) in &mut pairs {
        assert!(here.is_running(), "the guests stay until they are there");
    }
    let (is_done, output) = source.command(&["cancel", "00000000"]);
    assert!(
        !is_done && output.contains("no migration with id 00000000"),
        "{output}"
    );
}

#[test]
fn a_migration_cancelled_while_it_waits_for_a_slot_can_be_retried() {
    let hosts = need!(Hosts::new());
    // Its FIN is queued after unread bytes, with two channels on both at once.
    for multifd in [Multifd::Off, Multifd::Channels(2)] {
        println!("multifd {multifd}");
        is_tried_again(&hosts, multifd);
    }
}

fn is_tried_again(hosts: &Hosts, multifd: Multifd) {
    let mut source = hosts.source(&format!("{SLOW}\nmigrations = 1"));
    let _destination = hosts.destination("");
    let (mut first, _there, uri) = need!(pair(&hosts.link, &parallel(), DESTINATION, PORT));
    first.qmp.migrate(&uri).expect("migrate");
    let line = source.agent.wait_for("state=active");
    let id = line.split(['=', ' ']).nth(1).expect("an id").to_owned();
    let side = side(multifd);
    let (mut here, mut there, uri) = need!(pair(&hosts.link, &side, DESTINATION, PORT + 1));
    here.qmp.migrate(&uri).expect("migrate");
    source.agent.wait_for("state=waiting");
    here.qmp.migrate_cancel().expect("migrate_cancel");
    here.reaches("cancelled");
    let before = here.count().expect("it counts");
    until(
        || "the source's QEMU begins a migration".to_owned(),
        || here.qmp.migrate(&uri).ok(),
    );
    source.agent.wait_for("state=waiting");
    until(
        || "the first try has ended".to_owned(),
        || {
            let rows = source.ask(&["list"]);
            let is = |row: &&Value| row["status"] == "waiting";
            let waiting = rows.as_array().expect("rows").iter().filter(is);
            (waiting.count() == 1).then_some(())
        },
    );
    let file = source.folder.join("agent.toml");
    let fast = text(&source.folder, &hosts.source_pki(), "migrations = 1");
    fs::write(&file, fast).expect("a file");
    source.agent.signal(Signal::HUP);
    source.agent.wait_for("was read again");
    let (is_done, output) = source.command(&["cancel", &id]);
    // The first may have ended by now.
    assert!(is_done || output.contains("is under way"), "{output}");
    here.reaches("completed");
    there.reaches("completed");
    there.continues_from(before);
    there.prove();
}

#[test]
fn a_stopping_agent_finishes_running_migrations_and_takes_no_new_ones() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("max-bandwidth = \"8M\"\nmethod = \"none\"");
    let _destination = hosts.destination("");
    let (mut here, mut there, uri) = need!(pair(&hosts.link, &parallel(), DESTINATION, PORT));
    here.qmp.migrate(&uri).expect("migrate");
    source.agent.wait_for("state=active");
    source.agent.signal(Signal::TERM);
    source.agent.wait_for("accepts no new migrations");
    assert!(
        client(&hosts.link, PORT + 9).is_err(),
        "a new connection is closed"
    );
    // At this rate a writing guest would never converge.
    here.qmp.stop().expect("stop");
    here.reaches("completed");
    there.reaches("completed");
    there.prove();
    let (status, output) = source.agent.wait();
    assert!(status.success(), "{output:?}");
}

#[test]
fn a_bad_configuration_is_named_with_its_line_by_agent_check() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("agent.toml");
    let check = || {
        let flag = format!("--config={}", file.display());
        let (status, output) = Hotlift::start(&["agent", "check", &flag]).wait();
        (status.code(), output.join("\n"))
    };
    fs::write(&file, "# nothing\nplaintext = \"perhaps\"\n").expect("a file");
    let (code, output) = check();
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("agent.toml line 2, plaintext"), "{output}");
    assert!(output.contains("`allow` or `refuse`"), "{output}");
    let pki = Pki::new();
    let good = format!("tls = \"{}\"\n", pki.host("a.example").display());
    fs::write(&file, "tls = \"/nowhere\"\n").expect("a file");
    let (code, output) = check();
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("hotlift certs"), "{output}");
    // A certificate of another CA.
    let other = Pki::new();
    let mixed = pki.host("c.example");
    let ca = other.host("d.example").join("ca-cert.pem");
    fs::copy(ca, mixed.join("ca-cert.pem")).expect("a file");
    fs::write(&file, format!("tls = \"{}\"\n", mixed.display())).expect("a file");
    let (code, output) = check();
    assert_eq!(code, Some(1), "{output}");
    for words in [
        "server-cert.pem: it is signed by a CA that this side does not trust",
        "client-cert.pem: it is signed by a CA that this side does not trust",
        "have 2 problems",
    ] {
        assert!(output.contains(words), "{words}: {output}");
    }
    fs::write(&file, good).expect("a file");
    let (code, output) = check();
    assert!(output.contains("a.example, which is neither"), "{output}");
    assert_eq!(
        (code, output.contains("no problem found")),
        (Some(0), true),
        "{output}"
    );
}
