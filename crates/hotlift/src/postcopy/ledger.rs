//! State of the pages on one postcopy connection: sent pages, requested pages, and the next pages to send.

use std::ops::Range;
use std::time::{Duration, Instant};

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_wire::RamBlockEntry;
use hotlift_wire::return_path::ReturnMessage;

use super::request_queue::{Request, RequestQueue};
use super::{Batch, Place};
use crate::error::{Channel, MigrationError};
use crate::life::Life;
use crate::life::wait_mutex::WaitMutex;

/// State of one connection, shared by its reader thread and its sending threads.
pub(crate) struct Ledger {
    blocks: Vec<RamBlockEntry>,
    /// For each RAM block, the count of 4 KiB pages in one page of the destination's RAM. These 4 KiB pages are sent together.
    /// In the bitmaps, the first of them represents all of them.
    group_len: Vec<usize>,
    /// For each RAM block, the bitmap of pages that were sent or are being sent.
    sent: Vec<DirtyBitmap>,
    /// For each RAM block, the bitmap of requested pages.
    asked: Vec<DirtyBitmap>,
    /// For each RAM block with huge pages, the bitmap of pages that the background has examined.
    seen: Vec<DirtyBitmap>,
    /// Lifetime of the connection. It is not the migration's lifetime, where a late cancel would end the background's sleeps.
    pub life: Life,
    pub order: WaitMutex<RequestQueue>,
}

/// Next pages that a background thread sends.
#[derive(Debug)]
pub(crate) enum Next {
    /// Neighbours of a requested page, read together with the requested page: index of the RAM block, and the pages.
    Neighbours(usize, Batch),
    /// Pages to read, starting with this page.
    From(Place),
}

impl Ledger {
    /// Creates the state for `blocks`, with no page sent.
    pub(crate) fn new(blocks: &[RamBlockEntry]) -> Self {
        let life = Life::default();
        let page_size = PAGE_SIZE as u64;
        let pages = |block: &RamBlockEntry| usize::try_from(block.used_length / page_size);
        let bitmaps = || {
            let pages = blocks.iter().map(|block| pages(block).unwrap_or(0));
            pages.map(DirtyBitmap::new).collect()
        };
        let group_len = |block: &RamBlockEntry| usize::try_from(block.page_size / page_size);
        let group_len = blocks.iter().map(|block| group_len(block).unwrap_or(1));
        Self {
            blocks: blocks.to_vec(),
            group_len: group_len.map(|pages| pages.max(1)).collect(),
            sent: bitmaps(),
            asked: bitmaps(),
            seen: bitmaps(),
            order: WaitMutex::new(&life, RequestQueue::default()),
            life,
        }
    }

    /// Returns the list of RAM blocks.
    pub(crate) fn blocks(&self) -> &[RamBlockEntry] {
        &self.blocks
    }

    /// Returns the count of 4 KiB pages in a RAM block.
    pub(crate) fn pages(&self, block: usize) -> usize {
        self.sent[block].pages()
    }

    /// Records the pages of a RAM block that the destination has. `bits` has one bit per page, the lowest bit first.
    pub(crate) fn record_received(&self, block: usize, bits: &[u8]) {
        let words = bits.as_chunks::<8>().0.iter();
        let words: Vec<u64> = words.map(|word| u64::from_le_bytes(*word)).collect();
        self.sent[block].or_words(0, &words);
    }

    /// Returns the count of pages that were sent, or that the destination had before.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.iter().map(DirtyBitmap::count).sum()
    }

    /// Returns true if the destination has this RAM block in huge pages, so that groups of 4 KiB pages are sent together.
    pub(crate) fn has_huge_pages(&self, block: usize) -> bool {
        self.group_len[block] > 1
    }

    /// Returns the numbers of the 4 KiB pages that are sent together with `page`, including `page`.
    pub(crate) fn pages_of_group(&self, block: usize, page: usize) -> Range<usize> {
        let first = self.first(block, page);
        first..self.pages(block).min(first + self.group_len[block])
    }

    fn first(&self, block: usize, page: usize) -> usize {
        page - page % self.group_len[block]
    }

    /// Returns true if this page was sent, or is being sent.
    pub(crate) fn is_sent(&self, block: usize, page: usize) -> bool {
        self.sent[block].test(self.first(block, page))
    }

    /// Claims `page` and the pages that are sent together with it. Returns true if the caller must send them, false if another
    /// thread does. A request for a claimed page gets no separate answer.
    pub(crate) fn claim(&self, block: usize, page: usize) -> bool {
        self.sent[block].set(self.first(block, page))
    }

    /// Claims any unsent page, with the pages that are sent together with it. Returns `None` if all pages were claimed before.
    pub(crate) fn claim_any(&self) -> Option<(usize, Range<usize>)> {
        (0..self.blocks.len()).find_map(|block| {
            let mut pages = (0..self.pages(block)).step_by(self.group_len[block]);
            let page =
                pages.find(|page| !self.is_sent(block, *page) && self.claim(block, *page))?;
            Some((block, self.pages_of_group(block, page)))
        })
    }

    /// Returns the next pages that a background thread sends. Queued neighbours of requested pages come first, then unsent
    /// pages of `share`. Returns `None` if neither is left.
    pub(crate) fn next_of(&self, share: &mut impl Iterator<Item = Place>) -> Option<Next> {
        if let Some((block, batch)) = self.order.lock().neighbours.pop_back() {
            return Some(Next::Neighbours(block, batch));
        }
        // Only one thread examines a huge page, and only once.
        let is_seen = |block: usize, page| {
            self.has_huge_pages(block) && !self.seen[block].set(self.first(block, page))
        };
        let next = share.find(|&(block, page)| !self.is_sent(block, page) && !is_seen(block, page));
        next.map(Next::From)
    }

    /// Waits for the next request. Returns `None` once requests have ended, or the connection's lifetime has ended.
    pub(crate) fn next_request(&self) -> Option<Request> {
        let next = self
            .order
            .wait_until(None, || self.life.check_open(), RequestQueue::next);
        next.ok()
            .flatten()
            .flatten()
            .filter(|_| !self.life.is_stopped())
    }

    /// Ends requests: later requests are ignored. Waits until all earlier requests are answered.
    pub(crate) fn end_and_drain(&self) {
        self.order.change(RequestQueue::end);
        let is_drained = |order: &mut RequestQueue| order.is_drained().then_some(());
        let _ = self
            .order
            .wait_until(None, || self.life.check_open(), is_drained);
    }

    /// Waits, for at most `time`, until requests have ended or the lifetime is closed. Returns false at the timeout.
    pub(crate) fn wait_for_end(&self, time: Duration) -> bool {
        let until = Some(self.life.now() + time);
        let has_ended = |order: &mut RequestQueue| order.ended.then_some(());
        let ended = self
            .order
            .wait_until(until, || self.life.check_open(), has_ended);
        ended != Ok(None)
    }

    /// Records a page request, which was read at the time `now`; ignores any other message. `current` is the RAM block of the
    /// last request: a request without a block name refers to it.
    pub(crate) fn record(
        &self,
        current: &mut Option<usize>,
        message: &ReturnMessage<'_>,
        now: Instant,
    ) -> Result<(), MigrationError> {
        let Some((name, start, length)) = message.requested_pages() else {
            return Ok(());
        };
        if let Some(name) = name {
            *current = self.blocks.iter().position(|block| block.name == name);
        }
        let block = current.ok_or_else(|| MigrationError::Protocol {
            channel: Channel::Main,
            got: "a request for pages of a RAM block that the VM does not have".to_owned(),
            doing: "receiving from the destination",
        })?;
        let page_size = PAGE_SIZE as u64;
        let end = start.saturating_add(length.into()).div_ceil(page_size);
        for page in start / page_size..end {
            let number = usize::try_from(page).unwrap_or(usize::MAX);
            if number >= self.pages(block) {
                break;
            }
            // A page that is requested several times is queued only once.
            let first = self.first(block, number);
            if !self.is_sent(block, first) && self.asked[block].set(first) {
                self.order.change(|order| order.ask(block, first, now));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> Ledger {
        let block = |name| RamBlockEntry::new(name, 8 * PAGE_SIZE as u64);
        Ledger::new(&[block("a"), block("b")])
    }

    fn ask(block: Option<&str>, start: u64, length: u32) -> ReturnMessage<'_> {
        match block {
            Some(block) => ReturnMessage::ReqPagesId {
                start,
                length,
                block,
            },
            None => ReturnMessage::ReqPages { start, length },
        }
    }

    #[test]
    fn pages_that_the_destination_had_count_as_sent() {
        let ledger = ledger();
        assert_eq!(ledger.sent(), 0);
        ledger.record_received(0, &[0b101, 0, 0, 0, 0, 0, 0, 0]);
        assert!(ledger.claim(1, 2));
        assert_eq!(ledger.sent(), 3);
    }

    #[test]
    fn a_page_is_queued_once_and_not_if_in_transit() {
        let ledger = ledger();
        assert!(ledger.claim(1, 2) && !ledger.claim(1, 2));
        let (mut current, now) = (None, Instant::now());
        ledger
            .record(&mut current, &ask(Some("b"), 4096, 8192), now)
            .unwrap();
        ledger
            .record(&mut current, &ask(None, 4096, 4096), now)
            .unwrap();
        // Beyond the end: there is no page to wait for.
        ledger
            .record(&mut current, &ask(None, 1 << 40, u32::MAX), now)
            .unwrap();
        ledger.order.change(RequestQueue::end);
        let request = ledger.next_request().unwrap();
        assert_eq!((request.block, request.page), (1, 1));
        assert_eq!(ledger.next_request(), None);
    }

    #[test]
    fn pages_sent_together_are_queued_and_claimed_together() {
        let mut blocks = [8, 20].map(|pages| RamBlockEntry::new("", pages * PAGE_SIZE as u64));
        blocks[0].name = "small".to_owned();
        blocks[1].name = "huge".to_owned();
        blocks[1].page_size = 8 * PAGE_SIZE as u64;
        let ledger = Ledger::new(&blocks);
        assert!(ledger.has_huge_pages(1) && !ledger.has_huge_pages(0));
        assert_eq!(ledger.pages_of_group(0, 5), 5..6);
        assert_eq!(ledger.pages_of_group(1, 5), 0..8);
        assert_eq!(ledger.pages_of_group(1, 19), 16..20);
        let next = |block, page| ledger.next_of(&mut [(block, page)].into_iter());
        assert!(next(1, 3).is_some() && next(1, 4).is_none());

        let (mut current, now) = (None, Instant::now());
        for (block, start) in [(Some("huge"), 8), (None, 9), (None, 16), (None, 0)] {
            // A destination requests whole huge pages; a part has the same effect.
            let message = ask(block, start * PAGE_SIZE as u64, 8192);
            ledger.record(&mut current, &message, now).unwrap();
        }
        assert!(ledger.claim(1, 12) && !ledger.claim(1, 8) && ledger.is_sent(1, 15));
        assert!(!ledger.is_sent(1, 16));
        ledger.order.change(RequestQueue::end);
        let asked = std::iter::from_fn(|| ledger.next_request());
        let asked = asked.map(|request| (request.block, request.page));
        assert_eq!(asked.collect::<Vec<_>>(), [(1, 8), (1, 16), (1, 0)]);

        // The destination reports the pages that it has after an interruption.
        ledger.record_received(1, &[0xff, 0, 0, 0, 0, 0, 0, 0]);
        assert!(ledger.is_sent(1, 7) && !ledger.is_sent(1, 16));

        ledger.record_received(0, &[0xff, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(ledger.claim_any(), Some((1, 16..20)));
        assert_eq!(ledger.claim_any(), None);
    }

    #[test]
    fn a_request_for_an_unknown_block_is_refused() {
        let mut current = None;
        for message in [ask(None, 0, 4096), ask(Some("c"), 0, 4096)] {
            assert!(
                ledger()
                    .record(&mut current, &message, Instant::now())
                    .is_err()
            );
        }
    }
}
