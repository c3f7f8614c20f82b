//! Which pages the guest waits for, and for how long it did. [`Waits`] decides, without I/O and without a clock; `lazy_ram` reads
//! faults and places pages.

use std::time::{Duration, Instant};

use hotlift_mem::{Fault, Touch};

use super::blocktime::Blocktime;
use crate::figures::{LatestTimes, PostcopyFigures};

/// The waits for pages that have not come.
#[derive(Default)]
pub(super) struct Waits {
    /// Who waits for a page that was asked for: few, as each is a thread.
    open: Vec<(Touch, Instant)>,
    /// How long others were waited for.
    over: LatestTimes,
    requests: u64,
    /// Pages that have come, and when the latest did.
    pages: u64,
    pub(super) latest: Option<Instant>,
    /// Counts the waits by thread, if they are reported.
    blocktime: Option<Blocktime>,
}

impl Waits {
    /// Begins without any; `blocktime` counts them by thread.
    pub(super) fn new(blocktime: Option<Blocktime>) -> Self {
        Self {
            blocktime,
            ..Self::default()
        }
    }

    /// A thread waits for a page that has not come; true if the page is to be asked for.
    pub(super) fn begin(&mut self, touch: Touch, now: Instant) -> bool {
        // The kernel may report one more than once.
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

    /// A page has come: all waits for it end.
    pub(super) fn came(&mut self, page: Fault, now: Instant) {
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

    /// Returns true if no page is waited for.
    pub(super) fn is_met(&self) -> bool {
        self.open.is_empty()
    }

    /// Returns the pages that are waited for: a source that resumes is asked for them again.
    pub(super) fn open(&self) -> Vec<Fault> {
        let mut pages: Vec<_> = self.open.iter().map(|(touch, _)| touch.fault).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }

    /// Returns what the waits have come to so far.
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
