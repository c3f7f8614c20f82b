//! Runs both sides of a migration, and determines where the guest is afterwards.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use hotlift::figures::{DestinationReport, SourceReport};
use hotlift::guest::Guest;
use hotlift::progress::Progress;
use hotlift::{Address, Control, Listener, MigrationError, Options, Status};
use hotlift_mem::{Backing, probe_userfault};
use hotlift_vmm::fill::{FillSettings, FillSource};
use hotlift_vmm::workload::Workload;
use hotlift_vmm::{GuestKind, GuestSettings, best_kind, create};
use hotlift_wire::RamBlockEntry;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, getsockname, socket_with,
};

use crate::probe::{Probe, Quirks};

/// Far beyond the duration of any of these migrations. A longer one is cancelled and counts as hung.
pub const BOUND: Duration = Duration::from_secs(60);

/// Returns true if this host supports missing pages; prints if not.
pub fn has_userfault() -> bool {
    match probe_userfault() {
        Ok(_) => true,
        Err(error) => {
            hotlift_testkit::skip!("userfaultfd", "{error}");
            false
        }
    }
}

/// Waits for a state of a migration.
pub fn reaches(control: &Control, status: Status) {
    let begun = Instant::now();
    while control.status() != status {
        assert!(begun.elapsed() < BOUND, "{:?}", control.status());
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the guests that this machine can run; prints the others.
pub fn kinds() -> Vec<GuestKind> {
    match best_kind() {
        (GuestKind::Kvm, _) => GuestKind::ALL.to_vec(),
        (GuestKind::Threads, why) => {
            hotlift_testkit::skip!("kvm", "{why:?}");
            vec![GuestKind::Threads]
        }
    }
}

/// Returns settings of a small guest with 1 MiB of working set.
pub fn settings() -> GuestSettings {
    GuestSettings {
        ram_bytes: 8 << 20,
        backing: Backing::Private,
        vcpus: 1,
        workload: Workload::Random,
        rate: 20_000,
        working_set: Some(1 << 20),
        seed: 7,
        uuid: *b"hotlift e2e uuid",
    }
}

/// Returns a running guest.
pub fn source(kind: GuestKind, settings: &GuestSettings, quirks: Quirks) -> Probe {
    let guest = create(kind, settings).unwrap();
    guest
        .fill(&FillSettings {
            source: FillSource::Generated,
            zero_share: 0.4,
            zero_touched: false,
            seed: 3,
        })
        .unwrap();
    let probe = Probe::new(guest, quirks);
    probe.start();
    probe
}

/// Returns RAM blocks in the stream's form.
pub fn blocks(guest: &dyn Guest) -> Vec<RamBlockEntry> {
    let blocks = guest.ram().iter();
    blocks
        .map(|block| RamBlockEntry::new(block.name(), block.len() as u64))
        .collect()
}

/// Returns a guest as the target of a migration.
pub fn destination(kind: GuestKind, settings: &GuestSettings, quirks: Quirks) -> Probe {
    Probe::new(create(kind, settings).unwrap(), quirks)
}

/// Listens on a port of the system's choice.
pub fn listen() -> (Listener, Address) {
    let listener = "tcp:127.0.0.1:0"
        .parse::<Address>()
        .unwrap()
        .listen()
        .unwrap();
    let address = listener.address().unwrap();
    (listener, address)
}

/// Returns a socket at `path`, or on a port of the system's choice, whose queue of one connection is never accepted.
pub fn listen_without_room(path: Option<&Path>) -> (OwnedFd, Address) {
    let family = path.map_or(AddressFamily::INET, |_| AddressFamily::UNIX);
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    if let Some(path) = path {
        bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    } else {
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    }
    rustix::net::listen(&socket, 0).unwrap();
    let address = path.map_or_else(
        || {
            let local = SocketAddr::try_from(getsockname(&socket).unwrap()).unwrap();
            format!("tcp:{local}")
        },
        |path| format!("unix:{}", path.display()),
    );
    (socket, address.parse().unwrap())
}

/// Waits until a client has connected.
pub fn wait_readable(socket: &OwnedFd) {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let bound = Timespec::try_from(BOUND).unwrap();
    assert_eq!(rustix::event::poll(&mut fds, Some(&bound)), Ok(1));
}

/// Results of both ends of a migration.
pub struct Ended {
    pub source: Result<SourceReport, MigrationError>,
    pub destination: Result<DestinationReport, MigrationError>,
    /// True if it had to be cancelled.
    pub hung: bool,
    /// Duration of the slower end.
    pub took: Duration,
}

/// Runs one migration, both ends with the same options.
pub fn migrate(
    source: &Probe,
    destination: &Probe,
    listener: Listener,
    to: &Address,
    options: &Options,
) -> Ended {
    let controls = [Control::new(), Control::new()];
    run(
        source,
        destination,
        listener,
        to,
        [options, options],
        &controls,
        &|_| {},
    )
}

/// Runs one migration over a port of the system's choice; `options` are the source's and the destination's.
pub fn between(source: &Probe, destination: &Probe, options: [&Options; 2]) -> Ended {
    let (listener, to) = listen();
    let controls = [Control::new(), Control::new()];
    run(
        source,
        destination,
        listener,
        &to,
        options,
        &controls,
        &|_| {},
    )
}

/// Runs one migration; `options` and `controls` are the source's and the destination's.
pub fn run(
    source: &Probe,
    destination: &Probe,
    listener: Listener,
    to: &Address,
    options: [&Options; 2],
    controls: &[Control; 2],
    on_progress: &(dyn Fn(&Progress) + Sync),
) -> Ended {
    let start = Instant::now();
    let (done, ends) = channel();
    thread::scope(|scope| {
        let done_there = done.clone();
        let there = scope.spawn(move || {
            let outcome = hotlift::receive(destination, listener, options[1], &controls[1]);
            let _ = done_there.send(());
            outcome
        });
        let here = scope.spawn(move || {
            let outcome = hotlift::migrate(source, to, options[0], &controls[0], on_progress);
            // A destination that has seen no migration keeps waiting for one.
            if outcome.is_err() && controls[1].status() == Status::Setup {
                controls[1].cancel();
            }
            let _ = done.send(());
            outcome
        });
        let mut hung = false;
        let mut grace = BOUND;
        for _ in 0..2 {
            if ends.recv_timeout(grace).is_err() {
                hung = true;
                controls.iter().for_each(Control::cancel);
                let _ = ends.recv();
            }
            // If the source cannot connect, the destination learns of nothing.
            grace = BOUND.saturating_sub(start.elapsed());
        }
        Ended {
            source: here.join().unwrap(),
            destination: there.join().unwrap(),
            hung,
            took: start.elapsed(),
        }
    })
}

/// Side that has the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    Source,
    Destination,
}

impl Ended {
    /// Returns the side with the guest. An error if it is both or none, if the memory is wrong, or if the results of the two
    /// sides are inconsistent.
    pub fn holder(&self, source: &Probe, destination: &Probe) -> Result<Holder, String> {
        if self.hung {
            return Err("it hung".to_owned());
        }
        let (holder, has, has_not) = match (source.runs(), destination.runs()) {
            (true, false) => (Holder::Source, source, destination),
            (false, true) => (Holder::Destination, destination, source),
            (true, true) => return Err("both run the guest".to_owned()),
            (false, false) => return Err("the guest runs nowhere".to_owned()),
        };
        let still = has_not.guest.writes();
        has.let_write(50)?;
        if has_not.guest.writes() != still {
            return Err(format!("{holder:?} has the guest, but the other writes"));
        }
        has.check()?;
        match (holder, &self.source, &self.destination) {
            (Holder::Source, Err(_), Err(_)) | (Holder::Destination, _, Ok(_)) => Ok(holder),
            (_, source, destination) => Err(format!(
                "{holder:?} has the guest, but the source returned {source:?}, the destination \
                 {destination:?}"
            )),
        }
    }

    /// Asserts that the guest has arrived whole and that both sides counted the same pages; returns their reports.
    pub fn arrived(
        self,
        source: &Probe,
        destination: &Probe,
        what: &str,
    ) -> (SourceReport, DestinationReport) {
        let holder = self.holder(source, destination);
        let errors = self.errors();
        assert_eq!(holder, Ok(Holder::Destination), "{what}: {errors:?}");
        let (Ok(sent), Ok(received)) = (self.source, self.destination) else {
            panic!("{what}: the guest has arrived, but {errors:?}");
        };
        assert_eq!(
            (sent.normal_pages, sent.zero_pages),
            (received.normal_pages, received.zero_pages),
            "{what}"
        );
        (sent, received)
    }

    /// Asserts that the guest has stayed, whole; returns both sides' errors.
    pub fn stayed(&self, source: &Probe, destination: &Probe) -> (String, String) {
        let errors = self.errors();
        let holder = self.holder(source, destination);
        assert_eq!(holder, Ok(Holder::Source), "{errors:?}");
        errors
    }

    /// Returns both errors, each in one line.
    pub fn errors(&self) -> (String, String) {
        let line =
            |error: Option<&MigrationError>| error.map_or("ok".to_owned(), MigrationError::chain);
        (
            line(self.source.as_ref().err()),
            line(self.destination.as_ref().err()),
        )
    }

    /// Returns true if either end detected the fault only by a timeout.
    pub fn timed_out(&self) -> bool {
        let timeout = |error: &MigrationError| {
            matches!(error, MigrationError::Timeout { .. })
                || error.chain().contains("did not arrive within")
        };
        self.source.as_ref().is_err_and(timeout) || self.destination.as_ref().is_err_and(timeout)
    }
}
