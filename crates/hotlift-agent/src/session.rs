//! A session of the agent: one migration or one tunnel, with its progress and limits.

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

/// Direction of the guest's move, seen from this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// The guest leaves this host.
    Outgoing,
    /// The guest comes to this host.
    Incoming,
}

impl Direction {
    /// Returns the name of the direction, for logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Outgoing => "outgoing",
            Self::Incoming => "incoming",
        }
    }
}

/// Properties of a session that never change.
#[derive(Debug, Clone)]
pub struct SessionInfo {
    /// Id of the session, the same on both hosts.
    pub id: Id,
    /// Direction of the guest's move, seen from this host.
    pub direction: Direction,
    /// Content of the connections: a migration, or other bytes (a tunnel).
    pub kind: Kind,
    /// Original destination of the source's connections.
    pub to: SocketAddr,
    /// Host of the other agent, or its expected address.
    pub peer: String,
    /// Certificate of the agent that announced the session; `None` for an outgoing session.
    pub announcer: Option<Identity>,
}

impl SessionInfo {
    /// Returns true if one host announced this session and `other`.
    #[must_use]
    pub fn is_of_one_announcer(&self, other: &Self) -> bool {
        match (&self.announcer, &other.announcer) {
            (Some(one), Some(another)) => one.is_of_the_host_of(another),
            (None, None) => self.peer == other.peer,
            _ => false,
        }
    }

    /// Returns the fixed part of each log line of the session, with `state`.
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

/// A migration or a tunnel of the agent.
pub struct Session {
    /// Properties of the session that never change.
    pub subject: SessionInfo,
    since: Instant,
    /// Control of the session's relay: status, cancel, options.
    pub control: Control,
    /// Passes connections to the session; `None` after the end: ended sessions are listed, and must keep no descriptor open.
    sender: Mutex<Option<ConnectionSender>>,
    /// Token at the start of the migration's connections; only incoming sessions have it.
    pub pass: Option<ConnectionToken>,
    /// Rate limit of data that no relay carries; set from the session's share.
    pub rate: SharedRate,
    /// True once the session accepts connections on arrival; before, they wait.
    is_open: AtomicBool,
    snapshot: Arc<Mutex<Snapshot>>,
    log: Log,
}

impl Session {
    /// Creates a session that starts now, with `weight` in the division of bandwidth and cores.
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
                if event == MigrationEvent::Stopped {
                    lock(&snapshot).record_pause(Instant::now());
                }
                if let MigrationEvent::Status(status) = event
                    && lock(&snapshot).record_status(status, Instant::now())
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

    /// Returns a copy of the session's state and progress.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        lock(&self.snapshot).clone()
    }

    /// Records a state of the session's relay.
    #[cfg(test)]
    pub fn record_status(&self, status: Status) {
        lock(&self.snapshot).record_status(status, Instant::now());
    }

    /// Sets the name of the compression method for the snapshot.
    pub fn has_method(&self, method: &'static str) {
        lock(&self.snapshot).method = method;
    }

    /// Changes the state of the session, and logs the change.
    pub fn enter(&self, state: State) {
        if lock(&self.snapshot).enter(state) {
            self.log
                .write(LogLevel::Info, &self.subject.line(state.name()));
        }
    }

    /// Logs `text` with the properties and the state of the session.
    pub fn log(&self, level: LogLevel, text: &str) {
        let line = self.subject.line(lock(&self.snapshot).state.name());
        self.log.write(level, &format!("{line} {text}"));
    }

    /// Records a progress report of the session's relay. Logs the begin and the end of a stall.
    pub fn record_progress(&self, progress: &RelayProgress) {
        let stall = self.control.stall();
        let is_new = lock(&self.snapshot).record_progress(progress, stall);
        match stall {
            _ if !is_new => {}
            Some(stall) => self.log(LogLevel::Warning, &stall.to_string()),
            None => self.log(LogLevel::Info, "the peer answers and reads again"),
        }
    }

    /// Applies `share` to the relay and to the rate limit of other data. `whole` is the host's total bandwidth in bytes a
    /// second; 0 is unlimited. `options` are the relay's other options.
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

    /// Sets the operator's bandwidth limit (bytes a second; 0 is unlimited) and weight; `None` leaves a value unchanged.
    pub fn limit(&self, bandwidth: Option<u64>, weight: Option<u32>) {
        let mut snapshot = lock(&self.snapshot);
        snapshot.limit = bandwidth.unwrap_or(snapshot.limit);
        snapshot.weight = weight.unwrap_or(snapshot.weight);
    }

    /// Returns true if the session gets a share of the host's bandwidth. An incoming migration gets none; a tunnel always does,
    /// since it sends in both directions.
    #[must_use]
    pub fn shares_budget(&self) -> bool {
        let subject = &self.subject;
        subject.direction == Direction::Outgoing || subject.kind == Kind::Tunnel
    }

    /// Returns true if the guest is paused for the switchover: then the session has priority.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        matches!(
            self.control.status(),
            Status::PreSwitchover | Status::Device
        )
    }

    /// Returns true if the guest runs at the destination, but the source still has pages that the destination lacks.
    #[must_use]
    pub fn is_in_postcopy(&self) -> bool {
        lock(&self.snapshot).state.is_postcopy()
    }

    /// Ends the session with `outcome`, and writes its last log line.
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

    /// Returns the time from the session's start to `now`, or to the session's end.
    #[must_use]
    pub fn age(&self, now: Instant) -> Duration {
        let so_far = || now.saturating_duration_since(self.since);
        lock(&self.snapshot).took.unwrap_or_else(so_far)
    }

    /// Passes a connection to the session.
    ///
    /// # Errors
    /// The connection itself, if the session accepts no more connections.
    pub fn deliver(&self, one: Admitted) -> Result<(), Admitted> {
        match &*lock(&self.sender) {
            Some(sender) => sender.send(one),
            None => Err(one),
        }
    }

    /// Returns true if the session still accepts connections.
    #[must_use]
    pub fn accepts_connections(&self) -> bool {
        let sender = lock(&self.sender);
        sender.as_ref().is_some_and(ConnectionSender::takes)
    }

    /// Marks the session as open: from now on it accepts each connection on arrival.
    pub fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    /// Returns the number of connections that wait until the session opens; 0 once it is open.
    #[must_use]
    pub fn held(&self) -> usize {
        match &*lock(&self.sender) {
            Some(sender) if !self.is_open.load(Ordering::Acquire) => sender.waiting(),
            _ => 0,
        }
    }

    /// Returns true if the source on this host closed all its connections before the session read any byte from them.
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
            session.record_progress(&RelayProgress::default());
            assert_eq!(session.snapshot().stall, stall.map(|stall| stall.kind));
            let row = crate::commands::MigrationRow::of(&session, Instant::now());
            assert_eq!(row.stall, stall.map(|stall| stall.to_string()));
        }
    }
}
