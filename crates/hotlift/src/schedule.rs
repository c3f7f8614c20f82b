//! What a limit allows, one thing after the other: who books takes its time, and waits until the schedule has reached it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::lock::lock;

/// Credit that unused time may build up, so that an idle phase is not made up for by a flood: a few packets at usual rates, and
/// 2 % of a second.
pub(crate) const BURST: Duration = Duration::from_millis(20);

/// When all that was booked so far will be over; `None` before the first.
#[derive(Debug, Default)]
pub(crate) struct Schedule(Mutex<Option<Instant>>);

impl Schedule {
    /// The end of what is booked, while nobody books.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        lock(&self.0)
    }

    /// Books what takes as long as `time` says while nobody else books; `None`: nothing. When it begins and ends, if it is `now`.
    pub(crate) fn book(
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

/// When what was to be over at `until` is, if its rate is `to` from `now` on, and was `from`; neither is 0.
pub(crate) fn rescaled(until: Instant, now: Instant, from: u64, to: u64) -> Instant {
    let left = until.saturating_duration_since(now);
    match left.is_zero() {
        true => until,
        false => now + nanos_over(left.as_nanos().saturating_mul(from.into()), to),
    }
}

/// So many ns over a rate, which is not 0.
pub(crate) fn nanos_over(nanos: u128, rate: u64) -> Duration {
    let nanos = nanos / u128::from(rate);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
