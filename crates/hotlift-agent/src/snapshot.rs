//! State, downtime and share of one session (migration or tunnel), computed from events and their times. No I/O, no clock.

use std::time::{Duration, Instant};

use hotlift::Status;
use hotlift::progress::{Stall, StallKind};
use hotlift::relay::{RelayProgress, RelayReport};
use serde::Serialize;

/// State of a session: one of the agent's own states, or a state of QEMU. A new session is in `none`; an ended one keeps its
/// last state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The migration waits for a slot: too many others are running.
    Waiting,
    /// The agent connects to the other agent, or waits for the source.
    Connecting,
    /// The data goes unencrypted to a host without an agent.
    PassedThrough,
    /// State of the relay; a running tunnel is `active`.
    Of(Status),
}

/// States in which a session has ended.
pub const ENDS: [Status; 3] = [Status::Completed, Status::Failed, Status::Cancelled];

impl Default for State {
    fn default() -> Self {
        Self::Of(Status::None)
    }
}

impl State {
    /// Returns the name of the state, for logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Connecting => "connecting",
            Self::PassedThrough => "passed-through",
            Self::Of(status) => status.name(),
        }
    }

    /// Returns all states of a session that has not ended.
    pub fn under_way() -> impl Iterator<Item = Self> {
        let own = [Self::Waiting, Self::Connecting, Self::PassedThrough];
        let all = own.into_iter().chain(Status::ALL.map(Self::Of));
        all.filter(|state| !state.is_end())
    }

    fn is_end(self) -> bool {
        matches!(self, Self::Of(status) if ENDS.contains(&status))
    }

    /// Returns true if the guest runs at the destination, but the source still has pages that the destination lacks.
    #[must_use]
    pub fn is_postcopy(self) -> bool {
        let postcopy = [Status::PostcopyActive, Status::PostcopyRecover];
        matches!(self, Self::Of(status) if postcopy.contains(&status))
    }
}

/// A session's share of the host's bandwidth and cores; 0 is unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Share {
    /// Bandwidth, in bytes a second.
    pub bandwidth: u64,
    /// CPU time, in thousandths of a core.
    pub cpu: u32,
}

/// State and progress of a session at one time.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// State of the session.
    pub state: State,
    /// Last progress report of the relay.
    pub progress: RelayProgress,
    /// Kind of the stall in the last progress report; `None` if nothing stalls.
    pub(crate) stall: Option<StallKind>,
    /// Rate between the last two progress reports, in bytes a second.
    pub rate: f64,
    /// Weight in the division of bandwidth and cores.
    pub weight: u32,
    /// Limit set by the operator, in bytes a second; 0 for none.
    pub limit: u64,
    /// Current share of the host's bandwidth and cores.
    pub share: Share,
    /// Compression method of the pages. "auto" if each packet has its own method; empty before the method is known.
    pub method: &'static str,
    /// Time at which the guest was paused; `None` while the guest runs.
    pub(crate) stopped: Option<Instant>,
    /// Length of the guest's pause; `None` until the guest runs at the destination. The pause starts when the stream shows it to
    /// the relay: by SWITCHOVER_START, the last section of RAM, a command of postcopy, or the first device state. A source with
    /// multifd sends the last section after the last dirty pages. The pause ends when the destination reports that the guest
    /// runs; in postcopy, when the data that the guest needs to run is on its way.
    pub downtime: Option<Duration>,
    /// Duration of the session; `None` before its end.
    pub took: Option<Duration>,
    /// Error of a failed session; `None` otherwise.
    pub error: Option<String>,
    /// Final report of the relay; `None` before the end, after a failure, or without a relay.
    pub report: Option<Box<RelayReport>>,
}

impl Snapshot {
    /// Changes the state to `state`; returns true if this is a change. A final state never changes.
    pub fn enter(&mut self, state: State) -> bool {
        let is_new = self.state != state && !self.state.is_end();
        if is_new {
            self.state = state;
        }
        is_new
    }

    /// Records that the stream shows the guest's pause at `now`.
    pub fn record_pause(&mut self, now: Instant) {
        if self.downtime.is_none() {
            self.stopped.get_or_insert(now);
        }
    }

    /// Records the relay's state `status` at `now`, and the guest's pause. Returns true if the session's state changed.
    pub fn record_status(&mut self, status: Status, now: Instant) -> bool {
        match status {
            Status::PreSwitchover | Status::Device => self.record_pause(now),
            Status::PostcopyActive | Status::Completed => {
                let stopped = self.stopped.take();
                let downtime = stopped.map(|at| now.saturating_duration_since(at));
                self.downtime = self.downtime.or(downtime);
            }
            _ => self.stopped = None,
        }
        // Final states are set in `end`, together with the relay's report.
        let state = State::Of(status);
        state != State::default() && !state.is_end() && self.enter(state)
    }

    /// Records a progress report and the relay's stall. Returns true if the kind of the stall changed.
    pub fn record_progress(&mut self, progress: &RelayProgress, stall: Option<Stall>) -> bool {
        let time = progress.elapsed.saturating_sub(self.progress.elapsed);
        if !time.is_zero() {
            let before = self.progress.sent_bytes;
            let bytes = progress.sent_bytes.saturating_sub(before);
            // The bytes of half a second are far below 2^53, so the conversion is exact.
            #[allow(clippy::cast_precision_loss)]
            let bytes = bytes as f64;
            self.rate = bytes / time.as_secs_f64();
        }
        self.progress = *progress;
        let kind = stall.map(|stall| stall.kind);
        std::mem::replace(&mut self.stall, kind) != kind
    }

    /// Sets the session's share. Returns the new rate limit of the session in bytes a second (0: unlimited), or `None` if the
    /// share is unchanged. `whole` is the host's total bandwidth in bytes a second; 0 is unlimited.
    pub fn set_share(&mut self, share: Share, whole: u64) -> Option<u64> {
        if std::mem::replace(&mut self.share, share) == share {
            return None;
        }
        let most = if self.limit == 0 {
            u64::MAX
        } else {
            self.limit
        };
        // The rate limiter of all sessions enforces the total. A session that waited for this limiter must be able to catch up.
        let room = if whole == 0 { 0 } else { share.bandwidth / 4 };
        Some(match share.bandwidth {
            0 => 0,
            part => part.saturating_add(room).min(most),
        })
    }

    /// Ends the session with `outcome` after the time `took`. Returns the end of the session's last log line.
    pub fn end(
        &mut self,
        outcome: Result<Option<RelayReport>, String>,
        is_cancelled: bool,
        took: Duration,
    ) -> String {
        self.rate = 0.0;
        self.took = Some(took);
        let mut line = format!("seconds={:.1}", took.as_secs_f64());
        let status = match outcome {
            Ok(report) => {
                if let Some(report) = report {
                    line += &self.figures(&report);
                    self.report = Some(Box::new(report));
                }
                Status::Completed
            }
            Err(why) => {
                line += &format!(" error=\"{why}\"");
                self.error = Some(why);
                match is_cancelled {
                    true => Status::Cancelled,
                    false => Status::Failed,
                }
            }
        };
        self.enter(State::Of(status));
        line
    }

    fn figures(&self, report: &RelayReport) -> String {
        let downtime = self.downtime.map(|time| time.as_secs_f64());
        let downtime = downtime.map(|time| format!(" downtime-seconds={time:.3}"));
        let passed = report.passed_through.as_ref();
        let passed = passed.map(|why| format!(" passed-through=\"{why}\""));
        format!(
            "{} sent={} received={} pages={} zero-pages={} ratio={:.2} cpu-seconds={:.2}{}",
            downtime.unwrap_or_default(),
            report.sent_bytes,
            report.received_bytes,
            report.normal_pages,
            report.zero_pages,
            report.ratio,
            report.side.cpu_s,
            passed.unwrap_or_default(),
        )
    }

    /// Returns how long the guest has been paused so far, or was paused.
    #[must_use]
    pub fn paused_time(&self, now: Instant) -> Duration {
        let stands = self.stopped.map(|at| now.saturating_duration_since(at));
        self.downtime.or(stands).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use fastrand::Rng;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn downtime_is_from_the_guests_stop_to_its_run_at_the_destination() {
        let begun = Instant::now();
        let after = |statuses: &[(u64, Status)]| {
            let mut snapshot = Snapshot::default();
            for (ms, status) in statuses {
                snapshot.record_status(*status, begun + Duration::from_millis(*ms));
            }
            snapshot.downtime.map(|time| time.as_millis())
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
            "no relay saw it"
        );
    }

    #[test]
    fn downtime_begins_where_the_stream_first_shows_the_pause() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut snapshot = Snapshot::default();
        snapshot.record_status(Status::Active, at(0));
        snapshot.record_pause(at(10));
        assert_eq!(snapshot.paused_time(at(12)), 2 * MS);
        snapshot.record_status(Status::Device, at(15));
        snapshot.record_status(Status::Completed, at(17));
        snapshot.record_pause(at(20));
        assert_eq!(snapshot.paused_time(at(30)), 7 * MS);
        assert_eq!(snapshot.downtime, Some(7 * MS));
        let mut failed = Snapshot::default();
        failed.record_pause(at(10));
        failed.record_status(Status::Failed, at(15));
        assert_eq!((failed.downtime, failed.stopped), (None, None));
    }

    #[test]
    fn each_state_has_its_own_name_and_a_stopped_relay_has_none() {
        let names: Vec<_> = State::under_way().map(State::name).collect();
        let own = ["waiting", "connecting", "passed-through", "none", "setup"];
        assert_eq!(names[..own.len()], own);
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
        let mut snapshot = Snapshot::default();
        for status in Status::ALL {
            let is_own = snapshot.record_status(status, Instant::now());
            assert_eq!(
                is_own,
                names[own.len() - 1..].contains(&status.name()),
                "{status:?}"
            );
        }
        let postcopy = State::under_way().filter(|state| state.is_postcopy());
        let postcopy: Vec<_> = postcopy.map(State::name).collect();
        assert_eq!(postcopy, ["postcopy-active", "postcopy-recover"]);
    }

    #[test]
    fn a_rate_is_between_two_reports_and_a_stall_is_new_once() {
        let stalled = |kind| Stall {
            kind,
            peer: std::net::Ipv4Addr::new(192, 0, 2, 2).into(),
            time: Duration::from_secs(5),
        };
        let mut snapshot = Snapshot::default();
        let mut note = |ms, sent_bytes, stall: Option<StallKind>| {
            let progress = RelayProgress {
                elapsed: Duration::from_millis(ms),
                sent_bytes,
                ..RelayProgress::default()
            };
            let is_new = snapshot.record_progress(&progress, stall.map(stalled));
            (snapshot.rate, is_new)
        };
        assert_eq!(note(500, 100, None), (200.0, false));
        assert_eq!(note(500, 300, None), (200.0, false), "at the same time");
        assert_eq!(note(1000, 300, Some(StallKind::Silent)), (0.0, true));
        assert_eq!(note(1500, 800, Some(StallKind::Silent)), (1000.0, false));
        assert_eq!(note(2000, 700, Some(StallKind::NotReading)), (0.0, true));
        assert_eq!(note(2500, 700, None), (0.0, true));
    }

    #[test]
    fn a_share_leaves_room_to_catch_up_and_respects_the_operators_limit() {
        let share = |bandwidth| Share { bandwidth, cpu: 1 };
        let mut snapshot = Snapshot::default();
        assert_eq!(snapshot.set_share(share(0), 0), Some(0));
        assert_eq!(snapshot.set_share(share(0), 0), None, "it is the same");
        assert_eq!(snapshot.set_share(share(100), 1000), Some(125));
        assert_eq!(
            snapshot.set_share(share(80), 0),
            Some(80),
            "no whole to keep"
        );
        snapshot.limit = 110;
        assert_eq!(snapshot.set_share(share(100), 1000), Some(110));
        assert_eq!(snapshot.set_share(share(u64::MAX), 1), Some(110));
    }

    /// Events in any order: a relay's thread may report an event late.
    #[test]
    fn a_final_state_stays_and_a_pause_is_no_longer_than_its_migration() {
        for seed in 0..10_000 {
            let mut rng = Rng::with_seed(seed);
            let begun = Instant::now();
            let mut snapshot = Snapshot::default();
            let mut now = begun;
            let mut ended = None;
            for _ in 0..40 {
                now += MS * rng.u32(0..500);
                let before = snapshot.state;
                let is_new = match rng.u8(0..20) {
                    0 if ended.is_none() => {
                        let is_cancelled = rng.bool();
                        let outcome = match rng.bool() {
                            true => Ok(None),
                            false => Err("lost".to_owned()),
                        };
                        let expected = match (&outcome, is_cancelled) {
                            (Ok(_), _) => Status::Completed,
                            (Err(_), true) => Status::Cancelled,
                            (Err(_), false) => Status::Failed,
                        };
                        let line = snapshot.end(outcome, is_cancelled, now - begun);
                        let seconds = format!("seconds={:.1}", (now - begun).as_secs_f64());
                        assert!(line.starts_with(&seconds), "{line}");
                        assert_eq!(snapshot.state, State::Of(expected), "seed {seed}");
                        ended = Some(snapshot.state);
                        true
                    }
                    1..4 => snapshot.enter(State::Waiting),
                    4..7 => snapshot.enter(State::Connecting),
                    _ => snapshot.record_status(*rng.choice(&Status::ALL).unwrap(), now),
                };
                assert_eq!(is_new, before != snapshot.state, "seed {seed}");
                assert!(snapshot.paused_time(now) <= now - begun, "seed {seed}");
                if let Some(state) = ended {
                    assert_eq!(snapshot.state, state, "seed {seed}");
                }
            }
        }
    }
}
