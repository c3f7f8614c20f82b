//! Estimates the time to send the remaining pages, which `ops/migrate` compares with the downtime limit.
//!
//! Remaining data is counted in pages, not in bytes on the wire. With page compression, a page's size on the wire does not
//! determine the time to send it. The time for one page is measured in rounds that contain pages with content. Zero pages take
//! less time, and are rare among the dirty pages of an active guest. So they do not count.

use std::time::Duration;

use hotlift_mem::PAGE_SIZE;

use crate::figures::{Counts, to_f64};

/// Minimum duration of a round that is measured. In shorter rounds, the wake-up of threads takes most of the time.
const SHORTEST_SAMPLE: Duration = Duration::from_millis(5);

/// Count of rounds without progress after which the operator is informed.
const STALLED_ROUNDS: u32 = 3;

/// Maximum count of remaining pages after a round with progress, as a fraction of the remaining pages before it.
const PROGRESS_SHARE: f64 = 0.9;

/// Estimates the time to send pages, from the measurements of each round.
#[derive(Debug, Default)]
pub(crate) struct Estimator {
    seconds_per_page: Option<f64>,
    dirty_pages_per_second: f64,
    previous_pending: Option<u64>,
    stalled_rounds: u32,
    /// Assumed bandwidth in bytes per second, in place of the measured rate; `None` to use the measured rate.
    switchover_bandwidth: Option<u64>,
}

impl Estimator {
    /// Records a finished round, to measure the time for a page. `took` is the duration of the round.
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

    /// Records a dirty log sync. `pending` is the count of dirty pages. `newly_dirty` is the count of pages that became dirty
    /// in the time `since` the last sync.
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

    /// Sets the assumed bandwidth (`avail-switchover-bandwidth`); 0 selects the measured rate. With an assumed bandwidth, each
    /// page counts with its uncompressed size, as in QEMU.
    pub(crate) fn assume(&mut self, bytes_per_second: u64) {
        self.switchover_bandwidth = Some(bytes_per_second).filter(|bandwidth| *bandwidth > 0);
    }

    /// Returns the estimated time to send `pages` dirty pages. Returns `None` if no round was measured and no bandwidth is
    /// assumed.
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

    /// Returns the estimated time to send the pages that were dirty at the last sync. Returns `None` before the first sync, and
    /// while no rate is known.
    pub(crate) fn expected_downtime(&self) -> Option<Duration> {
        self.previous_pending
            .and_then(|pending| self.time_for(pending))
    }

    /// Returns the count of pages that the guest dirties per second, measured between the last two syncs.
    pub(crate) fn dirty_pages_per_second(&self) -> f64 {
        self.dirty_pages_per_second
    }

    /// Returns true if the last [`STALLED_ROUNDS`] rounds made no progress.
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
    fn the_rate_counts_only_pages_with_content() {
        let mut estimator = Estimator::default();
        assert_eq!(estimator.time_for(1), None);
        assert_eq!(estimator.time_for(0), Some(Duration::ZERO));
        estimator.round_done(counts(1000, 1_000_000), Duration::from_secs(1));
        assert_eq!(estimator.time_for(500), Some(Duration::from_millis(500)));
    }

    #[test]
    fn a_configured_bandwidth_replaces_the_measured_one() {
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
    fn a_round_too_short_to_measure_keeps_the_previous_rate() {
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
