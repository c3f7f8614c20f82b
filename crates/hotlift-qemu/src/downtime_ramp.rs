//! A downtime limit that starts low, and is raised to at most the operator's limit if the rounds stop getting shorter. No I/O,
//! no clock.
//!
//! QEMU ends the precopy phase when the pages dirtied in a round, divided by the bandwidth, take less time than the limit. That
//! is the expected duration of the next round. So this module decides by the durations of rounds. QEMU's own bandwidth estimate
//! is not used: it is too high while the buffers of relays and sockets fill.
//!
//! While rounds shrink by a constant factor, all rounds shorter than the operator's limit together take only a few times that
//! limit.

use std::fmt;
use std::time::{Duration, Instant};

/// Number of doublings from the first limit to the operator's: for 300 ms the first limit is 9 ms.
const DOUBLINGS: u32 = 5;

/// A round counts as shrinking if it takes less than this share of the shortest earlier round. A comparison with the previous
/// round would vary too much on a busy host.
const SHRINKS: f64 = 0.9;

/// Number of rounds in a row that do not shrink, after which the operator's limit is set. No lower limit would be reached, and
/// a pause in the guest's writes may last only one round.
const STAGNANT_ROUNDS: u32 = 2;

/// After a raise the limit is at least this multiple of the duration of the last round.
const ROOM: f64 = 1.25;

/// Total time of rounds shorter than the operator's limit, as a multiple of that limit. Rounds that each shrink to three
/// quarters of the previous one take four times the limit in total.
const EXTRA: u32 = 4;

/// Total time of rounds shorter than the operator's limit, if QEMU may throttle the guest. Once a second QEMU compares the
/// bytes dirtied and sent, and in short rounds they are equal, so QEMU would throttle.
const EXTRA_BEFORE_THROTTLING: Duration = Duration::from_millis(500);

/// Time after a raise in which a raised limit must have had an effect. QEMU recomputes its threshold every 100 ms.
const EFFECT: Duration = Duration::from_millis(200);

/// Shortest round for which the remaining bytes are compared, too. QEMU is queried only some milliseconds after a round begins,
/// too late for short rounds. The durations of long rounds show nothing: with auto-converge QEMU ends each long round after 5
/// s.
const COMPARED: Duration = Duration::from_millis(200);

/// Shortest interval of polls: libvirt answers through a process.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

/// Interval of polls until the first figures.
const FIRST_INTERVAL: Duration = Duration::from_millis(200);

/// Longest interval of polls.
const LONGEST_INTERVAL: Duration = Duration::from_secs(1);

/// Ratio of dirtied bytes to sent bytes above which QEMU throttles the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThrottleTrigger {
    /// The ratio in percent: QEMU's `throttle-trigger-threshold`.
    pub percent: u64,
}

/// QEMU's default.
impl Default for ThrottleTrigger {
    fn default() -> Self {
        Self { percent: 50 }
    }
}

/// Figures that QEMU reports of an active migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Number of fetches of the dirty log (`dirty-sync-count`). 1 is the start, and 2 the end of the first round.
    pub rounds: u64,
    /// Bytes that remain to be sent in this round.
    pub remaining: u64,
    /// Bytes that the guest dirties per second.
    pub dirty: u64,
    /// Bytes that QEMU sends per second.
    pub sent: u64,
    /// True if QEMU throttles the guest.
    pub is_throttled: bool,
}

/// Reason for the current limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Rounds still get shorter, or the first round has not ended.
    Shrinks,
    /// A round shorter than the operator's limit was not shorter than the rounds before.
    Plateau,
    /// Rounds longer than the operator's limit do not get shorter.
    Stagnant,
    /// Rounds shorter than the operator's limit have reached their total time (`EXTRA`).
    Late,
    /// QEMU throttles the guest, or would soon throttle it.
    Throttling,
    /// Another QMP client changed the limit.
    Changed,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shrinks => "low while rounds get shorter",
            Self::Plateau => "raised because rounds do not get shorter",
            Self::Stagnant => "raised because the guest writes as fast as pages are sent",
            Self::Late => "raised because the last rounds took long",
            Self::Throttling => "raised before QEMU throttles the guest",
            Self::Changed => "as another client has set it",
        })
    }
}

/// The ramp of one migration's downtime limit.
#[derive(Debug)]
pub struct DowntimeRamp {
    /// Limits in milliseconds, ascending; the last is the operator's.
    steps: Vec<u64>,
    /// Index of the current limit.
    step: usize,
    throttle: Option<ThrottleTrigger>,
    reason: Reason,
    /// Number of rounds at the last poll that found a new round, and the time of that poll.
    seen: Option<(u64, Instant)>,
    /// Duration of the latest round.
    round: Duration,
    /// Time that the current round still takes, by QEMU's bandwidth.
    left: Option<Duration>,
    /// Duration of the shortest round.
    shortest: Option<Duration>,
    /// Smallest number of bytes that remained at the first poll of a round.
    least: Option<u64>,
    /// Number of rounds in a row that did not shrink.
    stagnant: u32,
    /// Start of the first round that was shorter than the operator's limit; `None` before.
    fits_since: Option<Instant>,
    raised_at: Option<Instant>,
}

/// Returns the limits up to the operator's limit `most`, ascending, in milliseconds. Each limit is half of the next limit.
fn steps(most: u64) -> Vec<u64> {
    let halves = (0..=DOUBLINGS).rev().map(|shift| (most >> shift).max(1));
    let mut steps: Vec<_> = halves.collect();
    steps.dedup();
    steps
}

impl DowntimeRamp {
    /// Creates the ramp up to the operator's limit `most`, in milliseconds; `None` if no limit is below `most`. `throttle` is
    /// QEMU's condition for throttling the guest; `None` if QEMU does not throttle.
    #[must_use]
    pub fn new(most: u64, throttle: Option<ThrottleTrigger>) -> Option<Self> {
        let steps = steps(most);
        (most > 0 && steps.len() > 1).then(|| Self::with(steps, throttle))
    }

    /// Creates a ramp that has the operator's limit from the start.
    #[must_use]
    pub fn constant(limit: u64) -> Self {
        Self::with(vec![limit], None)
    }

    fn with(steps: Vec<u64>, throttle: Option<ThrottleTrigger>) -> Self {
        Self {
            steps,
            step: 0,
            throttle,
            reason: Reason::Shrinks,
            seen: None,
            round: Duration::ZERO,
            left: None,
            shortest: None,
            least: None,
            stagnant: 0,
            fits_since: None,
            raised_at: None,
        }
    }

    /// Returns all limits that the ramp may set, in milliseconds, ascending.
    #[must_use]
    pub fn steps(&self) -> &[u64] {
        &self.steps
    }

    /// Returns the current limit in milliseconds.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.steps[self.step]
    }

    /// Returns the operator's limit in milliseconds.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.steps[self.steps.len() - 1]
    }

    /// Returns the reason for the current limit.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// Returns true if the limit does not change any more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.step + 1 == self.steps.len() || self.is_left()
    }

    /// Returns true if another client has changed the limit.
    #[must_use]
    pub fn is_left(&self) -> bool {
        self.reason == Reason::Changed
    }

    /// Ends the ramp after another client has changed the limit.
    pub fn leave(&mut self) {
        self.reason = Reason::Changed;
    }

    /// Returns the time until the next poll by a driver that gets no events: half of the time that the round still takes. Below
    /// the operator's limit, that is half of this limit: about eight polls in the time of these rounds (`EXTRA`).
    #[must_use]
    pub fn interval(&self) -> Duration {
        let most = Duration::from_millis(self.most());
        let shortest = (most / 2).clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL);
        self.left.map_or(FIRST_INTERVAL, |left| {
            (left / 2).clamp(shortest, LONGEST_INTERVAL)
        })
    }

    /// Evaluates QEMU's figures. Returns the new limit in milliseconds; `None` if the limit stays.
    pub fn poll(&mut self, now: Instant, figures: Figures) -> Option<u64> {
        if self.has_ended() {
            return None;
        }
        let is_new = self.measure(now, figures.rounds, figures.remaining);
        // QEMU reports no bandwidth at first.
        let ms = figures
            .remaining
            .saturating_mul(1000)
            .checked_div(figures.sent);
        self.left = Some(ms.map_or(Duration::ZERO, Duration::from_millis));
        // The first round sends all pages, dirty or not, and QEMU has not measured a dirty rate yet.
        if figures.rounds < 2 {
            return None;
        }
        let extra = self.fits_since.map(|since| now.duration_since(since));
        let most = Duration::from_millis(self.most());
        let percent = self.throttle.map(|trigger| trigger.percent);
        let throttles = |percent: u64| {
            figures.dirty.saturating_mul(100) > figures.sent.saturating_mul(percent)
                || extra.is_some_and(|extra| extra >= EXTRA_BEFORE_THROTTLING)
        };
        if figures.is_throttled || percent.is_some_and(throttles) {
            return self.raise(self.most(), now, Reason::Throttling);
        }
        match extra {
            None if self.stagnant >= STAGNANT_ROUNDS => {
                self.raise(self.most(), now, Reason::Stagnant)
            }
            None => None,
            Some(extra) if extra >= most * EXTRA => self.raise(self.most(), now, Reason::Late),
            Some(_) => {
                let has_settled = self
                    .raised_at
                    .is_none_or(|at| is_new && now.duration_since(at) >= EFFECT);
                if self.stagnant == 0 || !has_settled {
                    return None;
                }
                let round = self.round.mul_f64(ROOM);
                let wanted = u64::try_from(round.as_millis()).unwrap_or(u64::MAX);
                self.raise(wanted.max(self.limit() + 1), now, Reason::Plateau)
            }
        }
    }

    /// Measures the duration of the rounds that have ended since the last call. Returns false if no round has ended.
    fn measure(&mut self, now: Instant, rounds: u64, remaining: u64) -> bool {
        let (before, at) = *self.seen.get_or_insert((rounds, now));
        let least = *self.least.get_or_insert(remaining);
        let Some(ended @ 1..) = rounds.checked_sub(before) else {
            return false;
        };
        let round = now.duration_since(at) / u32::try_from(ended).unwrap_or(u32::MAX);
        let shortest = self.shortest.unwrap_or(Duration::MAX);
        let shrinks =
            round < shortest.mul_f64(SHRINKS) || (round >= COMPARED && !is_share(remaining, least));
        self.stagnant = if shrinks { 0 } else { self.stagnant + 1 };
        // The first round sends all pages, so a short one does not mean that the guest dirties few pages.
        if before >= 2 && round <= Duration::from_millis(self.most()) {
            self.fits_since.get_or_insert(at);
        }
        self.round = round;
        self.shortest = Some(shortest.min(round));
        self.least = Some(least.min(remaining));
        self.seen = Some((rounds, now));
        true
    }

    /// Raises the limit to the first step of at least `wanted` milliseconds, or to the last step. Returns the new limit.
    fn raise(&mut self, wanted: u64, now: Instant, reason: Reason) -> Option<u64> {
        let last = self.steps.len() - 1;
        let step = self.steps.iter().position(|&step| step >= wanted);
        self.step = step.unwrap_or(last);
        self.reason = reason;
        self.stagnant = 0;
        self.raised_at = Some(now);
        Some(self.limit())
    }
}

/// Returns true if `bytes` are at least the share [`SHRINKS`] of `before`: the round has not become smaller.
fn is_share(bytes: u64, before: u64) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "compared roughly")]
    let [bytes, before] = [bytes, before].map(|count| count as f64);
    bytes >= before * SHRINKS
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = 300;

    /// A guest, its QEMU and a link, in steps of a millisecond.
    #[derive(Debug, Clone, Copy)]
    struct Model {
        ram: f64,
        /// Bytes per millisecond.
        link: f64,
        /// Bytes per millisecond that the guest dirties, into at most `working_set` bytes.
        dirty: f64,
        working_set: f64,
        /// Milliseconds that a fetch of the dirty log takes.
        sync: u64,
        auto_converge: bool,
        /// Time in milliseconds from the start in which the guest writes nothing.
        rests: (u64, u64),
        /// Milliseconds that each query and each change of the limit takes, if the driver gets no events; QEMU then begins with
        /// the operator's limit.
        polled: Option<u64>,
    }

    /// 4 GiB at 1 Gbit/s.
    const MODEL: Model = Model {
        ram: 4e9,
        link: 125e3,
        dirty: 0.0,
        working_set: 2e9,
        sync: 1,
        auto_converge: false,
        rests: (0, 0),
        polled: None,
    };

    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Ran {
        total: u64,
        rounds: u64,
        downtime: u64,
        limit: u64,
        /// Time at which QEMU throttles the guest, and the downtime limit at that time, both in milliseconds.
        throttled: Option<(u64, u64)>,
    }

    impl Model {
        /// Simulates a migration to its end: with `ramp`, or with the constant limit of the operator.
        fn run(self, mut ramp: Option<&mut DowntimeRamp>) -> Option<Ran> {
            let begin = Instant::now();
            let first = ramp.as_ref().filter(|_| self.polled.is_none());
            let mut limit = first.map_or(MOST, |ramp| ramp.limit());
            let (mut left, mut new, mut rounds) = (self.ram, 0.0, 1);
            let (mut window, mut bandwidth, mut threshold) = (0.0, 0.0, 0.0);
            let (mut looked_at, mut syncs_at, mut synced_at) = (0, None, 0);
            let (mut period, mut dirtied, mut sent, mut high) = (0, 0.0, 0.0, 0);
            let mut throttled = None;
            let (mut rate, mut is_event) = (0.0, false);
            let (mut poll_at, mut later) = (200, None);
            for ms in 1..600_000 {
                if ms < self.rests.0 || ms >= self.rests.1 {
                    let is_slow = if throttled.is_some() { 0.8 } else { 1.0 };
                    let written = (self.dirty * is_slow).min(self.working_set - new);
                    new += written;
                    dirtied += written;
                }
                let out = f64::min(left, self.link);
                (left, window, sent) = (left - out, window + out, sent + out);
                let mut is_synced = false;
                // QEMU fetches the dirty log once the remaining bytes are below the threshold. With auto-converge it also does
                // so every 5 s.
                let is_forced = self.auto_converge && rounds > 1 && ms - synced_at >= 5000;
                if (left <= 0.0 || left < threshold || is_forced) && syncs_at.is_none() {
                    syncs_at = Some(ms + self.sync);
                }
                if ms % 100 == 0 {
                    bandwidth = window / 100.0;
                    #[expect(clippy::cast_precision_loss, reason = "a model")]
                    let limit = limit as f64;
                    (threshold, window) = (bandwidth * limit, 0.0);
                }
                if syncs_at.is_some_and(|at| ms >= at) {
                    // A page that is dirtied again before it was sent counts once.
                    left = (left + new).min(f64::max(left, self.working_set));
                    (new, syncs_at, is_synced, synced_at) = (0.0, None, true, ms);
                    rounds += 1;
                    if ms - period >= 1000 {
                        high = if dirtied > sent / 2.0 { high + 1 } else { 0 };
                        rate = dirtied / f64::from(u32::try_from(ms - period).unwrap());
                        (period, dirtied, sent) = (ms, 0.0, 0.0);
                        if self.auto_converge && high >= 2 {
                            throttled.get_or_insert((ms, limit));
                        }
                    }
                    if left < threshold || left == 0.0 {
                        #[expect(
                            clippy::cast_possible_truncation,
                            clippy::cast_sign_loss,
                            reason = "a model"
                        )]
                        let downtime = (left / self.link) as u64;
                        return Some(Ran {
                            total: ms + downtime,
                            rounds,
                            downtime,
                            limit,
                            throttled,
                        });
                    }
                }
                is_event |= is_synced;
                if later.is_some_and(|(at, _)| ms >= at) {
                    (_, limit) = later.take().unwrap();
                }
                let is_due = match self.polled {
                    Some(_) => ms >= poll_at,
                    None => (is_event && ms - looked_at >= 20) || ms - looked_at >= 500,
                };
                if is_due {
                    (looked_at, is_event) = (ms, false);
                    #[expect(
                        clippy::cast_possible_truncation,
                        clippy::cast_sign_loss,
                        reason = "a model"
                    )]
                    let per_second = |rate: f64| (rate * 1e3) as u64;
                    let figures = Figures {
                        rounds,
                        remaining: per_second(left / 1e3),
                        dirty: per_second(rate),
                        sent: per_second(bandwidth),
                        is_throttled: throttled.is_some(),
                    };
                    let now = begin + Duration::from_millis(ms);
                    let Some(ramp) = ramp.as_mut() else { continue };
                    let set = ramp.poll(now, figures);
                    match (self.polled, set) {
                        (Some(time), _) => {
                            let interval = u64::try_from(ramp.interval().as_millis()).unwrap();
                            poll_at = ms + time + interval;
                            later = (ramp.limit() != limit).then(|| (ms + 2 * time, ramp.limit()));
                        }
                        (None, Some(set)) => {
                            assert!(set > limit && set <= MOST, "{limit} -> {set}");
                            limit = set;
                        }
                        (None, None) => {}
                    }
                }
            }
            None
        }

        /// Simulates two migrations: with the ramp, and with the operator's limit. Also returns the reason for the ramp's last
        /// limit.
        fn both(self) -> (Option<Ran>, Option<Ran>, Reason) {
            let trigger = ThrottleTrigger { percent: 50 };
            let mut ramp = DowntimeRamp::new(MOST, self.auto_converge.then_some(trigger)).unwrap();
            let ramped = self.run(Some(&mut ramp));
            let fixed = self.run(None);
            println!(
                "{self:?}\n  ramp  {ramped:?} {:?}\n  fixed {fixed:?}",
                ramp.reason()
            );
            (ramped, fixed, ramp.reason())
        }
    }

    #[test]
    fn the_limits_double_up_to_the_operators_limit() {
        assert_eq!(steps(300), [9, 18, 37, 75, 150, 300]);
        assert_eq!(steps(10), [1, 2, 5, 10]);
        for most in [0, 1] {
            assert!(DowntimeRamp::new(most, None).is_none());
        }
    }

    #[test]
    fn an_idle_guest_moves_at_the_first_limit_in_the_same_time() {
        let (ramp, fixed, reason) = Model {
            dirty: 10.0,
            ..MODEL
        }
        .both();
        let (ramp, fixed) = (ramp.unwrap(), fixed.unwrap());
        assert_eq!((ramp.limit, reason), (9, Reason::Shrinks));
        assert!(ramp.total <= fixed.total + 10);
        assert!(ramp.rounds <= fixed.rounds + 1);
    }

    #[test]
    fn a_guest_that_writes_below_the_link_is_paused_for_less_than_a_sixth_of_the_time() {
        for share in [0.1, 0.3, 0.5, 0.7, 0.8] {
            let (ramp, fixed, _) = Model {
                dirty: MODEL.link * share,
                ..MODEL
            }
            .both();
            let (ramp, fixed) = (ramp.unwrap(), fixed.unwrap());
            assert!(ramp.downtime * 6 <= fixed.downtime, "{share}: {ramp:?}");
            assert!(
                ramp.total <= fixed.total + 5 * MOST,
                "{share}: {ramp:?}, {fixed:?}"
            );
        }
    }

    #[test]
    fn a_guest_with_a_constant_dirty_rate_gets_the_operators_limit_after_two_rounds() {
        let rests = (150_000, 170_000);
        for share in [1.0, 1.5, 4.0] {
            let dirty = MODEL.link * share;
            let model = Model {
                dirty,
                working_set: 1e9,
                ..MODEL
            };
            let (ramp, fixed, reason) = model.both();
            assert_eq!((ramp, fixed, reason), (None, None, Reason::Stagnant));
            // In this pause of the guest a migration with the operator's limit would end.
            let (ramp, fixed, reason) = Model { rests, ..model }.both();
            assert_eq!(reason, Reason::Stagnant);
            let (ramp, fixed) = (ramp.unwrap(), fixed.unwrap());
            assert!(ramp.total <= fixed.total + 1000, "{ramp:?}, {fixed:?}");
        }
        let mut ramp = DowntimeRamp::new(MOST, None).unwrap();
        let begin = Instant::now();
        let mut look = |seconds, rounds| {
            let figures = Figures {
                rounds,
                ..Figures::default()
            };
            ramp.poll(begin + Duration::from_secs(seconds), figures)
        };
        assert_eq!([look(0, 1), look(10, 2), look(20, 3)], [None; 3]);
        assert_eq!(look(30, 4), Some(MOST));
        assert_eq!(look(40, 5), None);
    }

    #[test]
    fn a_small_working_set_that_is_written_at_once_gets_the_limit_that_it_needs() {
        for ms in [15, 50, 100, 200] {
            let working_set = MODEL.link * f64::from(ms);
            let model = Model {
                dirty: 4.0 * MODEL.link,
                working_set,
                ..MODEL
            };
            let (ramp, fixed, reason) = model.both();
            let (ramp, fixed) = (ramp.unwrap(), fixed.unwrap());
            assert_eq!(reason, Reason::Plateau, "{ms}");
            assert!(ramp.limit < 4 * u64::try_from(ms).unwrap() || ramp.limit == MOST);
            assert!(ramp.total <= fixed.total + 1000, "{ms}: {ramp:?} {fixed:?}");
        }
    }

    #[test]
    fn a_slow_dirty_log_raises_the_limit_as_far_as_it_needs() {
        let (ramp, fixed, reason) = Model {
            dirty: 20e3,
            sync: 60,
            ..MODEL
        }
        .both();
        let (ramp, fixed) = (ramp.unwrap(), fixed.unwrap());
        assert_eq!(reason, Reason::Plateau);
        assert!(ramp.limit < MOST, "{ramp:?}");
        assert!(ramp.total <= fixed.total + 1000, "{ramp:?} {fixed:?}");
    }

    #[test]
    fn the_limit_is_the_operators_before_qemu_throttles_the_guest() {
        for share in [0.2, 0.4, 0.49, 0.6, 0.8, 1.2] {
            let dirty = MODEL.link * share;
            let model = Model {
                dirty,
                auto_converge: true,
                ..MODEL
            };
            let mut ramp = DowntimeRamp::new(MOST, Some(ThrottleTrigger { percent: 50 })).unwrap();
            let ramped = model.run(Some(&mut ramp)).unwrap();
            let fixed = model.run(None).unwrap();
            match (ramped.throttled, fixed.throttled) {
                (None, None) => assert!(ramped.limit < MOST, "{share}: {ramped:?}"),
                (Some((at, limit)), Some((fixed, _))) => {
                    assert_eq!(limit, MOST, "{share}");
                    assert!(at + MOST >= fixed, "{share}: {at} {fixed}");
                }
                one => panic!("{share}: {one:?}"),
            }
        }
    }

    /// A model whose driver asks libvirt.
    const POLLED: Model = Model {
        polled: Some(40),
        ..MODEL
    };

    #[test]
    fn polls_suffice_for_a_low_limit_while_the_guest_writes_below_the_link() {
        // Close to the link, polls miss the ends of the last rounds, and the limit rises.
        for (share, factor) in [(0.0, 6), (0.1, 6), (0.3, 6), (0.5, 6), (0.7, 6), (0.8, 2)] {
            let dirty = MODEL.link * share;
            let (ramp, fixed, _) = Model { dirty, ..POLLED }.both();
            let (ramp, fixed) = (ramp.unwrap(), fixed.unwrap());
            assert!(
                ramp.downtime * factor <= fixed.downtime,
                "{share}: {ramp:?}, {fixed:?}"
            );
            assert!(
                ramp.total <= fixed.total + 5 * MOST,
                "{share}: {ramp:?}, {fixed:?}"
            );
        }
    }

    #[test]
    fn polls_suffice_to_raise_the_limit_for_a_guest_that_needs_it() {
        for ms in [15, 50, 100, 200] {
            let model = Model {
                dirty: 4.0 * MODEL.link,
                working_set: MODEL.link * f64::from(ms),
                ..POLLED
            };
            let (ramp, fixed, _) = model.both();
            let (ramp, fixed) = (ramp.unwrap(), fixed.unwrap());
            assert!(ramp.total <= fixed.total + 2000, "{ms}: {ramp:?} {fixed:?}");
        }
        let model = Model {
            dirty: MODEL.link * 1.5,
            working_set: 1e9,
            rests: (150_000, 170_000),
            ..POLLED
        };
        let (ramp, fixed, reason) = model.both();
        let (ramp, fixed) = (ramp.unwrap(), fixed.unwrap());
        assert_eq!((ramp.limit, reason), (MOST, Reason::Stagnant));
        assert!(ramp.total <= fixed.total + 1000, "{ramp:?}, {fixed:?}");
    }

    #[test]
    fn polls_get_closer_only_towards_the_end_of_a_round() {
        let mut ramp = DowntimeRamp::new(MOST, None).unwrap();
        assert_eq!(ramp.interval(), FIRST_INTERVAL);
        let begin = Instant::now();
        let mut interval = |ms, remaining| {
            let figures = Figures {
                rounds: 1,
                remaining,
                sent: 1_000_000,
                ..Figures::default()
            };
            ramp.poll(begin + Duration::from_millis(ms), figures);
            ramp.interval().as_millis()
        };
        assert_eq!(interval(0, 60_000_000), 1000);
        assert_eq!(interval(1000, 1_200_000), 600);
        assert_eq!(interval(2000, 0), 150);
    }

    #[test]
    fn a_constant_limit_never_changes() {
        let mut ramp = DowntimeRamp::constant(200);
        assert_eq!((ramp.limit(), ramp.has_ended()), (200, true));
        assert_eq!(ramp.poll(Instant::now(), Figures::default()), None);
    }

    #[test]
    fn a_limit_that_another_client_has_set_stays() {
        let mut ramp = DowntimeRamp::new(MOST, None).unwrap();
        ramp.leave();
        let begin = Instant::now();
        for rounds in 1..100 {
            let figures = Figures {
                rounds,
                ..Figures::default()
            };
            let now = begin + Duration::from_secs(10 * rounds);
            assert_eq!(ramp.poll(now, figures), None);
        }
        assert!(ramp.has_ended());
    }
}
