//! `max-bandwidth`: one budget that all channels of a migration draw from.
//!
//! Each writer books its bytes before it writes and waits until the schedule has reached them. QEMU counts bytes in
//! windows of 100 ms and sleeps at their ends; booking each packet keeps the same average without a stop-and-go that a
//! shallow switch buffer would drop.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::control::{Control, Status};
use crate::figures::to_f64;
use crate::schedule::{Schedule, nanos_over};

/// The budget of all channels together.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// Bytes a second; 0 is unlimited.
    rate: AtomicU64,
    /// The bytes booked so far, at `rate`.
    schedule: Schedule,
    /// Changes of the rate so far.
    changes: AtomicU64,
    /// Whether the rate is to change no more.
    lifted: AtomicBool,
}

impl Pacer {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self {
            rate: AtomicU64::new(bytes_per_second),
            schedule: Schedule::default(),
            changes: AtomicU64::new(0),
            lifted: AtomicBool::new(false),
        }
    }

    /// Changes the rate from the next packet on; 0 is unlimited. What is booked already, up to a packet
    /// of each channel, goes out at once: whoever waits for it at a low rate is not to wait on.
    pub(crate) fn set_rate(&self, bytes_per_second: u64) {
        self.change(bytes_per_second, false);
    }

    /// Takes the limit away for good.
    pub(crate) fn lift(&self) {
        self.change(0, true);
    }

    fn change(&self, bytes_per_second: u64, for_good: bool) {
        let mut booked_until = self.schedule.lock();
        if !self.lifted.fetch_or(for_good, Ordering::Relaxed) {
            self.rate.store(bytes_per_second, Ordering::Relaxed);
            *booked_until = None;
            self.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Books `bytes` and waits until they may be written. Returns early when `control` stops. What opens
    /// a migration is not paced, as QEMU does not: at a low rate it would time out. How long that was.
    pub(crate) fn wait(&self, bytes: usize, control: &Control) -> Duration {
        if control.status() == Status::Setup {
            return Duration::ZERO;
        }
        let changes = self.changes.load(Ordering::Acquire);
        let now = Instant::now();
        let Some(until) = self.book(bytes, now) else {
            return Duration::ZERO;
        };
        control.sleep_while(until, || self.changes.load(Ordering::Acquire) == changes);
        now.elapsed()
    }

    /// Whether there is a limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.rate.load(Ordering::Relaxed) > 0
    }

    /// Whether less was sent of late than the limit allows.
    pub(crate) fn is_behind(&self) -> bool {
        let booked = *self.schedule.lock();
        booked.is_none_or(|until| until < Instant::now())
    }

    /// Time that a byte takes at the limit, in ns; 0 without one.
    pub(crate) fn nanos_per_byte(&self) -> f64 {
        match self.rate.load(Ordering::Relaxed) {
            0 => 0.0,
            rate => 1e9 / to_f64(rate),
        }
    }

    /// When `bytes` more may be written if it is `now`; `None` for at once.
    fn book(&self, bytes: usize, now: Instant) -> Option<Instant> {
        // Looked at first without the lock: a migration without a limit is the fastest one.
        if self.rate.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let time = || match self.rate.load(Ordering::Relaxed) {
            0 => None,
            rate => Some(nanos_over(bytes as u128 * 1_000_000_000, rate)),
        };
        let start = self.schedule.book(time, now)?.start;
        (start > now).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use crate::schedule::BURST;

    #[test]
    fn booked_bytes_never_exceed_the_rate_by_more_than_the_burst() {
        let pacer = Pacer::new(1_000_000);
        let start = Instant::now();
        let mut now = start;
        let mut sent = 0;
        for step in 0..1000_u32 {
            // Writers come late now and then; the time they waste must not come back as a flood.
            now += Duration::from_millis(u64::from(step % 7 == 0) * 40);
            if let Some(until) = pacer.book(10_000, now) {
                now = until;
            }
            sent += 10_000;
            let allowed = (now - start + BURST).as_secs_f64() * 1e6 + 10_000.0;
            assert!(f64::from(sent) <= allowed, "{sent} bytes at step {step}");
        }
    }

    #[test]
    fn an_idle_phase_is_not_made_up_for_by_a_flood() {
        let pacer = Pacer::new(1_000_000);
        let start = Instant::now();
        pacer.book(10_000, start);
        let later = start + Duration::from_secs(5);
        let at_once = (0..1000)
            .take_while(|_| pacer.book(10_000, later).is_none())
            .count();
        assert!(
            at_once <= 3,
            "{at_once} packets of 10 ms in a burst of 20 ms"
        );
    }

    #[test]
    fn no_limit_never_waits_and_a_new_rate_counts_from_the_next_packet() {
        let pacer = Pacer::new(0);
        let now = Instant::now();
        assert_eq!(pacer.book(usize::MAX, now), None);
        pacer.set_rate(1000);
        assert_eq!(pacer.book(1000, now), None);
        assert_eq!(pacer.book(1, now), Some(now + Duration::from_secs(1)));
        pacer.set_rate(0);
        assert_eq!(pacer.book(1000, now), None);
        pacer.lift();
        pacer.set_rate(1);
        pacer.book(1000, now);
        assert_eq!(pacer.book(1000, now), None, "it was lifted for good");
    }

    #[test]
    fn a_change_of_bandwidth_reaches_a_packet_that_waits_at_the_old_one() {
        let control = Control::new();
        let slow = Options {
            max_bandwidth: 1,
            ..Options::default()
        };
        let pacer = control.pacer(&slow);
        // Hours of bytes.
        pacer.wait(1 << 20, &control);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| pacer.wait(1, &control));
            while pacer.schedule.lock().is_none() {
                std::thread::yield_now();
            }
            control.change(&Options {
                max_bandwidth: 1 << 30,
                ..slow
            });
            waits.join().unwrap();
        });
        assert!(!control.is_stopped());
        assert_eq!(pacer.rate.load(Ordering::Relaxed), 1 << 30);
    }
}
