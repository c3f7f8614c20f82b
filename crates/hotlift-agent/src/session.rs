//! One migration or tunnel of the agent: its subject, progress and limits.

use std::cell::OnceCell;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hotlift::admission::{Admitted, ConnectionSender};
use hotlift::control::SharedRate;
use hotlift::options::StreamOptions;
use hotlift::relay::{ConnectionToken, RelayProgress, RelayReport};
use hotlift::tls::Identity;
use hotlift::transport::Stream;
use hotlift::{Control, MigrationEvent, Options, Status};
use hotlift_mem::lock;
use serde::{Deserialize, Serialize};

use crate::config::LogLevel;
use crate::log::Log;
use crate::messages::{Id, Kind};
use crate::snapshot::{Share, Snapshot, State};
use crate::source_socket::Sockets;

/// Direction of the guest's move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// Leaves this host.
    Outgoing,
    /// Comes to this host.
    Incoming,
}

impl Direction {
    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Outgoing => "outgoing",
            Self::Incoming => "incoming",
        }
    }
}

/// The fixed properties of a session.
#[derive(Debug, Clone)]
pub struct SessionInfo {
    /// Id on both hosts.
    pub id: Id,
    /// Direction, seen from this host.
    pub direction: Direction,
    /// Kind of its connections.
    pub kind: Kind,
    /// Original destination of the source's connections.
    pub to: SocketAddr,
    /// The other agent, or its expected address.
    pub peer: String,
    /// Certificate of the agent that announced it.
    pub announcer: Option<Identity>,
}

impl SessionInfo {
    /// Returns true if the same host announced both.
    #[must_use]
    pub fn is_of_one_announcer(&self, other: &Self) -> bool {
        match (&self.announcer, &other.announcer) {
            (Some(one), Some(another)) => one.is_of_the_host_of(another),
            (None, None) => self.peer == other.peer,
            _ => false,
        }
    }

    /// Returns its prefix of log lines.
    #[must_use]
    pub fn line(&self, state: &str) -> String {
        let Self {
            id,
            direction,
            kind,
            to,
            peer,
            announcer: _,
        } = self;
        let (direction, kind) = (direction.name(), kind.name());
        format!("id={id} state={state} kind={kind} direction={direction} to={to} peer={peer}")
    }
}

/// A migration or a tunnel.
pub struct Session {
    /// Its fixed properties.
    pub subject: SessionInfo,
    since: Instant,
    /// Control of its relay.
    pub control: Control,
    /// Sender of connections to it; none after the end, so that an ended session in the list holds no descriptor.
    sender: Mutex<Option<ConnectionSender>>,
    /// Token that its connections present at the destination.
    pub pass: Option<ConnectionToken>,
    /// Rate limit of data that is carried without a relay, from its share.
    pub rate: SharedRate,
    /// True once its connections are accepted on arrival.
    is_open: AtomicBool,
    snapshot: Arc<Mutex<Snapshot>>,
    log: Log,
}

impl Session {
    /// Creates a session that begins now.
    #[must_use]
    pub fn new(
        subject: SessionInfo,
        sender: ConnectionSender,
        pass: Option<ConnectionToken>,
        weight: u32,
        log: &Log,
    ) -> Self {
        let snapshot = Arc::new(Mutex::new(Snapshot {
            weight,
            ..Snapshot::default()
        }));
        let watcher = {
            let (subject, snapshot, log) = (subject.clone(), Arc::clone(&snapshot), log.clone());
            move |event| {
                if let MigrationEvent::Status(status) = event
                    && lock(&snapshot).follow(status, Instant::now())
                {
                    log.write(LogLevel::Info, &subject.line(status.name()));
                }
            }
        };
        Self {
            control: Control::watched(Box::new(watcher)),
            subject,
            sender: Mutex::new(Some(sender)),
            pass,
            rate: SharedRate::default(),
            since: Instant::now(),
            is_open: AtomicBool::new(false),
            snapshot,
            log: log.clone(),
        }
    }

    /// Returns a snapshot of its progress.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        lock(&self.snapshot).clone()
    }

    /// Sets the state of its relay.
    #[cfg(test)]
    pub fn follow(&self, status: Status) {
        lock(&self.snapshot).follow(status, Instant::now());
    }

    /// Sets the compression method of its pages.
    pub fn has_method(&self, method: &'static str) {
        lock(&self.snapshot).method = method;
    }

    /// Enters another state, and logs it.
    pub fn enter(&self, state: State) {
        if lock(&self.snapshot).enter(state) {
            self.log
                .write(LogLevel::Info, &self.subject.line(state.name()));
        }
    }

    /// Logs a line about it.
    pub fn log(&self, level: LogLevel, text: &str) {
        let line = self.subject.line(lock(&self.snapshot).state.name());
        self.log.write(level, &format!("{line} {text}"));
    }

    /// Records a progress report of its relay, and logs a new kind of stall.
    pub fn note(&self, progress: &RelayProgress) {
        let stall = self.control.stall();
        let is_new = lock(&self.snapshot).note(progress, stall);
        match stall {
            _ if !is_new => {}
            Some(stall) => self.log(LogLevel::Warning, &stall.to_string()),
            None => self.log(LogLevel::Info, "the peer answers and reads again"),
        }
    }

    /// Sets its share of the host's `whole` bandwidth (0: unlimited), for its relay, or for data without a relay.
    pub fn set_share(&self, share: Share, whole: u64, options: &StreamOptions) {
        let Some(max_bandwidth) = lock(&self.snapshot).set_share(share, whole) else {
            return;
        };
        self.rate.set(max_bandwidth);
        let options = Options {
            stream: StreamOptions {
                max_bandwidth,
                cpu_limit: share.cpu,
                ..options.clone()
            },
            ..Options::default()
        };
        self.control.change(&options);
    }

    /// Sets the operator's bandwidth limit and weight.
    pub fn limit(&self, bandwidth: Option<u64>, weight: Option<u32>) {
        let mut snapshot = lock(&self.snapshot);
        snapshot.limit = bandwidth.unwrap_or(snapshot.limit);
        snapshot.weight = weight.unwrap_or(snapshot.weight);
    }

    /// Returns true if it shares the host's budget: a migration that leaves the host, or a tunnel, which sends in both
    /// directions.
    #[must_use]
    pub fn shares_budget(&self) -> bool {
        let subject = &self.subject;
        subject.direction == Direction::Outgoing || subject.kind == Kind::Tunnel
    }

    /// Returns true if its guest is paused, which gives it priority.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        matches!(
            self.control.status(),
            Status::PreSwitchover | Status::Device
        )
    }

    /// Returns true if its guest runs at the destination, and its source has pages that the destination lacks.
    #[must_use]
    pub fn is_in_postcopy(&self) -> bool {
        lock(&self.snapshot).state.is_postcopy()
    }

    /// Ends it, and writes its last log line.
    pub fn end(&self, outcome: Result<Option<RelayReport>, String>) {
        lock(&self.sender).take();
        let level = match outcome {
            Ok(_) => LogLevel::Info,
            Err(_) => LogLevel::Error,
        };
        let mut snapshot = lock(&self.snapshot);
        let rest = snapshot.end(outcome, self.control.is_cancelled(), self.since.elapsed());
        let line = self.subject.line(snapshot.state.name());
        drop(snapshot);
        self.log.write(level, &format!("{line} {rest}"));
    }

    /// Returns its duration up to `now`, or to its end.
    #[must_use]
    pub fn age(&self, now: Instant) -> Duration {
        let so_far = || now.saturating_duration_since(self.since);
        lock(&self.snapshot).took.unwrap_or_else(so_far)
    }

    /// Passes a connection to it.
    ///
    /// # Errors
    /// The connection, if it accepts no more.
    pub fn deliver(&self, one: Admitted) -> Result<(), Admitted> {
        match &*lock(&self.sender) {
            Some(sender) => sender.send(one),
            None => Err(one),
        }
    }

    /// Returns true if it accepts a connection.
    #[must_use]
    pub fn takes(&self) -> bool {
        let sender = lock(&self.sender);
        sender.as_ref().is_some_and(ConnectionSender::takes)
    }

    /// Marks its connections as accepted on arrival, from now on.
    pub fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    /// Returns the number of connections that wait because none is accepted yet.
    #[must_use]
    pub fn held(&self) -> usize {
        match &*lock(&self.sender) {
            Some(sender) if !self.is_open.load(Ordering::Acquire) => sender.waiting(),
            _ => 0,
        }
    }

    /// Returns true if its source, on this host, closed its connections before anything was read from them.
    #[must_use]
    pub fn is_deserted(&self) -> bool {
        let sockets = OnceCell::new();
        let has_closed = |stream: &Stream| {
            let sockets = sockets.get_or_init(|| Sockets::open().ok()).as_ref();
            sockets.is_some_and(|sockets| sockets.has_closed(stream, self.subject.to))
        };
        let sender = lock(&self.sender);
        sender
            .as_ref()
            .is_some_and(|sender| sender.is_deserted(&has_closed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_kept_from_report_to_report() {
        use hotlift::progress::{Stall, StallKind};
        let (session, _listener) = crate::fixture::session(crate::fixture::subject(
            1,
            Direction::Outgoing,
            Kind::Migration,
        ));
        let stall = Stall {
            kind: StallKind::NotReading,
            peer: std::net::Ipv4Addr::new(192, 0, 2, 2).into(),
            time: Duration::from_secs(5),
        };
        for stall in [Some(stall), None] {
            session.control.set_stall(stall);
            session.note(&RelayProgress::default());
            assert_eq!(session.snapshot().stall, stall.map(|stall| stall.kind));
            let row = crate::commands::MigrationRow::of(&session, Instant::now());
            assert_eq!(row.stall, stall.map(|stall| stall.to_string()));
        }
    }
}
