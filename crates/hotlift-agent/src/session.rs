//! One migration or tunnel that the agent carries: what it is, how it gets on, and what it may use.

use std::cell::OnceCell;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotlift::control::SharedRate;
use hotlift::progress::StallKind;
use hotlift::relay::{Pass, RelayProgress, RelayReport};
use hotlift::tls::Identity;
use hotlift::transport::{Giver, Stream};
use hotlift::{Control, MigrationEvent, Options, Status};
use serde::{Deserialize, Serialize};

use crate::config::LogLevel;
use crate::log::Log;
use crate::messages::{Id, Kind};
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

/// What a migration may use of the host; 0 is unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Share {
    /// Bytes a second.
    pub bandwidth: u64,
    /// Thousandths of a core.
    pub cpu: u32,
}

/// How it gets on.
#[derive(Debug, Clone, Default)]
pub struct Moment {
    /// The last of the states.
    pub state: &'static str,
    /// What the relay has reported.
    pub progress: RelayProgress,
    /// Kind of the stall at its last report.
    stall: Option<StallKind>,
    /// Bytes a second between its last two reports.
    pub rate: f64,
    /// Its weight in the sharing.
    pub weight: u32,
    /// Most bytes a second that an operator has set; 0 for none.
    pub limit: u64,
    /// What it may use now.
    pub share: Share,
    /// Method of its pages; "auto" where each packet has its own, and empty before it is known.
    pub method: &'static str,
    /// Since when its guest stands still.
    stopped: Option<Instant>,
    /// How long its guest stood still, once it runs at the destination: from the first device state that the relay has seen
    /// until the other side's word, or, in postcopy, until that has all that the guest needs to run.
    pub downtime: Option<Duration>,
    /// How long it took, once it has ended.
    pub took: Option<Duration>,
    /// Why it failed.
    pub error: Option<String>,
    /// What it came to.
    pub report: Option<Box<RelayReport>>,
}

impl Moment {
    /// The guest's own part of a relay's state.
    fn follow(&mut self, status: Status, now: Instant) {
        match status {
            Status::PreSwitchover | Status::Device => {
                self.stopped.get_or_insert(now);
            }
            Status::PostcopyActive | Status::Completed => {
                let stopped = self.stopped.take();
                self.downtime = self.downtime.or(stopped.map(|at| now - at));
            }
            _ => self.stopped = None,
        }
    }

    /// How long its guest stands or stood still.
    #[must_use]
    pub fn still(&self) -> Duration {
        let stands = || self.stopped.map(|at| at.elapsed());
        self.downtime.or_else(stands).unwrap_or_default()
    }
}

/// A migration or a tunnel.
pub struct Session {
    /// What it is.
    pub subject: Subject,
    /// Steers its relay.
    pub control: Control,
    /// Gives it the connections that belong to it; an ended one, which is still shown, holds no descriptor.
    giver: Mutex<Option<Giver>>,
    /// What its connections begin with, at the destination.
    pub pass: Option<Pass>,
    /// Paces what is carried without a relay, as its share is.
    pub rate: SharedRate,
    /// When it began.
    pub since: Instant,
    /// Its connections are accepted as they come.
    is_open: AtomicBool,
    moment: Arc<Mutex<Moment>>,
    log: Log,
}

fn lock(moment: &Mutex<Moment>) -> MutexGuard<'_, Moment> {
    moment.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// One that begins.
    #[must_use]
    pub fn new(subject: Subject, giver: Giver, pass: Option<Pass>, weight: u32, log: &Log) -> Self {
        let moment = Arc::new(Mutex::new(Moment {
            state: "none",
            weight,
            ..Moment::default()
        }));
        let watcher = {
            let (subject, moment, log) = (subject.clone(), Arc::clone(&moment), log.clone());
            move |event| {
                let MigrationEvent::Status(status) = event else {
                    return;
                };
                lock(&moment).follow(status, Instant::now());
                // The end is told with its figures.
                if !is_end(status) {
                    enter(&subject, &moment, &log, status.name());
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
    pub fn enter(&self, state: &'static str) {
        enter(&self.subject, &self.moment, &self.log, state);
    }

    /// Something about it for the log.
    pub fn say(&self, level: LogLevel, text: &str) {
        let line = self.subject.line(lock(&self.moment).state);
        self.log.say(level, &format!("{line} {text}"));
    }

    /// A report of its relay.
    pub fn note(&self, progress: &RelayProgress) {
        let stall = self.control.stall();
        let kind = stall.map(|stall| stall.kind);
        let before = std::mem::replace(&mut lock(&self.moment).stall, kind);
        if kind != before {
            let (level, text) = match stall {
                Some(stall) => (LogLevel::Warning, stall.to_string()),
                None => (
                    LogLevel::Info,
                    "the peer answers and reads again".to_owned(),
                ),
            };
            self.say(level, &text);
        }
        let mut moment = lock(&self.moment);
        let time = progress.elapsed.saturating_sub(moment.progress.elapsed);
        if !time.is_zero() {
            let bytes = progress
                .sent_bytes
                .saturating_sub(moment.progress.sent_bytes);
            // Bytes of half a second are far below 2^53.
            #[allow(clippy::cast_precision_loss)]
            let bytes = bytes as f64;
            moment.rate = bytes / time.as_secs_f64();
        }
        moment.progress = *progress;
    }

    /// Sets what it may use of the host's `whole` bandwidth (0: unlimited), for its relay, or for what is carried without one.
    pub fn set_share(&self, share: Share, whole: u64, options: &Options) {
        let mut moment = lock(&self.moment);
        if moment.share == share {
            return;
        }
        moment.share = share;
        let most = if moment.limit == 0 {
            u64::MAX
        } else {
            moment.limit
        };
        drop(moment);
        // The whole is kept by all together. One that waits there must be able to catch up.
        let room = if whole == 0 { 0 } else { share.bandwidth / 4 };
        let max_bandwidth = match share.bandwidth {
            0 => 0,
            part => part.saturating_add(room).min(most),
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

    /// Whether its guest runs at the destination, and its source has pages that the destination has not.
    #[must_use]
    pub fn is_in_postcopy(&self) -> bool {
        let states = [Status::PostcopyActive, Status::PostcopyRecover];
        let state = lock(&self.moment).state;
        states.iter().any(|postcopy| postcopy.name() == state)
    }

    /// It has ended: the last line of the log about it.
    pub fn end(&self, outcome: Result<Option<RelayReport>, String>) {
        self.giver
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let mut moment = lock(&self.moment);
        moment.rate = 0.0;
        let took = self.since.elapsed();
        moment.took = Some(took);
        let seconds = took.as_secs_f64();
        let (level, state, rest) = match outcome {
            Ok(None) => (LogLevel::Info, "completed", format!("seconds={seconds:.1}")),
            Ok(Some(report)) => {
                let downtime = match moment.downtime {
                    Some(time) => format!(" downtime-seconds={:.3}", time.as_secs_f64()),
                    None => String::new(),
                };
                let rest = format!(
                    "seconds={seconds:.1}{downtime} sent={} received={} pages={} zero-pages={} ratio={:.2} cpu-seconds={:.2}{}",
                    report.sent_bytes,
                    report.received_bytes,
                    report.normal_pages,
                    report.zero_pages,
                    report.ratio,
                    report.side.cpu_s,
                    match &report.passed_through {
                        Some(why) => format!(" passed-through=\"{why}\""),
                        None => String::new(),
                    }
                );
                moment.report = Some(Box::new(report));
                (LogLevel::Info, "completed", rest)
            }
            Err(why) => {
                let state = match self.control.is_cancelled() {
                    true => "cancelled",
                    false => "failed",
                };
                let rest = format!("seconds={seconds:.1} error=\"{why}\"");
                moment.error = Some(why);
                (LogLevel::Error, state, rest)
            }
        };
        moment.state = state;
        drop(moment);
        let line = self.subject.line(state);
        self.log.say(level, &format!("{line} {rest}"));
    }

    /// Gives it a connection.
    ///
    /// # Errors
    /// The connection, if it takes none any more.
    pub fn give(&self, stream: Stream) -> Result<(), Stream> {
        match &*self.giver.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(giver) => giver.give(stream),
            None => Err(stream),
        }
    }

    /// From now on its connections are accepted as they come.
    pub fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    /// Connections that wait because nobody accepts them yet.
    #[must_use]
    pub fn held(&self) -> usize {
        let giver = self.giver.lock().unwrap_or_else(PoisonError::into_inner);
        match &*giver {
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
        let giver = self.giver.lock().unwrap_or_else(PoisonError::into_inner);
        let giver = giver.as_ref();
        giver.is_some_and(|giver| giver.is_deserted(&has_closed))
    }

    /// How long it has been under way, or was.
    #[must_use]
    pub fn age(&self) -> Duration {
        let took = lock(&self.moment).took;
        took.unwrap_or_else(|| self.since.elapsed())
    }
}

/// Returns true for states of a relay that does not run.
pub(crate) fn is_end(status: Status) -> bool {
    matches!(
        status,
        Status::None | Status::Completed | Status::Failed | Status::Cancelled
    )
}

fn enter(subject: &Subject, moment: &Mutex<Moment>, log: &Log, state: &'static str) {
    let before = std::mem::replace(&mut lock(moment).state, state);
    if before != state {
        log.say(LogLevel::Info, &subject.line(state));
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
            let row = crate::commands::MigrationRow::of(&session);
            assert_eq!(row.stall, stall.map(|stall| stall.to_string()));
        }
    }

    #[test]
    fn downtime_is_from_the_guests_stop_to_its_run_at_the_destination() {
        let begun = Instant::now();
        let after = |statuses: &[(u64, Status)]| {
            let mut moment = Moment::default();
            for (ms, status) in statuses {
                moment.follow(*status, begun + Duration::from_millis(*ms));
            }
            moment.downtime.map(|time| time.as_millis())
        };
        let (active, device, completed) = (Status::Active, Status::Device, Status::Completed);
        let precopy = [(0, active), (10, device), (15, device), (17, completed)];
        assert_eq!(after(&precopy), Some(7));
        let postcopy = [(10, device), (13, Status::PostcopyActive), (900, completed)];
        assert_eq!(after(&postcopy), Some(3));
        assert_eq!(after(&[(10, device), (20, Status::Failed)]), None);
        let again = [(10, device), (20, active), (30, device), (34, completed)];
        assert_eq!(after(&again), Some(4), "it ran on in between");
        assert_eq!(
            after(&[(0, active), (17, completed)]),
            None,
            "nobody saw it"
        );
    }
}
