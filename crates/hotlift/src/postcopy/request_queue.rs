//! Queue of page requests, with neighbours that were read together with a requested page. [`RequestQueue`] and [`ReaderWait`]
//! decide, without I/O and without a clock.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Batch;
use crate::error::MigrationError;
use crate::figures::LatestTimes;

/// Maximum count of batches of neighbours that wait to be written. With a save file, whose blocks have 32 KiB, this is 1 MiB.
const MAX_QUEUED_NEIGHBOURS: usize = 32;

/// Maximum time from the last page until the destination reports that it has all pages. Data in sockets and relays may have to
/// pass a slow link.
pub(super) const FINAL_STATEMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// Request of the destination for a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// Index of the RAM block.
    pub block: usize,
    pub page: usize,
    /// Time at which the request was received.
    pub since: Instant,
}

/// Queue of page requests, first in, first out, and of neighbours of requested pages.
#[derive(Debug, Default)]
pub(crate) struct RequestQueue {
    waiting: VecDeque<Request>,
    /// True while a request is being answered.
    under_way: bool,
    /// True once requests have ended: later requests are ignored.
    pub(super) ended: bool,
    /// Neighbours of requested pages: index of the RAM block, and the pages. If the queue is full, the oldest are dropped; the
    /// background reads dropped pages again.
    pub(super) neighbours: VecDeque<(usize, Batch)>,
    /// Count of requests that were answered with a page.
    pub(crate) served: u64,
    latencies: LatestTimes,
}

impl RequestQueue {
    /// Adds a request that was received at the time `since`. Ignores it if requests have ended, because the answering thread
    /// may have ended.
    pub(super) fn ask(&mut self, block: usize, page: usize, since: Instant) {
        if !self.ended {
            self.waiting.push_back(Request { block, page, since });
        }
    }

    /// Takes the next request. Returns `None` if the queue is empty, and `Some(None)` once requests have ended.
    pub(super) fn next(&mut self) -> Option<Option<Request>> {
        let next = self.waiting.pop_front();
        self.under_way |= next.is_some();
        (next.is_some() || self.ended).then_some(next)
    }

    /// Returns true if another request waits while one is being answered.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Records that the last taken request is done. `sent` is the time at which its page was sent. `None` means that no page
    /// was sent for it: another thread has sent the page, or it cannot be read.
    pub(crate) fn done(&mut self, request: &Request, sent: Option<Instant>) {
        self.under_way = false;
        if let Some(sent) = sent {
            self.served += 1;
            let took = sent.saturating_duration_since(request.since);
            self.latencies.add(took);
        }
    }

    /// Queues neighbours of a requested page for the background. `block` is the index of their RAM block. The caller must not
    /// claim them: a request for a claimed page would have to wait for the background.
    pub(crate) fn queue_neighbours(&mut self, block: usize, batch: Batch) {
        if self.neighbours.len() == MAX_QUEUED_NEIGHBOURS {
            self.neighbours.pop_front();
        }
        self.neighbours.push_back((block, batch));
    }

    /// Ends requests: later requests are ignored.
    pub(crate) fn end(&mut self) {
        self.ended = true;
    }

    /// Returns true if no request waits, and none is being answered.
    pub(crate) fn is_drained(&self) -> bool {
        !self.under_way && self.waiting.is_empty()
    }

    /// Returns the median, the 99th percentile, and the maximum of the latencies, in microseconds. All are 0 without requests.
    pub(crate) fn latencies(&self) -> [f64; 3] {
        self.latencies.percentiles()
    }
}

/// Timer of the wait until a destination has read a page. The kernel does not report when a socket's send queue becomes empty.
/// So the queue is sampled, and the interval between samples doubles each time.
pub(super) struct ReaderWait {
    until: Instant,
    interval: Duration,
}

impl ReaderWait {
    /// First interval. A QEMU that waits for a page reads it within a few milliseconds.
    const FIRST: Duration = Duration::from_millis(1);
    /// Maximum interval. It is short compared with the end of a migration.
    const LAST: Duration = Duration::from_millis(100);

    pub(super) fn new(now: Instant) -> Self {
        Self {
            until: now + FINAL_STATEMENT_TIMEOUT,
            interval: Self::FIRST,
        }
    }

    /// Returns the time of the next sample. Called after a sample at the time `now` that shows an unread page.
    ///
    /// # Errors
    /// [`MigrationError::Timeout`] after [`FINAL_STATEMENT_TIMEOUT`].
    pub(super) fn next(&mut self, now: Instant) -> Result<Instant, MigrationError> {
        if now >= self.until {
            return Err(MigrationError::Timeout {
                waiting_for: "the destination to read the page that it requested".to_owned(),
                waited: FINAL_STATEMENT_TIMEOUT,
            });
        }
        let next = self.until.min(now + self.interval);
        self.interval = Self::LAST.min(self.interval * 2);
        Ok(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_returned_in_order_up_to_the_end() {
        let (mut order, now) = (RequestQueue::default(), Instant::now());
        let request = |block, page| Request {
            block,
            page,
            since: now,
        };
        assert_eq!(order.next(), None);
        order.ask(0, 5, now);
        order.ask(1, 6, now);
        let first = order.next().unwrap().unwrap();
        assert_eq!(first, request(0, 5));
        order.done(&first, Some(now + Duration::from_micros(7)));
        order.end();
        order.ask(2, 7, now);
        assert!(order.is_waiting() && !order.is_drained());
        let second = order.next().unwrap().unwrap();
        assert_eq!(second, request(1, 6));
        assert!(!order.is_waiting() && !order.is_drained());
        order.done(&second, None);
        assert_eq!(order.next(), Some(None));
        assert!(order.is_drained());
        assert_eq!(order.served, 1);
        assert_eq!(order.latencies(), [7.0; 3]);
    }

    #[test]
    fn the_latest_neighbours_are_first_and_the_oldest_are_dropped() {
        let mut order = RequestQueue::default();
        for block in 0..=MAX_QUEUED_NEIGHBOURS {
            order.queue_neighbours(block, Batch::default());
        }
        let blocks = std::iter::from_fn(|| order.neighbours.pop_back()).map(|(block, _)| block);
        assert!(blocks.eq((1..=MAX_QUEUED_NEIGHBOURS).rev()));
    }

    #[test]
    fn a_reader_is_polled_at_doubling_intervals_up_to_its_limit() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut wait = ReaderWait::new(begun);
        for (now, next) in [(0, 1), (1, 3), (3, 7), (7, 15), (15, 31), (31, 63)] {
            assert_eq!(wait.next(at(now)).unwrap(), at(next));
        }
        wait.next(at(63)).unwrap();
        assert_eq!(wait.next(at(127)).unwrap(), at(227));
        let limit = begun + FINAL_STATEMENT_TIMEOUT;
        assert_eq!(wait.next(limit - ReaderWait::FIRST).unwrap(), limit);
        assert!(wait.next(limit).is_err());
    }
}
