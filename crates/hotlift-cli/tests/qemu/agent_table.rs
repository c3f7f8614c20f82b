//! Tests the nftables table of an agent: where connections are redirected to, and when the table is loaded and removed.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use hotlift_mem::sock::TcpSending;
use hotlift_testkit::namespace::{DESTINATION, Namespace, SOURCE};
use hotlift_testkit::skip;
use rustix::net::{AddressFamily, SocketType, bind, connect as connect_socket, socket};
use rustix::process::Signal;

use crate::agent::{DESTINATION_6, Host, Hosts, SOURCE_6, remove_table, table, text};
use crate::hotlift::Hotlift;
use crate::need;
use crate::vm::until;

/// A migration port.
const PORT: u16 = 49152;

/// Rules that disable connection tracking for migration ports.
const NOTRACK: &str = "table inet others {
    chain o { type filter hook output priority raw; tcp dport 49152-49215 notrack; }
}";

/// Rules that translate destination addresses before the agent's table.
const DNAT: &str = "table inet others {
    chain o {
        type nat hook output priority -150;
        ip daddr 192.0.2.2 dnat ip to 192.0.2.2
        ip6 daddr 2001:db8::2 dnat ip6 to 2001:db8::2
    }
}";

/// Rules that translate to another port, which is not a migration port.
const TO_OTHER_PORT: &str = "table inet others {
    chain o {
        type nat hook output priority -150;
        ip daddr 192.0.2.2 tcp dport 49152 dnat ip to 192.0.2.2:7000
        ip6 daddr 2001:db8::2 tcp dport 49152 dnat ip6 to [2001:db8::2]:7000
    }
}";

/// Rules of a host that tracks connections for its own reasons.
const TRACKED: &str = "table inet others {
    chain p { type nat hook postrouting priority 100; ip saddr 192.168.122.0/24 masquerade; }
}";

/// Default port to which the table redirects.
const REDIRECT_PORT: u16 = 16521;

/// Connects from the source to a port of the destination, like a QEMU of root.
fn connect(hosts: &Hosts) -> io::Result<TcpStream> {
    let connect = || TcpStream::connect((DESTINATION, PORT));
    hosts.link.source.within(connect).expect("the host")
}

/// Runs `agent run` on the source, which must fail; returns its output.
fn cannot_run(hosts: &Hosts, name: &str, config: &str) -> String {
    let file = hosts.folder.path().join(name);
    fs::write(&file, config).expect("a configuration");
    let flag = format!("--config={}", file.display());
    let run = || Hotlift::start(&["agent", "run", &flag]).wait();
    let (status, printed) = hosts.link.source.within(run).expect("the host");
    assert!(!status.success(), "{printed:?}");
    printed.join("\n")
}

/// Reloads the agent with a new configuration.
fn reload(host: &mut Host<'_>, hosts: &Hosts, config: &str) {
    let file = host.folder.join("agent.toml");
    let text = text(&host.folder, &hosts.source_pki(), config);
    fs::write(&file, text).expect("a configuration");
    host.agent.signal(Signal::HUP);
}

#[test]
fn a_flushed_or_changed_table_is_restored() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("");
    let made = table(source.namespace).expect("a table");
    for change in [
        "flush ruleset",
        "flush table inet hotlift_agent",
        "delete table inet hotlift_agent",
        "insert rule inet hotlift_agent output accept",
        // Like the configuration of Debian's nftables.service.
        "flush ruleset\ntable inet filter {\n\tchain input {\n\t\ttype filter hook input priority 0\n\t}\n}",
    ] {
        let done = source.namespace.tool_with("nft", &["-f", "-"], change);
        done.expect("nft takes it");
        source.agent.wait_for("it is restored");
        let now = table(source.namespace).expect("a table");
        assert_eq!(now, made, "{change}");
    }
    // The agent ignores other tables, and a host that loads the same rules itself.
    let flag = format!("--config={}", source.folder.join("agent.toml").display());
    let (status, rules) = Hotlift::start(&["agent", "rules", &flag]).wait();
    assert!(status.success(), "{rules:?}");
    let own = format!("flush ruleset\n{}", rules.join("\n"));
    let others = ["add table inet others", "delete table inet others", &own];
    for change in others {
        let done = source.namespace.tool_with("nft", &["-f", "-"], change);
        done.expect("nft takes it");
    }
    let printed = source.end();
    assert_eq!(printed.matches("it is restored").count(), 5, "{printed}");
}

#[test]
fn a_process_that_takes_the_port_of_a_killed_agent_gets_no_connection() {
    let hosts = need!(Hosts::new());
    let served = || TcpListener::bind((DESTINATION, PORT)).expect("a port");
    let destination = hosts.link.destination.within(served).expect("the host");
    destination.set_nonblocking(true).expect("a listener");
    for address in ["127.0.0.1", "0.0.0.0", "::"] {
        let source = hosts.source("");
        source.agent.signal(Signal::KILL);
        source.agent.wait();
        // The kernel may close the agent's own socket shortly after its process has ended.
        let bind = || TcpListener::bind((address, REDIRECT_PORT));
        let bound = || hosts.link.source.within(bind).expect("the host").ok();
        let taken = until(|| "the port is free".to_owned(), bound);
        taken.set_nonblocking(true).expect("a listener");
        let error = connect(&hosts).expect_err("no process answers");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
        for listener in [&taken, &destination] {
            let error = listener.accept().expect_err("no connection came");
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        }
    }
    // The agent's port still works.
    let source = hosts.source("");
    let mut stream = connect(&hosts).expect("the agent answers");
    drop(destination);
    let closed = stream.read(&mut [0]);
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    source.end();
}

#[test]
fn where_plaintext_is_refused_the_table_outlives_the_agent_and_a_start_that_fails() {
    let hosts = need!(Hosts::new());
    let host = &hosts.link.source;
    let served = || TcpListener::bind((DESTINATION, PORT)).expect("a port");
    let _destination = hosts.link.destination.within(served).expect("the host");
    for (policy, stays) in [("refuse", true), ("allow", false)] {
        let policy = format!("plaintext = \"{policy}\"\nusers = [\"root\"]\n");
        let failing = format!("{policy}tls = \"/nowhere\"\n");
        let printed = cannot_run(&hosts, "failing.toml", &failing);
        assert_eq!(
            printed.contains("the nftables table stays"),
            stays,
            "{printed}"
        );
        assert_eq!(table(host).is_some(), stays, "after a start that failed");
        assert_eq!(connect(&hosts).is_err(), stays, "no way past the agent");
        remove_table(host);
        let printed = cannot_run(&hosts, "bad.toml", &format!("{policy}bandwidth = 1\n"));
        assert!(printed.contains("invalid configuration"), "{printed}");
        assert_eq!(table(host).is_some(), stays, "without a configuration");
        assert_eq!(connect(&hosts).is_err(), stays, "no way past the agent");
        remove_table(host);
    }
    let source = hosts.source("");
    source.agent.signal(Signal::TERM);
    let (status, printed) = source.agent.wait();
    assert!(status.success(), "{printed:?}");
    assert!(connect(&hosts).is_err(), "no way past the agent");
    remove_table(host);
    assert!(connect(&hosts).is_ok(), "as without an agent");
    remove_table(host);
    // The running agent restores its table when the next one fails.
    let mut source = hosts.source("");
    let made = table(host).expect("a table");
    let second =
        "plaintext = \"allow\"\nports = \"50000\"\nusers = [\"root\"]\ntls = \"/nowhere\"\n";
    cannot_run(&hosts, "second.toml", second);
    source.agent.wait_for("it is restored");
    until(
        || "the table is the first one's".to_owned(),
        || (table(host)? == made).then_some(()),
    );
    source.end();
}

#[test]
fn a_reload_changes_rules_and_log_level_and_shows_the_values_in_force() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("");
    let config = "log = \"debug\"\nlisten = \"tcp::17777\"\nports = \"49150-49199\"\n\
                  destinations = [\"192.0.2.0/24\", \"2001:db8::/32\"]";
    // The file is compared with the running state: the second load changes nothing.
    for _ in 0..2 {
        reload(&mut source, &hosts, config);
        source
            .agent
            .wait_for("'listen' takes effect after a restart");
        source.agent.wait_for("was read again");
        assert_eq!(source.ask(&["status"])["listen"], "tcp::16520");
    }
    let made = table(source.namespace).expect("a table");
    for family in ["ip daddr 192.0.2.0/24", "ip6 daddr 2001:db8::/32"] {
        let rule = format!("{family} tcp dport 49150-49199 redirect to :{REDIRECT_PORT}");
        assert!(made.contains(&rule), "{made}");
    }
    drop(connect(&hosts).expect("the agent answers"));
    let line = format!("a connection to {DESTINATION}:{PORT}");
    source.agent.wait_for(&line);
    reload(&mut source, &hosts, "ports = \"16520\"");
    let refused = source.agent.wait_for("is unchanged");
    assert!(refused.contains("'ports'"), "{refused}");
    assert_eq!(table(source.namespace), Some(made));
    source.end();
}

#[test]
fn users_are_looked_up_at_each_reload_and_those_that_are_missing_are_named() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("");
    let file = source.folder.join("agent.toml");
    let text = text(&source.folder, &hosts.source_pki(), "");
    for (user, number) in [("no-such-user", None), ("nobody", Some("65534"))] {
        let users = format!("[\"root\", \"{user}\"]");
        fs::write(&file, text.replace("[\"root\"]", &users)).expect("a configuration");
        source.agent.signal(Signal::HUP);
        if number.is_none() {
            source.agent.wait_for("lacks these users: no-such-user");
        }
        source.agent.wait_for("was read again");
        let made = table(source.namespace).expect("a table");
        assert_eq!(made.contains("65534"), number.is_some(), "{made}");
    }
    source.end();
}

/// Loads rules on a host, in addition to the agent's.
fn load(host: &Namespace, rules: &str) {
    host.tool_with("nft", &["-f", "-"], rules)
        .expect("nft takes it");
}

/// Removes those rules.
fn unload(host: &Namespace) {
    load(host, "table inet others\ndelete table inet others");
}

/// Lets the destination count arrivals at ports where a test listens, before all other rules.
fn count_arrivals(hosts: &Hosts) {
    let rules = "table inet arrivals {
        counter arrived { }
        chain i {
            type filter hook prerouting priority -400;
            iifname veth tcp dport { 7000, 49152-49215 } counter name arrived
        }
    }";
    load(&hosts.link.destination, rules);
}

/// Returns true if anything has arrived since the last call.
fn has_arrived(hosts: &Hosts) -> bool {
    let line = ["reset", "counter", "inet", "arrivals", "arrived"];
    let printed = hosts.link.destination.tool("nft", &line);
    !printed.expect("a counter").contains("packets 0 ")
}

/// Returns the count of the source's table for an address, read without an agent.
fn counted(host: &Namespace, to: &str) -> Option<u64> {
    let listed = host.tool("nft", &["list", "table", "inet", "hotlift_agent"]);
    let listed = listed.expect("the table");
    let (_, rest) = listed.split_once(&format!("{to} counter packets "))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Returns both addresses of the destination, with a listener each at a migration port.
fn listeners(hosts: &Hosts) -> Vec<(&'static str, TcpListener)> {
    let listen = |to| {
        let served = || TcpListener::bind((to, PORT)).expect("a port");
        (to, hosts.link.destination.within(served).expect("the host"))
    };
    [DESTINATION, DESTINATION_6].map(listen).into()
}

/// Connects from the source.
fn connect_to(hosts: &Hosts, to: &str, port: u16) -> io::Result<TcpStream> {
    let connect = || TcpStream::connect((to, port));
    hosts.link.source.within(connect).expect("the host")
}

/// Connects the source to a migration port without an agent, and returns both ends.
fn connected(hosts: &Hosts, listener: &TcpListener, to: &str) -> (TcpStream, TcpStream) {
    let near = connect_to(hosts, to, PORT).expect("a connection");
    (near, listener.accept().expect("a connection").0)
}

/// Connects the destination from this port to a server at the source, and returns both ends.
fn client_with(hosts: &Hosts, server: &TcpListener, port: u16) -> (TcpStream, TcpStream) {
    let connect = || {
        let client = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        rustix::net::sockopt::set_socket_reuseaddr(&client, true).expect("an option");
        let own: IpAddr = DESTINATION.parse().expect("an address");
        bind(&client, &SocketAddr::new(own, port)).expect("the port");
        let to = server.local_addr().expect("an address");
        connect_socket(&client, &to).expect("a connection");
        TcpStream::from(client)
    };
    let client = hosts.link.destination.within(connect).expect("the host");
    (client, server.accept().expect("a connection").0)
}

#[test]
fn connections_that_miss_the_redirect_are_reset_and_counted() {
    let hosts = need!(Hosts::new());
    let host = &hosts.link.source;
    let _listeners = listeners(&hosts);
    count_arrivals(&hosts);
    let mut source = hosts.source("");
    for rules in [NOTRACK, DNAT, TO_OTHER_PORT] {
        load(host, rules);
        for to in [DESTINATION, DESTINATION_6] {
            let before = counted(host, to);
            let error = connect_to(&hosts, to, PORT).expect_err("no way past the agent");
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{to} {rules}");
            assert!(counted(host, to) > before, "{to} {rules}");
        }
        unload(host);
    }
    for to in [DESTINATION, DESTINATION_6] {
        source.agent.wait_for(&format!("state=refused to={to} "));
    }
    let packets = [DESTINATION, DESTINATION_6].map(|to| counted(host, to).expect("it was counted"));
    let sum: u64 = packets.iter().sum();
    let shown = format!("hotlift_agent_past_redirect_packets_total {sum}");
    let metrics = source.metrics();
    assert!(metrics.contains(&shown), "{shown} is missing in\n{metrics}");
    let before = counted(host, DESTINATION);
    load(host, "insert rule inet hotlift_agent leaving accept");
    source.agent.wait_for("it is restored");
    assert_eq!(
        counted(host, DESTINATION),
        before,
        "a table that is made again"
    );
    source.agent.signal(Signal::KILL);
    source.agent.wait();
    for rules in ["", NOTRACK, DNAT, TO_OTHER_PORT] {
        load(host, rules);
        for to in [DESTINATION, DESTINATION_6] {
            let before = counted(host, to).expect("it was counted");
            let error = connect_to(&hosts, to, PORT).expect_err("no agent carries it");
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{to} {rules}");
            // Without other rules, it is redirected to a port without a listener.
            let is_counted = counted(host, to) > Some(before);
            assert_eq!(is_counted, !rules.is_empty(), "{to} {rules}");
        }
        if !rules.is_empty() {
            unload(host);
        }
    }
    assert!(!has_arrived(&hosts), "a packet has left the host");
    // The next agent keeps the count from the time without an agent.
    let before = counted(host, DESTINATION);
    let mut source = hosts.source("");
    assert_eq!(counted(host, DESTINATION), before);
    source.agent.wait_for(&format!("to={DESTINATION} packets="));
    source.end();
}

#[test]
fn a_forged_packet_mark_does_not_bypass_the_redirect() {
    let hosts = need!(Hosts::new());
    let _listeners = listeners(&hosts);
    count_arrivals(&hosts);
    let source = hosts.source("");
    let rules = "table inet others {
        chain o { type route hook output priority mangle; tcp dport 49152 meta mark set 0x484c; }
    }";
    load(source.namespace, rules);
    for to in [DESTINATION, DESTINATION_6] {
        drop(connect_to(&hosts, to, PORT).expect("the agent answers"));
    }
    assert!(!has_arrived(&hosts), "a packet has left the host");
    source.end();
}

#[test]
fn packets_that_other_rules_change_after_the_last_chain_are_dropped() {
    let hosts = need!(Hosts::new());
    let _listeners = listeners(&hosts);
    count_arrivals(&hosts);
    let source = hosts.source("");
    let rules = format!(
        "table inet others {{
            chain o {{
                type route hook output priority 2147483647
                tcp dport {PORT} ip daddr {SOURCE} ip daddr set {DESTINATION}
                tcp dport {PORT} ip6 daddr {SOURCE_6} ip6 daddr set {DESTINATION_6}
            }}
        }}"
    );
    load(source.namespace, &rules);
    for (own, to) in [(SOURCE, DESTINATION), (SOURCE_6, DESTINATION_6)] {
        // It gets no answer, so the test does not wait for one.
        let own: IpAddr = own.parse().expect("an address");
        let own = SocketAddr::new(own, PORT);
        let begun = || {
            let family = if own.is_ipv4() {
                AddressFamily::INET
            } else {
                AddressFamily::INET6
            };
            let socket = socket(family, SocketType::STREAM, None).expect("a socket");
            rustix::io::ioctl_fionbio(&socket, true).expect("a socket");
            let error = connect_socket(&socket, &own).expect_err("it is not waited for");
            assert_eq!(error, rustix::io::Errno::INPROGRESS);
            socket
        };
        let _socket = source.namespace.within(begun).expect("the host");
        until(
            || format!("a packet to {to} is counted"),
            || counted(source.namespace, to),
        );
    }
    assert!(!has_arrived(&hosts), "a packet has left the host");
    source.end();
}

#[test]
fn a_connection_older_than_the_table_is_reset_unless_it_is_a_servers() {
    let hosts = need!(Hosts::new());
    let host = &hosts.link.source;
    let listeners = listeners(&hosts);
    let server = host.within(|| TcpListener::bind((SOURCE, 7000)));
    let server = server.expect("the host").expect("a port");
    // A separate port for each: the previous one is in TIME_WAIT.
    let mut ports = PORT + 1..;
    let mut served_one = || client_with(&hosts, &server, ports.next().expect("a port"));
    for rules in ["", TRACKED, NOTRACK] {
        for far_is_first in [false, true] {
            if !rules.is_empty() {
                load(host, rules);
            }
            let older: Vec<_> = listeners
                .iter()
                .map(|(to, listener)| connected(&hosts, listener, to))
                .collect();
            let served = served_one();
            let source = hosts.source("");
            for (mut near, mut far) in older {
                if far_is_first {
                    far.write_all(b"!").expect("a byte");
                    near.read_exact(&mut [0]).expect("a byte");
                }
                let error = until(
                    || format!("the connection is reset ({rules})"),
                    || near.write_all(b"memory of a guest").err(),
                );
                let kinds = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
                assert!(kinds.contains(&error.kind()), "{error} {rules}");
                far.set_nonblocking(true).expect("an option");
                let arrived = far.read(&mut [0]).expect_err("nothing has arrived");
                assert_eq!(arrived.kind(), ErrorKind::WouldBlock, "{rules}");
            }
            for to in [DESTINATION, DESTINATION_6] {
                assert!(counted(host, to).is_some(), "{to} {rules}");
            }
            for (mut client, mut near) in [served, served_one()] {
                client.write_all(b"?").expect("a question");
                near.read_exact(&mut [0]).expect("a question");
                near.write_all(b"!").expect("an answer");
                client.read_exact(&mut [0]).expect("an answer");
            }
            source.end();
            if !rules.is_empty() {
                unload(host);
            }
        }
    }
}

/// More than both queues of a connection hold when the peer does not read.
const MORE_THAN_FITS: usize = 16 << 20;

/// Writes until the queues are full.
fn fill(stream: &mut TcpStream) {
    stream.set_nonblocking(true).expect("an option");
    let page = vec![0x5a; 1 << 16];
    let mut written = 0;
    while written < MORE_THAN_FITS {
        match stream.write(&page) {
            Ok(bytes) => written += bytes,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                return;
            }
        }
    }
    panic!("it was read");
}

#[test]
fn unsent_data_of_a_closed_connection_does_not_leave_the_host() {
    let hosts = need!(Hosts::new());
    let host = &hosts.link.source;
    let listeners = listeners(&hosts);
    for rules in [NOTRACK, TRACKED] {
        load(host, rules);
        for (to, listener) in &listeners {
            // Like the channels of a QEMU: one is reset, and QEMU closes the others.
            let (mut first, _far) = connected(&hosts, listener, to);
            let (mut second, mut far) = connected(&hosts, listener, to);
            fill(&mut second);
            // Full only after the answer to a probe without data: a first probe sends the data that still fits.
            let mut last = (Duration::ZERO, 0);
            let there = until(
                || format!("the receive queue is full ({rules})"),
                || {
                    let sending = TcpSending::of(second.as_fd()).expect("a connection");
                    let there = rustix::io::ioctl_fionread(&far).expect("a size");
                    let is_answered = sending.in_flight == 0 && sending.since_last_packet < last.0;
                    let is_full = is_answered && there == last.1;
                    if is_answered || last.1 == 0 {
                        last.1 = there;
                    }
                    last.0 = sending.since_last_packet;
                    is_full.then_some(there)
                },
            );
            let source = hosts.source("");
            until(
                || format!("the first is reset ({rules})"),
                || first.write_all(b"memory of a guest").err(),
            );
            let before = counted(host, to);
            drop(second);
            // With room in the receive queue, the kernel sends more, or its data is refused.
            far.set_nonblocking(true).expect("an option");
            let (mut page, mut arrived) = (vec![0; 1 << 20], 0);
            until(
                || format!("nothing more is refused ({to} {rules})"),
                || {
                    while let Ok(bytes @ 1..) = far.read(&mut page) {
                        arrived += bytes as u64;
                    }
                    assert!(
                        arrived <= there,
                        "{arrived} bytes, not {there} ({to} {rules})"
                    );
                    (counted(host, to) > before).then_some(())
                },
            );
            source.end();
        }
        unload(host);
    }
}

#[test]
fn where_plaintext_is_allowed_connections_that_miss_the_redirect_pass_and_are_counted() {
    let hosts = need!(Hosts::new());
    let host = &hosts.link.source;
    let listeners = listeners(&hosts);
    let works = |(mut near, mut far): (TcpStream, TcpStream)| {
        let mut word = [0; 4];
        near.write_all(b"word").expect("it continues");
        far.read_exact(&mut word).expect("it continues");
        assert_eq!(&word, b"word");
    };
    let [(_, listener), (_, listener_6)] = listeners.as_slice() else {
        panic!("two listeners");
    };
    load(host, TRACKED);
    let older = connected(&hosts, listener_6, DESTINATION_6);
    let mut source = hosts.source("plaintext = \"allow\"");
    // The agent's own connections are not counted as other processes' connections.
    let mut near = connect_to(&hosts, DESTINATION, PORT).expect("the agent answers");
    near.write_all(b"some").expect("the agent reads");
    let (mut far, _) = listener.accept().expect("a connection of the agent");
    far.read_exact(&mut [0; 4]).expect("it passes through");
    works((near, far));
    assert_eq!(counted(host, DESTINATION), None);
    works(older);
    source
        .agent
        .wait_for(&format!("to={DESTINATION_6} packets="));
    unload(host);
    load(host, NOTRACK);
    works(connected(&hosts, listener, DESTINATION));
    let line = source.agent.wait_for(&format!("to={DESTINATION} packets="));
    assert!(line.contains("leave unencrypted"), "{line}");
    let shown = source.ask(&["status"]);
    assert_eq!(shown["plaintext"], "allow");
    let mut addresses: Vec<_> = (0..2)
        .map(|place| shown["past-redirect"][place]["to"].as_str())
        .collect();
    addresses.sort();
    assert_eq!(addresses, [Some(DESTINATION), Some(DESTINATION_6)]);
    source.end();
}

/// Runs a command as a user without privileges, and returns its standard error, as an error if it fails.
fn without_rights(host: &Namespace, command: &[&str]) -> Result<String, String> {
    let run = || Command::new("unshare").arg("--user").args(command).output();
    let output = host.within(run).expect("the host").expect("unshare runs");
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        Ok(printed)
    } else {
        Err(printed)
    }
}

#[test]
fn agent_check_finds_rules_of_others_and_proves_the_redirect_with_a_connection() {
    let hosts = need!(Hosts::new());
    let host = &hosts.link.source;
    count_arrivals(&hosts);
    for config in ["", "plaintext = \"allow\""] {
        let source = hosts.source(config);
        let flag = format!("--config={}", source.folder.join("agent.toml").display());
        let check = || {
            let checked = host.within(|| Hotlift::start(&["agent", "check", &flag]).wait());
            let (status, printed) = checked.expect("the host");
            (status.success(), printed.join("\n"))
        };
        let problems = || source.ask(&["status"])["last-check"]["problems"].clone();
        assert!(problems().is_null(), "there was no check");
        let (is_good, printed) = check();
        assert!(is_good && printed.contains("no problem found"), "{printed}");
        assert!(!printed.contains("not checked"), "{printed}");
        assert_eq!(problems().as_array().map(Vec::len), Some(0));
        for (rules, words, is_shown) in [
            (NOTRACK, "chain o, handle 2: notrack", true),
            (
                DNAT,
                "chain o, handle 2: it translates the destination",
                false,
            ),
        ] {
            load(host, rules);
            let (is_good, printed) = check();
            assert!(!is_good && printed.contains(words), "{printed}");
            // Only other addresses than that of the probe are translated.
            assert_eq!(
                printed.contains("is not redirected (users: 0)"),
                is_shown,
                "{printed}"
            );
            let problems = problems().to_string();
            assert!(problems.contains(words), "{problems}");
            unload(host);
        }
        let (is_good, printed) = check();
        assert!(is_good, "{printed}");
        assert!(
            counted(host, DESTINATION).is_none(),
            "a proof is no migration"
        );
        // A user without privileges, unknown to this process.
        let hotlift = [env!("CARGO_BIN_EXE_hotlift"), "agent", "check", &flag];
        match without_rights(host, &["true"]) {
            Ok(_) => {
                let printed = without_rights(host, &hotlift).expect("no problem is found");
                assert!(
                    printed.contains("not checked, as this needs root"),
                    "{printed}"
                );
            }
            Err(printed) => skip!("user-namespaces", "unshare --user: {printed}"),
        }
        let folder = source.folder.clone();
        source.end();
        // Before an agent runs, there is nothing to check.
        let flag = format!("--config={}", folder.join("agent.toml").display());
        let checked = host.within(|| Hotlift::start(&["agent", "check", &flag]).wait());
        let (status, printed) = checked.expect("the host");
        let printed = printed.join("\n");
        assert!(
            status.success() && printed.contains("not checked, as this needs a running agent"),
            "{printed}"
        );
    }
    assert!(!has_arrived(&hosts), "a packet has left the host");
}
