//! Rate limiter (`max-bandwidth`), shared by all channels of a migration.
//!
//! Each writer reserves time for its bytes before it writes, and waits until the reserved time has come. QEMU counts bytes in
//! windows of 100 ms, and sleeps at the end of each window. A reservation per packet has the same average rate, but no bursts,
//! which a switch with a small buffer would drop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::figures::to_f64;
use crate::life::Life;
use crate::schedule::{Schedule, nanos_over, rescaled};

/// Rates that presently limit a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Pace {
    /// The migration's own rate, and the rate that it shares with other migrations.
    Running,
    /// No rate, as in QEMU: at a low rate, the start of a migration would time out.
    Opening,
    /// Only the migration's own rate. Its guest is paused, so it takes precedence over other migrations with the same shared
    /// rate.
    Paused,
}

/// Present [`Pace`] of a migration. All clones share the same value.
#[derive(Debug, Clone, Default)]
pub(crate) struct Phase(Arc<AtomicU8>);

impl Phase {
    /// Sets the rates that limit the migration.
    pub(crate) fn set(&self, pace: Pace) {
        self.0.store(pace as u8, Ordering::Release);
    }

    fn get(&self) -> Pace {
        match self.0.load(Ordering::Acquire) {
            1 => Pace::Opening,
            2 => Pace::Paused,
            _ => Pace::Running,
        }
    }
}

/// Rate limit that several migrations share ([`Control::share_rate`](crate::Control::share_rate)).
#[derive(Debug, Clone)]
pub struct SharedRate(Arc<Pacer>);

impl Default for SharedRate {
    /// Creates a shared rate without a limit.
    fn default() -> Self {
        Self(Arc::new(Pacer::new(0)))
    }
}

impl SharedRate {
    /// Sets the rate in bytes per second; 0 is unlimited.
    pub fn set(&self, bytes_per_second: u64) {
        if self.0.rate.load(Ordering::Relaxed) != bytes_per_second {
            self.0.set_rate(bytes_per_second);
        }
    }

    /// Waits until `bytes` bytes of other traffic may be sent at this rate, or until `life` is cancelled or closed.
    pub(crate) fn wait(&self, bytes: usize, life: &Life) {
        self.0.wait_here(bytes, life);
    }
}

/// Rate limiter of one migration, shared by all of its channels.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// Rate in bytes per second; 0 is unlimited.
    rate: AtomicU64,
    /// Time until which the rate is reserved.
    schedule: Schedule,
    /// Count of changes of the rate.
    changes: AtomicU64,
    /// True once the limit was permanently removed.
    lifted: AtomicBool,
    /// Rate limit that the migration shares with other migrations; `None` if it shares none.
    shared: Option<SharedRate>,
    phase: Phase,
}

impl Pacer {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self {
            rate: AtomicU64::new(bytes_per_second),
            schedule: Schedule::default(),
            changes: AtomicU64::new(0),
            lifted: AtomicBool::new(false),
            shared: None,
            phase: Phase::default(),
        }
    }

    /// Adds the rate limit `shared`, which several migrations share.
    pub(crate) fn under(self, shared: Option<SharedRate>) -> Self {
        Self { shared, ..self }
    }

    /// Makes this pacer use the rates that `phase` selects.
    pub(crate) fn in_phase(self, phase: &Phase) -> Self {
        let phase = phase.clone();
        Self { phase, ..self }
    }

    /// Sets the rate in bytes per second; 0 is unlimited. Existing reservations, up to one packet per channel, are converted to
    /// the new rate. So the average is right even if the rate changes often.
    pub(crate) fn set_rate(&self, bytes_per_second: u64) {
        self.change(bytes_per_second, false, Instant::now());
    }

    /// Removes the limit permanently: later changes of the rate are ignored.
    pub(crate) fn lift(&self) {
        self.change(0, true, Instant::now());
    }

    fn change(&self, bytes_per_second: u64, for_good: bool, now: Instant) {
        let mut booked_until = self.schedule.lock();
        if !self.lifted.fetch_or(for_good, Ordering::Relaxed) {
            let before = self.rate.swap(bytes_per_second, Ordering::Relaxed);
            let is_paced = before > 0 && bytes_per_second > 0;
            *booked_until = booked_until
                .filter(|_| is_paced)
                .map(|until| rescaled(until, now, before, bytes_per_second));
            self.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Reserves time for `bytes` bytes. Waits until they may be written, or until `life` is cancelled or closed. Returns the
    /// time that it waited.
    pub(crate) fn wait(&self, bytes: usize, life: &Life) -> Duration {
        let pace = self.phase.get();
        if pace == Pace::Opening {
            return Duration::ZERO;
        }
        let waited = self.wait_here(bytes, life);
        let Some(SharedRate(shared)) = &self.shared else {
            return waited;
        };
        if self.lifted.load(Ordering::Relaxed) {
            return waited;
        }
        if pace == Pace::Paused {
            // To compensate, the other migrations wait longer.
            shared.reserve(bytes, Instant::now());
            return waited;
        }
        waited + shared.wait_here(bytes, life)
    }

    fn wait_here(&self, bytes: usize, life: &Life) -> Duration {
        let mut changes = self.changes.load(Ordering::Acquire);
        let mut rate = self.rate.load(Ordering::Relaxed);
        let begun = Instant::now();
        let Some(mut until) = self.reserve(bytes, begun) else {
            return Duration::ZERO;
        };
        loop {
            life.sleep_while(until, || self.changes.load(Ordering::Acquire) == changes);
            let now = Instant::now();
            changes = self.changes.load(Ordering::Acquire);
            let before = std::mem::replace(&mut rate, self.rate.load(Ordering::Relaxed));
            if now >= until || before == 0 || rate == 0 || life.is_stopped() {
                return now - begun;
            }
            until = rescaled(until, now, before, rate);
        }
    }

    /// Returns true if the rate is limited.
    pub(crate) fn is_limited(&self) -> bool {
        self.rate.load(Ordering::Relaxed) > 0
    }

    /// Returns true if less was sent than the limit allows, or if there is no limit.
    pub(crate) fn is_behind(&self) -> bool {
        let booked = *self.schedule.lock();
        booked.is_none_or(|until| until < Instant::now())
    }

    /// Returns the time per byte that the rate limit enforces, in ns; 0 without a limit.
    pub(crate) fn nanos_per_byte(&self) -> f64 {
        match self.rate.load(Ordering::Relaxed) {
            0 => 0.0,
            rate => 1e9 / to_f64(rate),
        }
    }

    /// Reserves time for `bytes` bytes, from the time `now`. Returns the time from which they may be written; `None` if they
    /// may be written at once.
    fn reserve(&self, bytes: usize, now: Instant) -> Option<Instant> {
        // Checked without the lock first, so that a migration without a limit needs no lock.
        if self.rate.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let time = || match self.rate.load(Ordering::Relaxed) {
            0 => None,
            rate => Some(nanos_over(bytes as u128 * 1_000_000_000, rate)),
        };
        let start = self.schedule.reserve(time, now)?.start;
        (start > now).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::BURST;

    #[test]
    fn reserved_bytes_never_exceed_the_rate_by_more_than_the_burst() {
        let pacer = Pacer::new(1_000_000);
        let start = Instant::now();
        let mut now = start;
        let mut sent = 0;
        for step in 0..1000_u32 {
            // Some writers are late. The time that they lose must not cause a burst later.
            now += Duration::from_millis(u64::from(step % 7 == 0) * 40);
            if let Some(until) = pacer.reserve(10_000, now) {
                now = until;
            }
            sent += 10_000;
            let allowed = (now - start + BURST).as_secs_f64() * 1e6 + 10_000.0;
            assert!(f64::from(sent) <= allowed, "{sent} bytes at step {step}");
        }
    }

    #[test]
    fn a_rate_that_changes_often_is_kept() {
        let rates = [900_000, 1_100_000];
        let start = Instant::now();
        let pacer = Pacer::new(rates[0]);
        let (mut allowed, mut sent) = (0.0, 0_u32);
        // Writers. For each: the time until which it waits, as `wait` does.
        let mut ready = [start; 4];
        for tick in 0..4000_u32 {
            let now = start + Duration::from_millis(tick.into());
            let change = usize::try_from(tick / 25).unwrap();
            let (before, rate) = (rates[change.saturating_sub(1) % 2], rates[change % 2]);
            if tick % 25 == 0 && tick > 0 {
                pacer.change(rate, false, now);
                for until in &mut ready {
                    *until = rescaled(*until, now, before, rate);
                }
            }
            for until in &mut ready {
                if *until <= now {
                    sent += 10_000;
                    *until = pacer.reserve(10_000, now).unwrap_or(now);
                }
            }
            allowed += to_f64(rate) / 1000.0;
            let most = allowed + 1e6 * BURST.as_secs_f64() + 4.0 * 10_000.0;
            assert!(
                f64::from(sent) <= most,
                "{sent} of {most} bytes after {tick} ms"
            );
        }
        assert!(f64::from(sent) > allowed * 0.95, "{sent} of {allowed}");
    }

    #[test]
    fn an_idle_phase_is_not_followed_by_a_burst() {
        let pacer = Pacer::new(1_000_000);
        let start = Instant::now();
        pacer.reserve(10_000, start);
        let later = start + Duration::from_secs(5);
        let at_once = (0..1000)
            .take_while(|_| pacer.reserve(10_000, later).is_none())
            .count();
        assert!(
            at_once <= 3,
            "{at_once} packets of 10 ms in a burst of 20 ms"
        );
    }

    #[test]
    fn without_limit_nothing_waits_and_a_new_rate_applies_to_the_next_packet() {
        let pacer = Pacer::new(0);
        let now = Instant::now();
        assert_eq!(pacer.reserve(usize::MAX, now), None);
        pacer.set_rate(1000);
        assert_eq!(pacer.reserve(1000, now), None);
        assert_eq!(pacer.reserve(1, now), Some(now + Duration::from_secs(1)));
        pacer.set_rate(0);
        assert_eq!(pacer.reserve(1000, now), None);
        pacer.lift();
        pacer.set_rate(1);
        pacer.reserve(1000, now);
        assert_eq!(pacer.reserve(1000, now), None, "it was lifted for good");
    }

    #[test]
    fn a_migration_with_a_paused_guest_does_not_wait_for_others_of_its_rate() {
        let shared = SharedRate::default();
        shared.set(1);
        let phase = Phase::default();
        let pacer = Pacer::new(0).under(Some(shared.clone())).in_phase(&phase);
        phase.set(Pace::Paused);
        for _ in 0..3 {
            assert_eq!(pacer.wait(1 << 20, &Life::default()), Duration::ZERO);
        }
        let now = Instant::now();
        let until = shared.0.reserve(1, now).expect("the others wait");
        assert!(until > now + Duration::from_secs(1 << 21));
    }

    #[test]
    fn migrations_with_a_shared_rate_keep_it_in_total() {
        const RATE: u32 = 4 << 20;
        const PACKET: usize = 64 << 10;
        let shared = SharedRate::default();
        shared.set(RATE.into());
        let begun = Instant::now();
        let sent: usize = std::thread::scope(|scope| {
            let sends = || {
                let pacer = Pacer::new(0).under(Some(shared.clone()));
                let packets = (0..10).map(|_| pacer.wait(PACKET, &Life::default()));
                packets.count() * PACKET
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(sends)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        let allowed = (begun.elapsed() + BURST).as_secs_f64() * f64::from(RATE);
        let last = to_f64(PACKET as u64);
        assert!(to_f64(sent as u64) <= allowed + last, "{sent} of {allowed}");
    }
}
