//! Pages that the guest waits for, and the times of its waits. [`Waits`] decides, without I/O and without a clock; `lazy_ram`
//! reads faults and places pages.

use std::time::{Duration, Instant};

use hotlift_mem::{Fault, Touch};

use super::blocktime::Blocktime;
use crate::figures::{LatestTimes, PostcopyFigures};

/// Waits of the guest's threads for missing pages, open and completed.
#[derive(Default)]
pub(super) struct Waits {
    /// Open waits, with their start times. There are few: about one for each waiting thread.
    open: Vec<(Touch, Instant)>,
    /// Times of completed waits.
    over: LatestTimes,
    requests: u64,
    /// Number of received pages, and time of the latest one.
    pages: u64,
    pub(super) latest: Option<Instant>,
    /// Statistics by thread, if enabled.
    blocktime: Option<Blocktime>,
}

impl Waits {
    /// Creates an empty set of waits; `blocktime` counts the waits by thread.
    pub(super) fn new(blocktime: Option<Blocktime>) -> Self {
        Self {
            blocktime,
            ..Self::default()
        }
    }

    /// Records that a thread waits for a missing page. Returns true if the page must be requested.
    pub(super) fn begin(&mut self, touch: Touch, now: Instant) -> bool {
        // The kernel may report a fault more than once.
        if self.open.iter().any(|(other, _)| *other == touch) {
            return false;
        }
        let mut open = self.open.iter();
        let is_first = open.all(|(other, _)| other.fault != touch.fault);
        self.open.push((touch, now));
        self.requests += u64::from(is_first);
        if let Some(blocktime) = &mut self.blocktime {
            blocktime.begins(touch.thread, now);
        }
        is_first
    }

    /// Records the arrival of a page, which ends all waits for it.
    pub(super) fn page_arrived(&mut self, page: Fault, now: Instant) {
        self.pages += 1;
        self.latest = Some(now);
        self.open.retain(|(touch, since)| {
            if touch.fault != page {
                return true;
            }
            self.over.add(now.saturating_duration_since(*since));
            if let Some(blocktime) = &mut self.blocktime {
                blocktime.ends(touch.thread, *since, now);
            }
            false
        });
    }

    /// Returns true if no thread waits for a page.
    pub(super) fn all_arrived(&self) -> bool {
        self.open.is_empty()
    }

    /// Returns the awaited pages, which must be requested again from a source that resumes.
    pub(super) fn open(&self) -> Vec<Fault> {
        let mut pages: Vec<_> = self.open.iter().map(|(touch, _)| touch.fault).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }

    /// Returns the statistics of the waits so far.
    pub(super) fn figures(&self, complete: Duration) -> PostcopyFigures {
        PostcopyFigures {
            complete_ms: complete.as_secs_f64() * 1e3,
            pages: self.pages,
            requests: self.requests,
            wait_us: self.over.percentiles(),
            blocktime: self.blocktime.as_ref().map(Blocktime::figures),
        }
    }
}

#[cfg(test)]
mod tests;
