//! Starts the processes of a case in its network, ready for the migration.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::case::{BuiltIn, Case, ForeignRules, Kind, Pair, Party, PowerChange};
use crate::disk_lock::DiskLock;
use crate::error::KitError;
use crate::machine::{Machine, Settings, qemu_line};
use crate::namespace::{DESTINATION, End, Link, Namespace, PROXY, SOURCE};
use crate::pki::Pki;
use crate::process::{Output, Process, Stream};
use crate::program::Program;
use crate::proxy::Proxy;
use crate::qemu::{PATIENCE, Release};

/// Port on which the destination listens.
pub const PORT: u16 = 7000;
/// Port on which `serve` receives pages.
pub const DATA_PORT: u16 = 7001;

/// First port that libvirt uses for migrations, which agents redirect.
const MIGRATION_PORT: u16 = 49152;
/// Port where agents connect to each other.
pub const AGENT_PORT: u16 = 16520;

/// Size of a disk image that a case locks, in bytes.
const DISK: u64 = 1 << 20;

/// Bandwidth limit of page transfer in bytes per second: a migration takes about a second.
const BANDWIDTH: &str = "64M";

/// Downtime limit, in milliseconds. At [`BANDWIDTH`], the last round is short even over the slow link of a handover.
const DOWNTIME: u32 = 10;

/// Files and programs that all cases use.
#[derive(Debug, Clone)]
pub struct Tools {
    /// Path of the tested `hotlift`.
    pub hotlift: PathBuf,
    /// The guest program that runs in QEMUs.
    pub guest: Arc<Program>,
    /// Folder in which each case creates its files.
    pub files: PathBuf,
}

/// The processes of a case. The fields are dropped in their order: commands, guests, proxies, network.
pub struct Rig {
    /// The source's command: `migrate` or `relay source`.
    pub source_command: Option<Process>,
    /// The destination's command: `serve` or `relay destination`.
    pub destination_command: Option<Process>,
    /// The guest at the source.
    pub here: Machine,
    /// The guest at the destination.
    pub there: Machine,
    /// Proxies in front of the destination.
    pub proxies: Vec<Proxy>,
    /// Proxies in front of the QMP sockets of source and destination; `None` if no command uses the socket.
    pub qmp: [Option<Proxy>; 2],
    /// The network between both hosts.
    pub link: Link,
    /// Original settings of the source's QEMU; `None` if no command changes them.
    pub settings: Option<Settings>,
    /// Sockets that must no longer exist at the end.
    pub sockets: Vec<PathBuf>,
    /// False if a command did not start.
    pub is_ready: bool,
    /// True if a QEMU has the capability of the case enabled.
    pub capability_is_on: bool,
    /// The QEMU process that can lock the destination's disk image.
    pub disk_lock: Option<DiskLock>,
    /// Address to which the source connects: the destination's or a proxy's.
    host: &'static str,
    hotlift: PathBuf,
    folder: PathBuf,
    /// TLS flags of each side's command.
    security: Vec<String>,
}

impl Rig {
    /// Returns the folder in which a case creates its files.
    #[must_use]
    pub fn folder(tools: &Tools, case: &Case) -> PathBuf {
        tools.files.join(format!("case-{}", case.number))
    }

    /// Returns the `TMPDIR` of the processes of a case.
    #[must_use]
    pub fn temporary(tools: &Tools, case: &Case) -> PathBuf {
        Self::folder(tools, case).join("tmp")
    }

    /// Starts all processes of a case.
    ///
    /// # Errors
    /// If the setup fails for a reason that the case does not test.
    pub fn start(tools: &Tools, case: &Case) -> Result<Self, KitError> {
        let folder = Self::folder(tools, case);
        let temporary = Self::temporary(tools, case);
        for folder in [folder.join("here"), folder.join("there"), temporary] {
            fs::create_dir_all(folder).map_err(KitError::system("make a folder"))?;
        }
        let link = Link::new(case.net.mtu, case.net.orphan_retries)?;
        let mut proxies = Vec::new();
        if let Some(end_mapping) = case.net.proxy {
            for port in [PORT, DATA_PORT] {
                proxies.push(Proxy::tcp(&link.destination, port, end_mapping)?);
            }
        }
        let host = match case.net.proxy {
            Some(_) => PROXY,
            None => DESTINATION,
        };
        let builder = Builder {
            tools,
            case,
            security: security(tools, case, &folder)?,
            folder,
            host,
        };
        match case.pair {
            Pair::BuiltIn { .. } => builder.built_in(link, proxies),
            Pair::Steered { from, to, started } => {
                builder.steered(link, proxies, from, to, started)
            }
            Pair::Relays { from, to } => builder.relays(link, proxies, from, to),
            Pair::Agents { from, to, channels } => builder.agents(link, from, to, channels),
        }
    }

    /// Starts the migration of a case.
    ///
    /// # Errors
    /// If the source does not start the migration.
    pub fn migrate(&mut self, case: &Case) -> Result<(), KitError> {
        match case.pair {
            Pair::BuiltIn {
                monitored: true, ..
            } => {
                let uri = format!("tcp:{}:{PORT}", self.host);
                self.here.migrate(&uri)
            }
            // The migration has already started: `--migrate-to` starts it.
            Pair::BuiltIn { .. } => Ok(()),
            Pair::Steered { .. } => {
                let arguments = [
                    "migrate".to_owned(),
                    format!("--qmp={}", self.folder.join("here/qmp.stalls").display()),
                    format!("--to=tcp:{}:{PORT}", self.host),
                    "--method=zstd".to_owned(),
                    format!("--max-bandwidth={BANDWIDTH}"),
                    format!("--downtime-limit={DOWNTIME}"),
                ];
                let devices = devices(case, Party::SourceCommand);
                let mut command = Command::new(&self.hotlift);
                command
                    .args(arguments)
                    .args(&self.security)
                    .env("TMPDIR", self.folder.join("tmp"));
                let host = &self.link.source;
                let started = Process::start("migrate", Some(host), command, &devices)?;
                self.source_command = Some(started);
                Ok(())
            }
            Pair::Relays { .. } => {
                let uri = format!("unix:{}", self.folder.join("here/relay").display());
                self.here.migrate(&uri)
            }
            Pair::Agents { .. } => {
                let uri = format!("tcp:{DESTINATION}:{MIGRATION_PORT}");
                self.here.migrate(&uri)
            }
        }
    }

    /// Returns the process of a party; `None` if the test has not started it.
    pub fn process(&mut self, party: Party) -> Option<&mut Process> {
        match party {
            Party::SourceGuest => self.here.process(),
            Party::SourceCommand => self.source_command.as_mut(),
            Party::DestinationCommand => self.destination_command.as_mut(),
            Party::DestinationGuest => self.there.process(),
        }
    }

    /// Loads firewall rules of another program on the source's host.
    ///
    /// # Errors
    /// If `nft` fails.
    pub fn load_foreign(&self, rules: ForeignRules) -> Result<(), KitError> {
        let ports = "tcp dport 49152-49215";
        // nftables(8): the priority of the agent's nat chain is -100.
        let chain = match rules {
            ForeignRules::Notrack => {
                format!("type filter hook output priority raw; {ports} notrack;")
            }
            ForeignRules::EarlierAccept => {
                format!("type nat hook output priority -150; {ports} accept;")
            }
            ForeignRules::EarlierDnat => format!(
                "type nat hook output priority -150; \
                 ip daddr {DESTINATION} {ports} dnat ip to {DESTINATION};"
            ),
            ForeignRules::Mark => {
                format!("type route hook output priority mangle; {ports} meta mark set 0x10;")
            }
            ForeignRules::Masquerade => {
                "type nat hook postrouting priority srcnat; oifname veth masquerade;".to_owned()
            }
        };
        let table = format!("table inet foreign {{\nchain rules {{ {chain} }}\n}}\n");
        let host = &self.link.source;
        host.tool_with("nft", &["-f", "-"], &table).map(drop)
    }

    /// Sends a signal to the process of a party.
    pub fn signal(&mut self, party: Party, signal: rustix::process::Signal) {
        match party {
            Party::SourceGuest => self.here.signal(signal),
            Party::DestinationGuest => self.there.signal(signal),
            command => {
                if let Some(process) = self.process(command) {
                    process.signal(signal);
                }
            }
        }
    }
}

/// Returns the outputs of a party that must be `/dev/full` from the start.
fn devices(case: &Case, party: Party) -> Vec<Stream> {
    let device = |kind: &Kind| match kind {
        Kind::Output {
            party: whose,
            stream,
            output: Output::Device,
        } if *whose == party => Some(*stream),
        _ => None,
    };
    case.faults
        .iter()
        .filter_map(|fault| device(&fault.kind))
        .collect()
}

/// Returns the TLS flags for each side of a case. Creates the certificates if the case uses TLS.
fn security(tools: &Tools, case: &Case, folder: &Path) -> Result<Vec<String>, KitError> {
    if let Pair::Agents { .. } = case.pair {
        // Each agent has its own certificates.
        return Ok(Vec::new());
    }
    if !case.net.tls {
        return Ok(vec!["--insecure=on".to_owned()]);
    }
    let folder = folder.join("pki");
    for words in [["init", "--name=campaign"], ["host", "localhost"]] {
        let mut made = Command::new(&tools.hotlift);
        made.arg("certs").args(words).arg("--dir").arg(&folder);
        let output = made
            .output()
            .map_err(KitError::system("run 'hotlift certs'"))?;
        if !output.status.success() {
            let printed = String::from_utf8_lossy(&output.stderr).into_owned();
            let printed = std::io::Error::other(printed);
            return Err(KitError::system("make certificates")(printed));
        }
    }
    Ok(vec![
        format!("--tls-creds={}", folder.display()),
        "--tls-hostname=localhost".to_owned(),
    ])
}

struct Builder<'a> {
    tools: &'a Tools,
    case: &'a Case,
    folder: PathBuf,
    host: &'static str,
    security: Vec<String>,
}

impl Builder<'_> {
    fn hotlift(
        &self,
        name: &str,
        host: &Namespace,
        party: Party,
        arguments: &[String],
    ) -> Result<Process, KitError> {
        let mut command = Command::new(&self.tools.hotlift);
        command
            .args(arguments)
            .env("TMPDIR", self.folder.join("tmp"));
        Process::start(name, Some(host), command, &devices(self.case, party))
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    fn built_in(self, link: Link, proxies: Vec<Proxy>) -> Result<Rig, KitError> {
        let Pair::BuiltIn {
            guest,
            vcpus,
            channels,
            monitored,
        } = self.case.pair
        else {
            unreachable!("the caller has looked");
        };
        let guest = match guest {
            BuiltIn::Threads => "threads",
            BuiltIn::Kvm => "kvm",
        };
        let mut common = vec![
            "guest".to_owned(),
            "run".to_owned(),
            format!("--guest={guest}"),
            format!("--vcpus={vcpus}"),
            "--ram=64M".to_owned(),
            "--rate=200".to_owned(),
        ];
        common.extend(self.security.clone());
        common.extend(match channels {
            0 => vec!["--multifd=off".to_owned()],
            channels => vec![
                "--multifd=on".to_owned(),
                format!("--multifd-channels={channels}"),
            ],
        });
        let with = |more: &[String]| [&common[..], more].concat();
        let (at_here, at_there) = (self.path("here/control"), self.path("there/control"));
        let there = self.hotlift(
            "guest run --incoming",
            &link.destination,
            Party::DestinationGuest,
            &with(&[
                format!("--incoming=tcp:{DESTINATION}:{PORT}"),
                format!("--control={at_there}"),
            ]),
        )?;
        let there = Machine::built_in(there, Some(PathBuf::from(&at_there)))?;
        let (more, socket) = match monitored {
            true => (
                [
                    format!("--control={at_here}"),
                    "--pause-before-switchover=on".to_owned(),
                ],
                Some(PathBuf::from(&at_here)),
            ),
            false => (
                [
                    format!("--migrate-to=tcp:{}:{PORT}", self.host),
                    "--migrate-after=0.2".to_owned(),
                ],
                None,
            ),
        };
        let limits = [
            format!("--max-bandwidth={BANDWIDTH}"),
            format!("--downtime-limit={DOWNTIME}"),
        ];
        let here = self.hotlift(
            "guest run",
            &link.source,
            Party::SourceGuest,
            &with(&[&more[..], &limits].concat()),
        )?;
        let here = Machine::built_in(here, socket)?;
        let sockets = [at_here, at_there].map(PathBuf::from).into();
        self.done(link, proxies, here, there, sockets)
    }

    fn steered(
        self,
        link: Link,
        proxies: Vec<Proxy>,
        from: Release,
        to: Release,
        started: bool,
    ) -> Result<Rig, KitError> {
        let mut here = self.qemu(None, from, "here", false)?;
        let mut capability_is_on = self.switch_capability(End::Source, &mut here);
        let settings = here.settings()?;
        let stalls = |end: &str| -> Result<Proxy, KitError> {
            let folder = self.folder.join(end);
            Proxy::unix(&folder.join("qmp.stalls"), &folder.join("qmp"))
        };
        let mut arguments = vec![
            "serve".to_owned(),
            format!("--listen=tcp:{DESTINATION}:{PORT}"),
            format!("--data-port={DATA_PORT}"),
        ];
        // Only `migrate` connects to a host by its name.
        let security = self.security.iter();
        arguments.extend(
            security
                .filter(|flag| !flag.starts_with("--tls-hostname"))
                .cloned(),
        );
        let (there, mut qmp) = if started {
            let folder = self.folder.join("there");
            arguments.push("--".to_owned());
            arguments.extend(self.line(to, "there")?);
            (Machine::adopted(&self.tools.guest, &folder), [None, None])
        } else {
            let mut there = self.qemu(None, to, "there", true)?;
            capability_is_on |= self.switch_capability(End::Destination, &mut there);
            let proxy = stalls("there")?;
            arguments.push(format!("--qmp={}", self.path("there/qmp.stalls")));
            (there, [None, Some(proxy)])
        };
        let disk_lock = if self.has_disk() {
            let image = self.folder.join("there/disk");
            Some(DiskLock::prepare(&qemu_program(to)?, &image)?)
        } else {
            None
        };
        qmp[0] = Some(stalls("here")?);
        let party = Party::DestinationCommand;
        let serve = self.hotlift("serve", &link.destination, party, &arguments)?;
        let mut rig = self.done(link, proxies, here, there, Vec::new())?;
        rig.qmp = qmp;
        rig.capability_is_on = capability_is_on;
        rig.disk_lock = disk_lock;
        rig.settings = Some(settings);
        rig.is_ready = listens(&rig.link.destination, serve, &mut rig.destination_command)?;
        Ok(rig)
    }

    fn relays(
        self,
        link: Link,
        proxies: Vec<Proxy>,
        from: Release,
        to: Release,
    ) -> Result<Rig, KitError> {
        let mut here = self.qemu(None, from, "here", false)?;
        let mut there = self.qemu(None, to, "there", true)?;
        let names = ["multifd", "return-path", "pause-before-switchover"];
        let capabilities = names.map(|name| (name, true));
        let parameters = json!({
            "multifd-channels": 2,
            "max-bandwidth": 64 << 20,
            "downtime-limit": DOWNTIME,
        });
        here.with_qmp(|qmp| {
            qmp.set_capabilities(&capabilities)?;
            qmp.set_parameters(&parameters)
        })?;
        let incoming = format!("unix:{}", self.path("there/incoming"));
        there.with_qmp(|qmp| {
            qmp.set_capabilities(&capabilities[..1])?;
            qmp.set_parameters(&json!({ "multifd-channels": 2 }))?;
            qmp.migrate_incoming(&incoming, true)
        })?;
        let relay = |side: &str, listen: &str, connect: &str| {
            let mut arguments = vec![
                "relay".to_owned(),
                side.to_owned(),
                format!("--listen={listen}"),
                format!("--connect={connect}"),
                "--multifd-channels=2".to_owned(),
            ];
            arguments.extend(self.security.clone());
            arguments
        };
        let at = format!("tcp:{DESTINATION}:{PORT}");
        let destination = self.hotlift(
            "relay destination",
            &link.destination,
            Party::DestinationCommand,
            &relay("destination", &at, &incoming),
        )?;
        let socket = self.folder.join("here/relay");
        let source = self.hotlift(
            "relay source",
            &link.source,
            Party::SourceCommand,
            &relay(
                "source",
                &format!("unix:{}", socket.display()),
                &format!("tcp:{}:{PORT}", self.host),
            ),
        )?;
        let sockets = vec![socket.clone()];
        let mut rig = self.done(link, proxies, here, there, sockets)?;
        rig.is_ready = listens(
            &rig.link.destination,
            destination,
            &mut rig.destination_command,
        )?;
        rig.is_ready &= appears(&socket, source, &mut rig.source_command)?;
        Ok(rig)
    }

    /// Starts QEMUs without a monitor for the test, and an agent on each host, as with libvirt.
    fn agents(self, link: Link, from: Release, to: Release, channels: u8) -> Result<Rig, KitError> {
        link.watch_plaintext(AGENT_PORT)?;
        let pki = Pki::new();
        let mut agents = Vec::new();
        for (end, host, address, party) in [
            ("here", &link.source, SOURCE, Party::SourceCommand),
            (
                "there",
                &link.destination,
                DESTINATION,
                Party::DestinationCommand,
            ),
        ] {
            // The kernel must not use a migration port as the local port of an outgoing connection.
            let reserved = "net.ipv4.ip_local_reserved_ports=49152-49215";
            host.tool("sysctl", &["-qw", reserved])?;
            let folder = self.folder.join(end);
            pki.host_in(&folder.join("pki"), &[address]);
            let config = format!(
                "tls = \"{0}/pki\"\ncontrol = \"{0}/agent\"\nusers = [\"root\"]\ndrain-limit = \"1s\"\n",
                folder.display()
            );
            let file = folder.join("agent.toml");
            fs::write(&file, config).map_err(KitError::system("write agent.toml"))?;
            let arguments = ["agent", "run", &format!("--config={}", file.display())];
            let arguments = arguments.map(str::to_owned);
            let mut agent = self.hotlift("agent run", host, party, &arguments)?;
            agent.wait_for("listening on ", PATIENCE)?;
            agents.push(agent);
        }
        let mut here = self.qemu(Some(&link.source), from, "here", false)?;
        let mut there = self.qemu(Some(&link.destination), to, "there", true)?;
        let capabilities = [("return-path", true), ("multifd", channels > 0)];
        let multifd = json!({ "multifd-channels": channels.max(1) });
        here.with_qmp(|qmp| {
            qmp.set_capabilities(&capabilities)?;
            qmp.set_parameters(&multifd)?;
            qmp.set_parameters(&json!({ "max-bandwidth": 64 << 20, "downtime-limit": DOWNTIME }))
        })?;
        let incoming = format!("tcp:{DESTINATION}:{MIGRATION_PORT}");
        there.with_qmp(|qmp| {
            qmp.set_capabilities(&capabilities)?;
            qmp.set_parameters(&multifd)?;
            qmp.migrate_incoming(&incoming, true)
        })?;
        let sockets = ["here/agent", "there/agent"].map(|name| self.folder.join(name));
        let mut rig = self.done(link, Vec::new(), here, there, sockets.into())?;
        rig.destination_command = agents.pop();
        rig.source_command = agents.pop();
        Ok(rig)
    }

    fn has_disk(&self) -> bool {
        self.case.has(|kind| *kind == Kind::LockedDisk)
    }

    /// Enables the capability of the case in the QEMU at `end`. Returns false if the case has no capability for this
    /// side, or QEMU rejects it.
    fn switch_capability(&self, end: End, machine: &mut Machine) -> bool {
        let mut kinds = self.case.faults.iter().map(|fault| fault.kind);
        let name = kinds.find_map(|kind| match kind {
            Kind::CapabilityOn { at, name } if at == end => Some(name.name()),
            _ => None,
        });
        let mut on = |name| machine.with_qmp(|qmp| qmp.set_capabilities(&[(name, true)]));
        name.is_some_and(|name| on(name).is_ok())
    }

    /// Returns the command line of the QEMU of one side.
    fn line(&self, release: Release, end: &str) -> Result<Vec<String>, KitError> {
        let folder = self.folder.join(end);
        let mut more = Vec::new();
        if self.has_disk() {
            let image = folder.join("disk");
            let file = fs::File::create(&image).and_then(|file| file.set_len(DISK));
            file.map_err(KitError::system("make a disk image"))?;
            more.extend([
                "-drive".to_owned(),
                format!("file={},format=raw,if=virtio", image.display()),
            ]);
        }
        for fault in &self.case.faults {
            more.extend(
                match fault.kind {
                    Kind::Power {
                        change: PowerChange::Off,
                    } => &["-no-reboot"][..],
                    Kind::Power {
                        change: PowerChange::OffKept,
                    } => &["-no-reboot", "-no-shutdown"],
                    _ => &[],
                }
                .iter()
                .map(|&flag| flag.to_owned()),
            );
        }
        qemu_line(&qemu_program(release)?, &self.tools.guest, &folder, &more)
    }

    fn qemu(
        &self,
        host: Option<&Namespace>,
        release: Release,
        end: &str,
        incoming: bool,
    ) -> Result<Machine, KitError> {
        let folder = self.folder.join(end);
        let temporary = self.folder.join("tmp");
        let line = self.line(release, end)?;
        Machine::qemu(
            host,
            &line,
            &self.tools.guest,
            &folder,
            incoming,
            &temporary,
        )
    }

    fn done(
        self,
        link: Link,
        proxies: Vec<Proxy>,
        here: Machine,
        there: Machine,
        sockets: Vec<PathBuf>,
    ) -> Result<Rig, KitError> {
        Ok(Rig {
            source_command: None,
            destination_command: None,
            here,
            there,
            proxies,
            qmp: [None, None],
            link,
            settings: None,
            sockets,
            is_ready: true,
            capability_is_on: false,
            disk_lock: None,
            host: self.host,
            hotlift: self.tools.hotlift.clone(),
            folder: self.folder,
            security: self.security,
        })
    }
}

fn qemu_program(release: Release) -> Result<PathBuf, KitError> {
    release.find().ok_or_else(|| KitError::Memory {
        problem: format!("QEMU {release:?} is not there"),
    })
}

/// Waits until a process listens at [`PORT`] of its host. Returns false if the process ends first. Does not connect,
/// because the connection would count as an unknown client.
fn listens(
    host: &Namespace,
    process: Process,
    place: &mut Option<Process>,
) -> Result<bool, KitError> {
    // proc(5), /proc/net/tcp: addresses are hexadecimal, and state 0A is LISTEN.
    let entry = format!(":{PORT:04X} 00000000:0000 0A");
    let looks = || -> Result<bool, KitError> {
        let table = host.within(|| fs::read_to_string("/proc/thread-self/net/tcp"))?;
        Ok(table.is_ok_and(|table| {
            // The proxy listens on another address.
            table
                .lines()
                .any(|line| line.contains(&entry) && line.contains("020200C0"))
        }))
    };
    waits(process, place, looks)
}

/// Waits until a process listens on a UNIX socket. The file of the socket exists slightly earlier.
fn appears(socket: &Path, process: Process, place: &mut Option<Process>) -> Result<bool, KitError> {
    let table = format!("/proc/{}/net/unix", process.pid().as_raw_nonzero());
    let end = format!(" {}", socket.display());
    // proc(5): flag 10000 marks a listening socket.
    let listens = |line: &str| line.ends_with(&end) && line.contains(" 00010000 ");
    waits(process, place, || {
        let table = fs::read_to_string(&table).unwrap_or_default();
        Ok(table.lines().any(listens))
    })
}

fn waits(
    process: Process,
    place: &mut Option<Process>,
    mut done: impl FnMut() -> Result<bool, KitError>,
) -> Result<bool, KitError> {
    let process = place.insert(process);
    let deadline = Instant::now() + PATIENCE;
    while !done()? {
        if process.ended().is_some() || Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}

/// Returns the index of a side in [`Rig::qmp`].
#[must_use]
pub fn index(end: End) -> usize {
    match end {
        End::Source => 0,
        End::Destination => 1,
    }
}
