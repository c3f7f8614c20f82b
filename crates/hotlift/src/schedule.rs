//! Schedule of a rate limit. Each caller reserves time, and waits until the reserved time has come.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::lock::lock;

/// Maximum unused time that can be made up for later: a few packets at usual rates, and 2 % of a second. More would cause a
/// burst after an idle phase.
pub(crate) const BURST: Duration = Duration::from_millis(20);

/// Time until which the schedule is reserved; `None` before the first reservation.
#[derive(Debug, Default)]
pub(crate) struct Schedule(Mutex<Option<Instant>>);

impl Schedule {
    /// Locks the schedule, to read or change the time until which it is reserved.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        lock(&self.0)
    }

    /// Reserves the duration that `time` returns. Calls `time` with the lock. Returns start and end of the reservation. If
    /// `time` returns `None`, reserves nothing and returns `None`.
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

/// Returns the new end of a reservation after a change of the rate at the time `now`. The old end is `until`. The rates `from`
/// and `to` must not be 0.
pub(crate) fn rescaled(until: Instant, now: Instant, from: u64, to: u64) -> Instant {
    let left = until.saturating_duration_since(now);
    match left.is_zero() {
        true => until,
        false => now + nanos_over(left.as_nanos().saturating_mul(from.into()), to),
    }
}

/// Divides `nanos` ns by `rate`, which must not be 0.
pub(crate) fn nanos_over(nanos: u128, rate: u64) -> Duration {
    let nanos = nanos / u128::from(rate);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
