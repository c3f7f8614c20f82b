//! Runs a source, relays and a destination in one process, connected by sockets.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::relay::{Hooks, Incoming, Outgoing, Ownership, RelayReport, RelaySettings, relay};
use hotlift::transport::Stream;
use hotlift::{Address, Control, Listener, MigrationError, MigrationEvent, Options, Status};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;

use super::destination::{Arrived, Destination, Failure, Moment};
use super::log::{Event, Log};
use super::recording::Recording;
use super::source::{Ending, ReceivedMessages, play};

/// Longer than any step takes on any machine: after it the step hangs.
pub const DEADLINE: Duration = Duration::from_secs(40);

/// Callback that returns the source's ownership of the guest.
pub type AsksOwnership = Box<dyn Fn() -> Ownership + Send + Sync>;

/// A running relay.
pub struct Relay {
    pub address: Address,
    pub control: Control,
    events: Arc<Mutex<Vec<MigrationEvent>>>,
    outcome: Receiver<Result<RelayReport, MigrationError>>,
    _folder: TempDir,
}

/// Listens on a UNIX socket, as next to a QEMU, or on TCP, as between hosts.
pub fn listen(over_tcp: bool) -> (TempDir, Listener, Address) {
    let folder = tempfile::tempdir().unwrap();
    let uri = if over_tcp {
        "tcp:127.0.0.1:0".to_owned()
    } else {
        format!("unix:{}", folder.path().join("socket").display())
    };
    let listener = uri.parse::<Address>().unwrap().listen().unwrap();
    let address = listener.address().unwrap();
    (folder, listener, address)
}

/// Returns the next connection; `None` if none comes within `wait`.
pub fn accept(listener: &Listener, wait: Duration) -> Option<Stream> {
    let wait = Timespec::try_from(wait).unwrap();
    poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&wait)).unwrap();
    let one = listener.accept(Instant::now()).unwrap();
    one.map(|one| one.stream)
}

impl Relay {
    pub fn start(to: &Address, settings: &RelaySettings, over_tcp: bool) -> Self {
        Self::start_with(to, settings, over_tcp, None)
    }

    pub fn start_with(
        to: &Address,
        settings: &RelaySettings,
        over_tcp: bool,
        ownership: Option<AsksOwnership>,
    ) -> Self {
        let (folder, listener, address) = listen(over_tcp);
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&events);
        let control = Control::watched(Box::new(move |event| seen.lock().unwrap().push(event)));
        let (sender, outcome) = channel();
        let (of_relay, to, settings) = (control.clone(), to.clone(), settings.clone());
        thread::spawn(move || {
            let hooks = Hooks {
                on_progress: None,
                ownership: ownership.as_deref().map(|hook| hook as _),
                ..Hooks::default()
            };
            let incoming = Incoming::Listener(&listener);
            let to = Outgoing::Address(&to);
            let _ = sender.send(relay(incoming, &to, &settings, &of_relay, hooks));
        });
        Self {
            address,
            control,
            events,
            outcome,
            _folder: folder,
        }
    }

    /// Waits for the relay's result. Asserts that a relay that has moved a guest reported the pause at the source once, before
    /// the devices.
    pub fn outcome(self, what: &str) -> Result<RelayReport, MigrationError> {
        let outcome = self.outcome.recv_timeout(DEADLINE);
        let outcome =
            outcome.unwrap_or_else(|_| panic!("{what}: the relay hangs, or has panicked"));
        if outcome
            .as_ref()
            .is_ok_and(|report| report.passed_through.is_none())
        {
            let mut events = self.events.lock().unwrap().clone();
            let (pause, device) = (
                MigrationEvent::Stopped,
                MigrationEvent::Status(Status::Device),
            );
            events.retain(|event| [pause, device].contains(event));
            assert_eq!(events, [pause, device], "{what}");
        }
        outcome
    }

    /// Waits for the relay's end, and cancels it once it has rejected a connection. Returns its error and the reasons of
    /// rejections.
    pub fn ended_or_turned_away(self, what: &str) -> String {
        let end = std::cell::RefCell::new(String::new());
        until("neither an end nor an unknown client", || {
            let reasons: Vec<_> = self.control.rejected_connections().into_keys().collect();
            if !reasons.is_empty() {
                self.control.cancel();
            }
            self.outcome.try_recv().is_ok_and(|outcome| {
                let line = outcome.expect_err(what).chain();
                *end.borrow_mut() = format!("{line}; turned away: {}", reasons.join(", "));
                true
            })
        });
        end.into_inner()
    }

    /// Returns the relay's result, if it ends within `wait`.
    pub fn has_ended(&self, wait: Duration) -> Option<Result<RelayReport, MigrationError>> {
        self.outcome.recv_timeout(wait).ok()
    }
}

/// Creates a destination for `recording`'s VM with this count of channels.
pub fn destination(
    recording: &Recording,
    channels: u8,
    fails: Option<(Moment, Failure)>,
    log: &Log,
) -> (TempDir, Destination) {
    let (folder, listener, address) = listen(false);
    let destination = Destination {
        address,
        listener,
        channels,
        description: recording.description(),
        fails,
        flushes_each_section: None,
        log: log.clone(),
    };
    (folder, destination)
}

/// Results of one migration, at every place.
#[derive(Debug)]
pub struct Outcome {
    /// Results of the relays, in order from the source.
    pub relays: Vec<Result<RelayReport, MigrationError>>,
    pub received: ReceivedMessages,
    pub arrived: Arrived,
    pub log: Vec<Event>,
}

/// Returns settings of the outgoing side, as with `hotlift relay --set`.
pub fn settings(options: &[(&str, &str)]) -> RelaySettings {
    let mut all = Options::default();
    all.stream.max_bandwidth = 0;
    for (name, value) in options {
        all.set(name, value).unwrap();
    }
    RelaySettings {
        outgoing: all.stream,
        limits: all.limits,
        ..RelaySettings::default()
    }
}

/// Moves `recording` through relays with these settings, in order from the source.
pub fn migrate(
    recording: &Recording,
    hops: &[RelaySettings],
    fails: Option<(Moment, Failure)>,
    ending: Ending,
) -> Outcome {
    migrate_to(recording, hops, fails, ending, None)
}

/// Moves `recording` as [`migrate`] does, to a destination whose QEMU has this value of `multifd-flush-after-each-section`;
/// `None` accepts either.
pub fn migrate_to(
    recording: &Recording,
    hops: &[RelaySettings],
    fails: Option<(Moment, Failure)>,
    ending: Ending,
    flushes_each_section: Option<bool>,
) -> Outcome {
    let log = Log::default();
    let channels = match hops.last() {
        Some(last) => last.outgoing.channels(),
        None => u8::try_from(recording.channels.len()).unwrap(),
    };
    let (_folder, mut destination) = destination(recording, channels, fails, &log);
    destination.flushes_each_section = flushes_each_section;
    let mut to = destination.address.clone();
    let mut relays = Vec::new();
    for (index, settings) in hops.iter().enumerate().rev() {
        let relay = Relay::start(&to, settings, index > 0);
        to = relay.address.clone();
        relays.insert(0, relay);
    }
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run());
        let received = play(recording, &to, ending, &log);
        let what = format!("{}, {fails:?}, {ending:?}, {}", recording.name, hops.len());
        let mut outcomes: Vec<Result<_, _>> = Vec::new();
        for relay in relays {
            // A failed relay may never have reached the next one, which waits without limit. (On a busy machine its thread may
            // not even have begun.)
            let is_waiting = matches!(relay.control.status(), Status::None | Status::Setup);
            if outcomes.iter().any(Result::is_err) && is_waiting {
                relay.control.cancel();
            }
            outcomes.push(relay.outcome(&what));
        }
        let relays = outcomes;
        log.note(Event::RelaysEnded);
        Outcome {
            relays,
            received,
            arrived: arriving.join().unwrap(),
            log: log.events(),
        }
    })
}

impl Outcome {
    /// Asserts that the destination has the guest, and that the order of events prevents it from running twice.
    pub fn assert_handed_over(&self, what: &str) {
        for relay in &self.relays {
            assert!(relay.is_ok(), "{what}: {self:?}", self = self.brief());
        }
        assert_eq!(self.arrived.ended, Ok(()), "{what}");
        let at = |event| self.log.iter().position(|&e| e == event);
        let eof = at(Event::DestinationReadsEof);
        let closed = at(Event::SourceCloses);
        assert!(
            eof.is_some() && closed.is_some() && closed < eof,
            "{what}: {:?}",
            self.log
        );
        if let Some(shut) = at(Event::SourceToldShut(0)) {
            assert!(Some(shut) < closed, "{what}: {:?}", self.log);
        }
    }

    /// Asserts that the source has the guest, and that no other process can have it.
    pub fn assert_kept(&self, what: &str) {
        let brief = self.brief();
        assert!(self.relays.iter().all(Result::is_err), "{what}: {brief:?}");
        assert_ne!(self.received.shut, Some(0), "{what}: {brief:?}");
        assert!(!self.arrived.eof, "{what}: {brief:?}");
    }

    /// Returns a summary without the guest.
    pub fn brief(&self) -> (Vec<String>, Option<u32>, &Result<(), String>, &[Event]) {
        let lines = self.relays.iter().map(|relay| match relay {
            Ok(_) => "ok".to_owned(),
            Err(error) => error.chain(),
        });
        (
            lines.collect(),
            self.received.shut,
            &self.arrived.ended,
            &self.log,
        )
    }
}

/// Polls until `done`.
pub fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}
