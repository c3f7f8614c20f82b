//! The time that the rest would take, which `ops/migrate` compares with the downtime limit.
//!
//! The rest is counted in pages, not in bytes on the wire: with a page compression method the
//! wire's bytes say nothing about how long a page takes. A round that met pages with content gives
//! the time of such a page; zero pages are cheaper, and a guest that is being written to has few of
//! them among its dirty pages, so they do not count towards the rate.

use std::time::Duration;

use hotlift_mem::PAGE_SIZE;

use crate::figures::{Counts, to_f64};

/// Rounds shorter than this say more about thread wake-ups than about the rate of pages.
const SHORTEST_SAMPLE: Duration = Duration::from_millis(5);

/// Rounds that may pass without the remainder shrinking before the operator is told.
const STALLED_ROUNDS: u32 = 3;

/// A round shrinks the remainder if it leaves less than this share of it.
const PROGRESS_SHARE: f64 = 0.9;

/// Learns the rates of a migration, round by round.
#[derive(Debug, Default)]
pub(crate) struct Estimator {
    seconds_per_page: Option<f64>,
    dirty_pages_per_second: f64,
    previous_pending: Option<u64>,
    stalled_rounds: u32,
    /// Bytes a second to reckon with in place of what was measured.
    switchover_bandwidth: Option<u64>,
}

impl Estimator {
    /// Takes in a finished round.
    pub(crate) fn round_done(&mut self, counts: Counts, took: Duration) {
        if took < SHORTEST_SAMPLE && self.seconds_per_page.is_some() {
            return;
        }
        let pages = match counts.normal_pages {
            0 => counts.zero_pages,
            normal => normal,
        };
        if pages > 0 {
            self.seconds_per_page = Some(took.as_secs_f64() / to_f64(pages));
        }
    }

    /// Takes in a sync of the dirty log: `pending` pages are dirty, `newly_dirty` of them since the
    /// sync `since` ago.
    pub(crate) fn synced(&mut self, pending: u64, newly_dirty: u64, since: Duration) {
        if since > Duration::ZERO {
            self.dirty_pages_per_second = to_f64(newly_dirty) / since.as_secs_f64();
        }
        let shrinks = self
            .previous_pending
            .is_none_or(|previous| to_f64(pending) < to_f64(previous) * PROGRESS_SHARE);
        self.stalled_rounds = if shrinks { 0 } else { self.stalled_rounds + 1 };
        self.previous_pending = Some(pending);
    }

    /// Reckons with so many bytes a second from now on (`avail-switchover-bandwidth`); 0: with what
    /// was measured. A page then counts with all its bytes, as QEMU has it.
    pub(crate) fn assume(&mut self, bytes_per_second: u64) {
        self.switchover_bandwidth = Some(bytes_per_second).filter(|bandwidth| *bandwidth > 0);
    }

    /// How long `pages` dirty pages would take; `None` before the first round.
    pub(crate) fn time_for(&self, pages: u64) -> Option<Duration> {
        if pages == 0 {
            return Some(Duration::ZERO);
        }
        self.switchover_bandwidth
            .map(|bandwidth| to_f64(PAGE_SIZE as u64) / to_f64(bandwidth))
            .or(self.seconds_per_page)
            .map(|seconds| {
                Duration::try_from_secs_f64(seconds * to_f64(pages)).unwrap_or(Duration::MAX)
            })
    }

    /// How long the pages would take that were dirty at the last sync; `None` before it.
    pub(crate) fn expected_downtime(&self) -> Option<Duration> {
        self.previous_pending
            .and_then(|pending| self.time_for(pending))
    }

    /// Pages that the guest dirties per second, by the last two syncs.
    pub(crate) fn dirty_pages_per_second(&self) -> f64 {
        self.dirty_pages_per_second
    }

    /// True if the remainder has not shrunk for some rounds.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled_rounds >= STALLED_ROUNDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(normal_pages: u64, zero_pages: u64) -> Counts {
        Counts {
            normal_pages,
            zero_pages,
            transferred_bytes: 0,
        }
    }

    #[test]
    fn the_rate_is_that_of_pages_with_content() {
        let mut estimator = Estimator::default();
        assert_eq!(estimator.time_for(1), None);
        assert_eq!(estimator.time_for(0), Some(Duration::ZERO));
        estimator.round_done(counts(1000, 1_000_000), Duration::from_secs(1));
        assert_eq!(estimator.time_for(500), Some(Duration::from_millis(500)));
    }

    #[test]
    fn a_bandwidth_that_was_given_is_reckoned_with_instead_of_the_measured_one() {
        let mut estimator = Estimator::default();
        estimator.round_done(counts(1000, 0), Duration::from_secs(1));
        estimator.assume(4096 * 10);
        assert_eq!(estimator.time_for(20), Some(Duration::from_secs(2)));
        assert_eq!(estimator.expected_downtime(), None);
        estimator.synced(30, 30, Duration::from_secs(1));
        assert_eq!(estimator.expected_downtime(), Some(Duration::from_secs(3)));
        estimator.assume(0);
        assert_eq!(estimator.time_for(20), Some(Duration::from_millis(20)));
    }

    #[test]
    fn a_round_too_short_to_measure_keeps_the_rate_that_was_known() {
        let mut estimator = Estimator::default();
        estimator.round_done(counts(1000, 0), Duration::from_secs(1));
        estimator.round_done(counts(1, 0), Duration::from_millis(4));
        assert_eq!(estimator.time_for(1000), Some(Duration::from_secs(1)));
    }

    #[test]
    fn a_remainder_that_does_not_shrink_is_a_stall_and_one_that_does_is_not() {
        let mut estimator = Estimator::default();
        for pending in [1000, 950, 980, 990] {
            assert!(!estimator.is_stalled());
            estimator.synced(pending, pending, Duration::from_secs(1));
        }
        assert!(estimator.is_stalled());
        estimator.synced(500, 500, Duration::from_secs(1));
        assert!(!estimator.is_stalled());
        assert!((estimator.dirty_pages_per_second() - 500.0).abs() < 1e-9);
    }
}
