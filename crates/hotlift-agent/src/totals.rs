//! Counters over all sessions since the agent's start, for the metrics. They grow during each session.

use std::collections::BTreeMap;

use hotlift::Status;
use hotlift_methods::METHODS;
use prometheus_client::metrics::histogram::Histogram;

use crate::downtimes::{Downtimes, LatestDowntimes};
use crate::messages::Kind;
use crate::session::{Direction, Session};
use crate::snapshot::{ENDS, Snapshot, State};

/// The two directions of a session.
pub const DIRECTIONS: [Direction; 2] = [Direction::Outgoing, Direction::Incoming];

/// Names of a relay's threads, without their numbers; label values of CPU time.
const THREADS: [&str; 5] = [
    "relay/accept",
    "relay/main",
    "relay/recv",
    "relay/return",
    "relay/send",
];

/// Label value of zero pages, which have no compression method.
const ZERO: &str = "zero";

/// Upper bounds of the duration histogram, in seconds: from an idle VM on a fast link to a large VM on a slow link.
const DURATIONS: [f64; 11] = [
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
];

/// Upper bounds of the downtime histogram, in seconds; finer around QEMU's default limit of 0.3 s.
const DOWNTIMES: [f64; 11] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0];

/// One count for each value of a label.
pub type Counts = BTreeMap<String, f64>;

/// One histogram for each direction.
pub type Histograms = BTreeMap<&'static str, Histogram>;

fn zeros<'a>(names: impl IntoIterator<Item = &'a str>) -> Counts {
    let names = names.into_iter();
    names.map(|name| (name.to_owned(), 0.0)).collect()
}

fn add(counts: &mut Counts, name: &str, count: f64) {
    match counts.get_mut(name) {
        Some(sum) => *sum += count,
        None => drop(counts.insert(name.to_owned(), count)),
    }
}

/// Converts a count to `f64`, the number type of Prometheus.
#[allow(clippy::cast_precision_loss)]
pub fn number(count: u64) -> f64 {
    count as f64
}

/// Counters of ended sessions, and of events outside of sessions.
#[derive(Debug, Clone)]
pub struct Totals {
    /// Number of ended sessions, by direction, kind and outcome.
    pub ended: BTreeMap<[&'static str; 3], u64>,
    /// Bytes, pages and CPU time of ended sessions.
    pub traffic: Traffic,
    /// Durations of completed migrations, in seconds.
    pub durations: Histograms,
    /// Downtimes of completed migrations, in seconds; migrations of unknown downtime are not counted.
    pub downtimes: Histograms,
    /// Sum of the downtimes in `downtimes`, by direction, in seconds.
    pub downtime_seconds: Counts,
    /// Number of the downtimes in `downtimes`, by direction.
    pub downtime_count: Counts,
    /// The latest of the downtimes in `downtimes`, by direction.
    latest_downtimes: BTreeMap<Direction, LatestDowntimes>,
    /// Refused connections and migrations.
    pub refusals: u64,
    /// Failed TLS handshakes.
    pub tls_failures: u64,
}

impl Default for Totals {
    fn default() -> Self {
        let directions = || DIRECTIONS.map(Direction::name);
        let histograms = |bounds: &[f64]| {
            let histogram = |name| (name, Histogram::new(bounds.iter().copied()));
            directions().into_iter().map(histogram).collect()
        };
        let kinds = [Kind::Migration, Kind::Tunnel].map(Kind::name);
        let mut ended = BTreeMap::new();
        for direction in directions() {
            for kind in kinds {
                ended.extend(ENDS.map(|end| ([direction, kind, end.name()], 0)));
            }
        }
        Self {
            ended,
            traffic: Traffic::default(),
            durations: histograms(&DURATIONS),
            downtimes: histograms(&DOWNTIMES),
            downtime_seconds: zeros(directions()),
            downtime_count: zeros(directions()),
            latest_downtimes: BTreeMap::new(),
            refusals: 0,
            tls_failures: 0,
        }
    }
}

impl Totals {
    /// Adds an ended session to the totals.
    pub fn add(&mut self, session: &Session) {
        let snapshot = session.snapshot();
        let subject = &session.subject;
        let direction = subject.direction.name();
        let outcome = [direction, subject.kind.name(), snapshot.state.name()];
        *self.ended.entry(outcome).or_default() += 1;
        self.traffic.add(session, &snapshot);
        if subject.kind == Kind::Migration
            && snapshot.state == State::Of(Status::Completed)
            && let (Some(took), Some(durations)) = (snapshot.took, self.durations.get(direction))
        {
            durations.observe(took.as_secs_f64());
        }
        if snapshot.report.is_some()
            && let Some(downtime) = snapshot.downtime
        {
            let latest = self.latest_downtimes.entry(subject.direction);
            latest.or_default().add(downtime);
            let downtime = downtime.as_secs_f64();
            if let Some(downtimes) = self.downtimes.get(direction) {
                downtimes.observe(downtime);
            }
            add(&mut self.downtime_seconds, direction, downtime);
            add(&mut self.downtime_count, direction, 1.0);
        }
    }

    /// Returns the percentiles of the latest downtimes.
    #[must_use]
    pub fn downtimes(&self) -> Downtimes {
        let figures = |direction| {
            let latest = self.latest_downtimes.get(&direction);
            latest.map(LatestDowntimes::figures).unwrap_or_default()
        };
        Downtimes {
            outgoing: figures(Direction::Outgoing),
            incoming: figures(Direction::Incoming),
        }
    }
}

/// Bytes, pages and CPU time of sessions.
#[derive(Debug, Clone)]
pub struct Traffic {
    /// Bytes sent to the other host, by direction of the session.
    pub sent_bytes: Counts,
    /// Bytes received from the other host, by direction of the session.
    pub received_bytes: Counts,
    /// Number of pages, by compression method; zero pages have the label "zero".
    pub pages: Counts,
    /// Number of barriers between precopy rounds.
    pub rounds: f64,
    /// CPU time of relay threads in seconds, by thread name without its number.
    pub cpu_seconds: Counts,
}

impl Default for Traffic {
    fn default() -> Self {
        let directions = || zeros(DIRECTIONS.map(Direction::name));
        let methods = METHODS.iter().filter(|method| !method.is_auto());
        Self {
            sent_bytes: directions(),
            received_bytes: directions(),
            pages: zeros(methods.map(|method| method.name).chain([ZERO])),
            rounds: 0.0,
            cpu_seconds: zeros(THREADS),
        }
    }
}

impl Traffic {
    /// Adds the traffic of a session, also of a running one. A session's counts only grow from report to report.
    pub fn add(&mut self, session: &Session, snapshot: &Snapshot) {
        let direction = session.subject.direction.name();
        let (progress, report) = (&snapshot.progress, snapshot.report.as_ref());
        let sent = report.map_or(progress.sent_bytes, |report| report.sent_bytes);
        let received = report.map_or(progress.received_bytes, |report| report.received_bytes);
        let normal = report.map_or(progress.normal_pages, |report| report.normal_pages);
        let zero = report.map_or(progress.zero_pages, |report| report.zero_pages);
        let rounds = report.map_or(progress.barriers, |report| report.barriers);
        add(&mut self.sent_bytes, direction, number(sent));
        add(&mut self.received_bytes, direction, number(received));
        add(&mut self.pages, ZERO, number(zero));
        self.rounds += number(rounds);
        // With method auto, each packet has its own method, so the report has counts by method.
        let methods = match report {
            Some(report) => report.methods.clone(),
            None => session.control.method_figures(),
        };
        let fixed = report.map_or(snapshot.method, |report| &report.method);
        if !methods.is_empty() {
            for method in methods {
                add(&mut self.pages, &method.name, number(method.pages));
            }
        } else if normal > 0 && !fixed.is_empty() && fixed != "auto" {
            add(&mut self.pages, fixed, number(normal));
        }
        let threads = match report {
            Some(report) => report.side.threads.clone(),
            None => session.control.cpu_times(),
        };
        for thread in threads {
            let name = thread.name.trim_end_matches(|c: char| c.is_ascii_digit());
            add(
                &mut self.cpu_seconds,
                name.trim_end_matches('_'),
                thread.cpu_s,
            );
        }
    }
}
