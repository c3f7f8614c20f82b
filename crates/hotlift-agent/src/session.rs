//! One migration or tunnel that the agent carries: what it is, how it gets on, and what it may use.

use std::cell::OnceCell;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hotlift::admission::{Admitted, Giver};
use hotlift::control::SharedRate;
use hotlift::relay::{Pass, RelayProgress, RelayReport};
use hotlift::tls::Identity;
use hotlift::transport::Stream;
use hotlift::{Control, MigrationEvent, Options, Status};
use hotlift_mem::lock;
use serde::{Deserialize, Serialize};

use crate::config::LogLevel;
use crate::log::Log;
use crate::messages::{Id, Kind};
use crate::moment::{Moment, Share, State};
use crate::source_socket::Sockets;

/// Which way the guest goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// Away from this host.
    Outgoing,
    /// To this host.
    Incoming,
}

impl Direction {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Outgoing => "outgoing",
            Self::Incoming => "incoming",
        }
    }
}

/// What it is; never changes.
#[derive(Debug, Clone)]
pub struct Subject {
    /// On both hosts.
    pub id: Id,
    /// Seen from this host.
    pub direction: Direction,
    /// What its connections carry.
    pub kind: Kind,
    /// Where the source's connections were to go.
    pub to: SocketAddr,
    /// The other agent, or where it should be.
    pub peer: String,
    /// The certificate of the agent that has announced it.
    pub announcer: Option<Identity>,
}

impl Subject {
    /// Whether both were announced by one host.
    #[must_use]
    pub fn is_of_one_announcer(&self, other: &Self) -> bool {
        match (&self.announcer, &other.announcer) {
            (Some(one), Some(another)) => one.is_of_the_host_of(another),
            (None, None) => self.peer == other.peer,
            _ => false,
        }
    }

    /// As it stands in each line of the log.
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
    /// What it is.
    pub subject: Subject,
    since: Instant,
    /// Steers its relay.
    pub control: Control,
    /// Gives it the connections that belong to it; an ended one, which is still shown, holds no descriptor.
    giver: Mutex<Option<Giver>>,
    /// What its connections begin with, at the destination.
    pub pass: Option<Pass>,
    /// Paces what is carried without a relay, as its share is.
    pub rate: SharedRate,
    /// Its connections are accepted as they come.
    is_open: AtomicBool,
    moment: Arc<Mutex<Moment>>,
    log: Log,
}

impl Session {
    /// One that begins.
    #[must_use]
    pub fn new(subject: Subject, giver: Giver, pass: Option<Pass>, weight: u32, log: &Log) -> Self {
        let moment = Arc::new(Mutex::new(Moment {
            weight,
            ..Moment::default()
        }));
        let watcher = {
            let (subject, moment, log) = (subject.clone(), Arc::clone(&moment), log.clone());
            move |event| {
                if let MigrationEvent::Status(status) = event
                    && lock(&moment).follow(status, Instant::now())
                {
                    log.say(LogLevel::Info, &subject.line(status.name()));
                }
            }
        };
        Self {
            control: Control::watched(Box::new(watcher)),
            subject,
            giver: Mutex::new(Some(giver)),
            pass,
            rate: SharedRate::default(),
            since: Instant::now(),
            is_open: AtomicBool::new(false),
            moment,
            log: log.clone(),
        }
    }

    /// How it gets on.
    #[must_use]
    pub fn moment(&self) -> Moment {
        lock(&self.moment).clone()
    }

    /// Its relay is in another state, now.
    #[cfg(test)]
    pub fn follow(&self, status: Status) {
        lock(&self.moment).follow(status, Instant::now());
    }

    /// Sets the method of its pages.
    pub fn has_method(&self, method: &'static str) {
        lock(&self.moment).method = method;
    }

    /// It is in another state.
    pub fn enter(&self, state: State) {
        if lock(&self.moment).enter(state) {
            self.log
                .say(LogLevel::Info, &self.subject.line(state.name()));
        }
    }

    /// Something about it for the log.
    pub fn say(&self, level: LogLevel, text: &str) {
        let line = self.subject.line(lock(&self.moment).state.name());
        self.log.say(level, &format!("{line} {text}"));
    }

    /// A report of its relay.
    pub fn note(&self, progress: &RelayProgress) {
        let stall = self.control.stall();
        let is_new = lock(&self.moment).note(progress, stall);
        match stall {
            _ if !is_new => {}
            Some(stall) => self.say(LogLevel::Warning, &stall.to_string()),
            None => self.say(LogLevel::Info, "the peer answers and reads again"),
        }
    }

    /// Sets what it may use of the host's `whole` bandwidth (0: unlimited), for its relay, or for what is carried without one.
    pub fn set_share(&self, share: Share, whole: u64, options: &Options) {
        let Some(max_bandwidth) = lock(&self.moment).set_share(share, whole) else {
            return;
        };
        self.rate.set(max_bandwidth);
        let options = Options {
            max_bandwidth,
            cpu_limit: share.cpu,
            ..options.clone()
        };
        self.control.change(&options);
    }

    /// Sets what an operator sets.
    pub fn limit(&self, bandwidth: Option<u64>, weight: Option<u32>) {
        let mut moment = lock(&self.moment);
        moment.limit = bandwidth.unwrap_or(moment.limit);
        moment.weight = weight.unwrap_or(moment.weight);
    }

    /// Returns true if it shares the host's budget: a migration that leaves the host, or a tunnel, which sends in both
    /// directions.
    #[must_use]
    pub fn shares_budget(&self) -> bool {
        let subject = &self.subject;
        subject.direction == Direction::Outgoing || subject.kind == Kind::Tunnel
    }

    /// Whether its guest stands still, so that it comes first.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        matches!(
            self.control.status(),
            Status::PreSwitchover | Status::Device
        )
    }

    /// Returns true if its guest runs at the destination, and its source has pages that the destination has not.
    #[must_use]
    pub fn is_in_postcopy(&self) -> bool {
        lock(&self.moment).state.is_postcopy()
    }

    /// It has ended: the last line of the log about it.
    pub fn end(&self, outcome: Result<Option<RelayReport>, String>) {
        lock(&self.giver).take();
        let level = match outcome {
            Ok(_) => LogLevel::Info,
            Err(_) => LogLevel::Error,
        };
        let mut moment = lock(&self.moment);
        let rest = moment.end(outcome, self.control.is_cancelled(), self.since.elapsed());
        let line = self.subject.line(moment.state.name());
        drop(moment);
        self.log.say(level, &format!("{line} {rest}"));
    }

    /// Returns its duration up to `now`, or to its end.
    #[must_use]
    pub fn age(&self, now: Instant) -> Duration {
        let so_far = || now.saturating_duration_since(self.since);
        lock(&self.moment).took.unwrap_or_else(so_far)
    }

    /// Gives it a connection.
    ///
    /// # Errors
    /// The connection, if it takes none any more.
    pub fn give(&self, one: Admitted) -> Result<(), Admitted> {
        match &*lock(&self.giver) {
            Some(giver) => giver.give(one),
            None => Err(one),
        }
    }

    /// Returns whether it takes a connection.
    #[must_use]
    pub fn takes(&self) -> bool {
        let giver = lock(&self.giver);
        giver.as_ref().is_some_and(Giver::takes)
    }

    /// From now on its connections are accepted as they come.
    pub fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    /// Connections that wait because nobody accepts them yet.
    #[must_use]
    pub fn held(&self) -> usize {
        match &*lock(&self.giver) {
            Some(giver) if !self.is_open.load(Ordering::Acquire) => giver.waiting(),
            _ => 0,
        }
    }

    /// Whether its source, on this host, has gone before anything of it was read.
    #[must_use]
    pub fn is_deserted(&self) -> bool {
        let sockets = OnceCell::new();
        let has_closed = |stream: &Stream| {
            let sockets = sockets.get_or_init(|| Sockets::open().ok()).as_ref();
            sockets.is_some_and(|sockets| sockets.has_closed(stream, self.subject.to))
        };
        let giver = lock(&self.giver);
        giver
            .as_ref()
            .is_some_and(|giver| giver.is_deserted(&has_closed))
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
            assert_eq!(session.moment().stall, stall.map(|stall| stall.kind));
            let row = crate::commands::MigrationRow::of(&session, Instant::now());
            assert_eq!(row.stall, stall.map(|stall| stall.to_string()));
        }
    }
}
