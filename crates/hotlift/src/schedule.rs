//! Schedule of a limit: each caller books its time, and waits until the schedule has reached it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::lock::lock;

/// Credit that unused time may build up: a few packets at usual rates, and 2 % of a second. More would cause a flood after an
/// idle phase.
pub(crate) const BURST: Duration = Duration::from_millis(20);

/// End of everything booked so far; `None` before the first booking.
#[derive(Debug, Default)]
pub(crate) struct Schedule(Mutex<Option<Instant>>);

impl Schedule {
    /// Locks the schedule, and returns the end of the bookings.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        lock(&self.0)
    }

    /// Books, at `now`, the duration that `time` returns under the lock; `None` books nothing. Returns begin and end of the
    /// booking.
    pub(crate) fn reserve(
        &self,
        time: impl FnOnce() -> Option<Duration>,
        now: Instant,
    ) -> Option<Range<Instant>> {
        let mut until = self.lock();
        let time = time()?;
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let start = until.map_or(now, |until| until.max(earliest));
        let end = start.checked_add(time);
        *until = end;
        Some(start..end.unwrap_or(start))
    }
}

/// Returns the new end of a booking that ended at `until`, if the rate changes at `now` from `from` to `to`; neither is 0.
pub(crate) fn rescaled(until: Instant, now: Instant, from: u64, to: u64) -> Instant {
    let left = until.saturating_duration_since(now);
    match left.is_zero() {
        true => until,
        false => now + nanos_over(left.as_nanos().saturating_mul(from.into()), to),
    }
}

/// Divides nanoseconds by a rate, which is not 0.
pub(crate) fn nanos_over(nanos: u128, rate: u64) -> Duration {
    let nanos = nanos / u128::from(rate);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
