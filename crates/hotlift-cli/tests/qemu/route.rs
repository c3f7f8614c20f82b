//! A machine's route from one QEMU to another: the settings of each QEMU, and the relays between them.

use std::fmt;
use std::path::{Path, PathBuf};

use hotlift_qmp::MigrationInfo;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::hotlift::{Hotlift, Running, errors};
use crate::vm::{Machine, Release, UUID, Vm};

/// Multifd between two parties.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Multifd {
    Off,
    Channels(u8),
}

impl fmt::Display for Multifd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Channels(channels) => write!(f, "{channels}"),
        }
    }
}

/// Settings of one QEMU.
#[derive(Debug, Clone)]
pub struct Side {
    pub multifd: Multifd,
    /// `multifd-compression`.
    pub method: &'static str,
    /// `zero-page-detection`, if QEMU has it and the value differs from the default.
    pub zero_pages: Option<&'static str>,
    /// Capabilities in addition to `multifd`.
    pub capabilities: Vec<&'static str>,
    /// Additional parameters.
    pub parameters: Value,
    /// Folder of its certificates, and its end of a connection: `client` or `server`.
    pub tls: Option<(PathBuf, &'static str)>,
    /// QEMU's property of that name.
    pub verify_peer: bool,
}

impl Side {
    pub fn new(multifd: Multifd) -> Self {
        Self {
            multifd,
            method: "none",
            zero_pages: None,
            capabilities: Vec::new(),
            parameters: LIVELY.clone(),
            tls: None,
            verify_peer: true,
        }
    }

    pub fn method(mut self, method: &'static str) -> Self {
        self.method = method;
        self
    }

    pub fn zero_pages(mut self, mode: Option<&'static str>) -> Self {
        self.zero_pages = mode;
        self
    }

    /// Enables a capability.
    pub fn with(mut self, capability: &'static str) -> Self {
        self.capabilities.push(capability);
        self
    }

    pub fn tls(mut self, folder: &Path, endpoint: &'static str) -> Self {
        self.tls = Some((folder.to_owned(), endpoint));
        self
    }

    pub fn parameters(mut self, parameters: Value) -> Self {
        self.parameters = parameters;
        self
    }

    /// Configures a QEMU. Settings of the source do not harm a destination.
    pub fn apply(&self, vm: &mut Vm) {
        let mut capabilities = vec![("multifd", self.multifd != Multifd::Off)];
        capabilities.extend(self.capabilities.iter().map(|name| (*name, true)));
        vm.qmp
            .set_capabilities(&capabilities)
            .expect("capabilities");
        let mut parameters = self.parameters.clone();
        if let Multifd::Channels(channels) = self.multifd {
            parameters["multifd-channels"] = channels.into();
            parameters["multifd-compression"] = self.method.into();
        }
        if let Some(mode) = self.zero_pages {
            parameters["zero-page-detection"] = mode.into();
        }
        if let Some((folder, endpoint)) = &self.tls {
            let object = json!({
                "qom-type": "tls-creds-x509",
                "id": "tls0",
                "dir": folder,
                "endpoint": endpoint,
                "verify-peer": self.verify_peer,
            });
            let added = vm.qmp.client().execute("object-add", &object);
            added.expect("object-add");
            parameters["tls-creds"] = "tls0".into();
            if parameters["tls-hostname"].is_null() {
                parameters["tls-hostname"] = "localhost".into();
            }
        }
        vm.qmp.set_parameters(&parameters).expect("parameters");
    }
}

/// Rate and downtime at which the guests' RAM takes some rounds.
static LIVELY: std::sync::LazyLock<Value> =
    std::sync::LazyLock::new(|| json!({ "max-bandwidth": 128 << 20, "downtime-limit": 20 }));

/// Two relays of a migration, waiting for the source.
pub struct Relays {
    source: Running,
    /// `None`: one relay does all work.
    destination: Option<Running>,
    /// Address to which the source QEMU sends.
    uri: String,
    /// Address to which the source's relay sends.
    between: String,
}

/// Options between two relays, and of the second relay towards the destination QEMU.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    pub source: Vec<String>,
    /// `None`: the source's relay connects to the destination QEMU.
    pub destination: Option<Vec<String>>,
}

impl RelayOptions {
    /// Returns options for pages in `method` on `channels`, and in the destination QEMU's format.
    pub fn new(method: &str, channels: Multifd, destination: Multifd) -> Self {
        let multifd = |multifd| match multifd {
            Multifd::Off => vec!["--multifd=off".to_owned()],
            Multifd::Channels(channels) => vec![format!("--multifd-channels={channels}")],
        };
        let mut source = multifd(channels);
        source.push(format!("--multifd-compression={method}"));
        Self {
            source,
            destination: Some(multifd(destination)),
        }
    }

    /// Sets the VM's UUID for a relay whose input has no channels that carry it.
    pub fn configure_uuid(&mut self, source: Multifd, between: Multifd) {
        let uuid = format!("--uuid={UUID}");
        if source == Multifd::Off {
            self.source.push(uuid.clone());
        }
        if let Some(options) = &mut self.destination
            && between == Multifd::Off
        {
            options.push(uuid);
        }
    }

    /// Returns options of a single relay that sends pages in `method` on `channels` to the destination QEMU.
    pub fn alone(method: &str, channels: Multifd) -> Self {
        Self {
            destination: None,
            ..Self::new(method, channels, channels)
        }
    }
}

/// Starts `hotlift relay SIDE`, and waits until it listens; returns its address.
pub fn relay(side: &str, listen: &str, connect: &str, options: &[String]) -> (Running, String) {
    let mut arguments = vec![
        "relay",
        side,
        "--listen",
        listen,
        "--connect",
        connect,
        "--json",
    ];
    arguments.extend(options.iter().map(String::as_str));
    let mut relay = Hotlift::start(&arguments);
    let line = relay.wait_for("listening on ");
    let uri = line.rsplit(' ').next().expect("a word").to_owned();
    (relay, uri)
}

impl Relays {
    /// Starts both, with the source's socket in the source's folder; `to` is the address of the destination QEMU.
    pub fn start(source: &Vm, to: &str, options: &RelayOptions) -> Self {
        let mut to = to.to_owned();
        let destination = options.destination.as_ref().map(|options| {
            let (relay, uri) = relay("destination", "tcp:127.0.0.1:0", &to, options);
            to = uri;
            relay
        });
        let (here, uri) = relay("source", &source.uri("relay.sock"), &to, &options.source);
        Self {
            source: here,
            destination,
            uri,
            between: to,
        }
    }

    /// Returns the address to which the source QEMU sends.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Returns the address to which the source's relay sends.
    pub fn between(&self) -> &str {
        &self.between
    }

    /// Kills the relay of `side`, and waits until the other has ended; returns the other's output.
    pub fn kill(self, side: &str) -> String {
        let destination = self.destination.expect("two relays");
        let (killed, other) = match side {
            "source" => (self.source, destination),
            _ => (destination, self.source),
        };
        killed.signal(Signal::KILL);
        let _ = killed.wait();
        other.wait().1.join("\n")
    }

    /// Waits until all have succeeded, and returns their reports, source first.
    pub fn finish(self) -> Vec<Value> {
        let reports = self.finish_with_output().into_iter();
        reports.map(|(report, _)| report).collect()
    }

    /// Waits until all have succeeded; also returns the output of each.
    pub fn finish_with_output(self) -> Vec<(Value, String)> {
        let relays = [
            ("source", Some(self.source)),
            ("destination", self.destination),
        ];
        let there = relays
            .into_iter()
            .filter_map(|(side, relay)| Some((side, relay?)));
        let reports = there.map(|(side, relay)| {
            let (status, output) = relay.wait();
            let output = output.join("\n");
            assert!(status.success(), "relay {side}: {status}\n{output}");
            let line = output.lines().rev().find(|line| line.starts_with('{'));
            let line = line.unwrap_or_else(|| panic!("relay {side} reports nothing:\n{output}"));
            let report = serde_json::from_str(line).expect("a report");
            (report, output)
        });
        reports.collect()
    }
}

/// Waits for a relay that fails, and returns its error.
pub fn failed(side: &str, relay: Running) -> String {
    let (status, output) = relay.wait();
    let reasons = errors(&output);
    assert_eq!(
        status.code(),
        Some(1),
        "relay {side}: {status}\n{}",
        output.join("\n")
    );
    // The error, and the next step if there is one.
    let is_short = matches!(reasons.len(), 1 | 2);
    assert!(is_short, "relay {side}: {}", output.join("\n"));
    reasons[0].clone()
}

/// Route from QEMU to QEMU.
#[derive(Debug, Clone)]
pub struct Route {
    pub source: Side,
    pub destination: Side,
    /// Relays in between, or `None` for a direct connection.
    pub relays: Option<RelayOptions>,
    /// True if the guest runs during the move; otherwise it is stopped before, and RAM of both ends is compared.
    pub live: bool,
}

/// Result of a move.
pub struct Moved {
    pub there: Vm,
    /// The source's statistics.
    pub info: MigrationInfo,
    /// The complete figures.
    pub figures: Value,
    /// Reports of the relays, source first.
    pub reports: Option<Vec<Value>>,
}

impl Route {
    /// Moves `here` into a new QEMU, checks that the guest runs there and nowhere else, and leaves it running. `None`: it
    /// cannot be tested here.
    pub fn take(&self, here: Vm, to: Release) -> Option<Moved> {
        self.take_with(here, to, &[])
    }

    /// Moves a machine that also has `devices`.
    pub fn take_with(&self, mut here: Vm, to: Release, devices: &[String]) -> Option<Moved> {
        let machine: Machine = here.machine.clone();
        let mut there = Vm::waiting_with(to, &machine, devices)?;
        self.source.apply(&mut here);
        self.destination.apply(&mut there);
        let waiting_at = there.uri("incoming");
        there
            .qmp
            .migrate_incoming(&waiting_at, true)
            .expect("migrate-incoming");
        let relays = self
            .relays
            .as_ref()
            .map(|options| Relays::start(&here, &waiting_at, options));

        let before = if self.live {
            here.count()
        } else {
            Some(here.prove())
        };
        let uri = relays.as_ref().map_or(&waiting_at, |relays| &relays.uri);
        here.qmp.migrate(uri).expect("migrate");
        let info = here.reaches("completed");
        let figures = here.qmp.client().execute("query-migrate", &Value::Null);
        let figures = figures.expect("query-migrate");
        let reports = relays.map(Relays::finish);
        there.reaches("completed");
        assert!(!here.is_running(), "the source runs, too");

        // The destination's console lacks the guest's earlier output.
        let before = if self.live {
            before.max(here.count())
        } else {
            assert!(!there.is_running(), "a stopped guest was started");
            differ(&here.ram(), &there.ram());
            there.qmp.cont().expect("cont");
            before
        };
        let before = before.expect("the guest has printed something");
        there.continues_from(before);
        let proven = there.prove();
        there.qmp.cont().expect("cont");
        there.continues_from(proven);
        Some(Moved {
            there,
            info,
            figures,
            reports,
        })
    }
}

/// Panics if RAM of the two ends differs.
pub fn differ(here: &[u8], there: &[u8]) {
    assert_eq!(here.len(), there.len());
    let pages = here.chunks(4096).zip(there.chunks(4096));
    let differing: Vec<usize> = pages
        .enumerate()
        .filter(|(_, (a, b))| a != b)
        .map(|(page, _)| page)
        .collect();
    assert!(
        differing.is_empty(),
        "{} pages differ, the first are {:x?}",
        differing.len(),
        &differing[..differing.len().min(8)]
    );
}
