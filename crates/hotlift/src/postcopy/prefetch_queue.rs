//! Queue of pages near requested pages. The background sends these pages before all others.

use std::sync::Mutex;

use hotlift_mem::DirtyBitmap;

use super::Place;
use crate::lock::lock;

/// Count of pages in a group of neighbours: 256 KiB, twice the readahead of Linux for a file.
const NEIGHBOURS: usize = 64;

/// Queue of the neighbours of requested pages. Each group of neighbours is returned once.
pub(crate) struct PrefetchQueue {
    /// For each RAM block, the count of pages.
    pages: Vec<usize>,
    /// For each RAM block, the bitmap of the groups in which a page was requested.
    asked: Vec<DirtyBitmap>,
    /// First requested page of each group whose neighbours were not returned yet; the latest is at the end.
    waiting: Mutex<Vec<Place>>,
}

impl PrefetchQueue {
    /// Creates the queue for RAM blocks with these counts of pages.
    pub(crate) fn new(pages: impl Iterator<Item = usize>) -> Self {
        let pages: Vec<_> = pages.collect();
        let groups = pages.iter().map(|pages| pages.div_ceil(NEIGHBOURS));
        Self {
            asked: groups.map(DirtyBitmap::new).collect(),
            pages,
            waiting: Mutex::default(),
        }
    }

    /// Records a request for a page, and queues its neighbours.
    pub(crate) fn record_request(&self, block: usize, page: usize) {
        if self.asked[block].set(page / NEIGHBOURS) {
            lock(&self.waiting).push((block, page));
        }
    }

    /// Returns the neighbours of the latest requested page in the queue: pages after it, then pages before it. Returns `None`
    /// if the queue is empty.
    pub(crate) fn next(&self) -> Option<Vec<Place>> {
        let (block, page) = lock(&self.waiting).pop()?;
        let first = page / NEIGHBOURS * NEIGHBOURS;
        let end = self.pages[block].min(first + NEIGHBOURS);
        let near = (page + 1..end).chain(first..page);
        Some(near.map(|page| (block, page)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_returned_once_and_those_of_the_latest_request_first() {
        let near = PrefetchQueue::new([100, 10].into_iter());
        assert_eq!(near.next(), None);
        for (block, page) in [(0, 3), (1, 9), (0, 70), (0, 5), (0, 71)] {
            near.record_request(block, page);
        }
        let behind = |block, first: usize, end| (first..end).map(move |page| (block, page));
        let both = behind(0, 71, 100).chain(behind(0, 64, 70));
        assert_eq!(near.next(), Some(both.collect()));
        assert_eq!(near.next(), Some(behind(1, 0, 9).collect()));
        let both = behind(0, 4, 64).chain(behind(0, 0, 3));
        assert_eq!(near.next(), Some(both.collect()));
        assert_eq!(near.next(), None);
    }
}
