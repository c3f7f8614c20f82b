//! The source of a postcopy. The destination runs the guest before it has all pages, and requests the pages that the guest
//! needs.
//!
//! | file | content |
//! |---|---|
//! | `request_queue` | queue of page requests, and their latencies |
//! | `priority_lock` | lock that prefers a requested page to the background |
//! | `prefetch_queue` | neighbours of requested pages, which the background sends first |
//! | `ledger` | pages sent (each by the first thread that claims it), pages requested, and the next pages |
//! | `output_path` | connection on which a page is sent: main, or the connection for requested pages |
//! | `connection` | one connection: answers to requests, the background, the end |
//! | `recovery` | query of the destination's pages after a lost connection |
//!
//! A huge page (hugetlbfs, more than 4 KiB) can only be placed as a whole at the destination. So all its 4 KiB pages are sent
//! one after another.
//!
//! Every page is sent at most once per connection: QEMU aborts a stream that repeats a page. After the end of the stream, all
//! pages that were not sent are zero.

mod connection;
mod ledger;
mod output_path;
mod prefetch_queue;
pub(crate) mod priority_lock;
pub(crate) mod recovery;
pub(crate) mod request_queue;

use std::ops::Range;

use hotlift_mem::PAGE_SIZE;

use crate::error::MigrationError;

pub(crate) use connection::Connection;
pub(crate) use ledger::{Ledger, Next};
pub(crate) use output_path::OutputPath;
pub(crate) use prefetch_queue::PrefetchQueue;
pub(crate) use recovery::resume_postcopy;

pub(crate) use crate::stream::main_channel::LARGEST_PAGE;

/// Last byte of a stream (`QEMU_VM_EOF`).
const EOF: u8 = 0;

/// Source of the pages: a guest or a save file.
pub(crate) trait Pages: Sync {
    /// State of one thread that reads pages.
    type Reader<'p>: Reader
    where
        Self: 'p;

    fn reader(&self) -> Result<Self::Reader<'_>, MigrationError>;

    /// Returns the next pages for the background; `None` once there are no more pages.
    fn next(&self) -> Result<Option<Vec<Place>>, MigrationError>;

    /// Ends every wait for pages. Called when the connection ends.
    fn abandon(&self) {}

    /// Records a request for a page. The guest will soon need the neighbours of this page.
    fn record_request(&self, block: usize, page: usize) {
        let _ = (block, page);
    }

    /// Returns the error of a page that cannot be read. Returns success if the other pages must be sent anyway.
    fn unless_damaged(&self, outcome: Result<(), MigrationError>) -> Result<(), MigrationError> {
        outcome
    }
}

/// Index of a RAM block, and number of a page in this block.
pub(crate) type Place = (usize, usize);

/// Reads pages for one thread.
pub(crate) trait Reader {
    /// Reads one page; returns `None` for a zero page.
    fn page(&mut self, block: usize, page: usize) -> Result<Option<&[u8]>, MigrationError>;

    /// Reads one page into `batch`.
    fn add(&mut self, block: usize, page: usize, batch: &mut Batch) -> Result<(), MigrationError> {
        match self.page(block, page)? {
            None => batch.add_zero(page),
            Some(content) => batch.add(page, content),
        }
        Ok(())
    }

    /// Reads all pages in the range `pages` into `batch`.
    fn add_all(
        &mut self,
        block: usize,
        mut pages: Range<usize>,
        batch: &mut Batch,
    ) -> Result<(), MigrationError> {
        pages.try_for_each(|page| self.add(block, page, batch))
    }

    /// Reads pages that the guest probably needs after a requested page with content. Does not claim them.
    fn follow(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        let _ = batch;
        Ok(())
    }

    /// Prefetches the unsent pages of `share` from the file or memory.
    fn read_ahead(&mut self, share: &[Place], ledger: &Ledger) -> Result<(), MigrationError> {
        let _ = (share, ledger);
        Ok(())
    }

    /// Reads the next pages for the background, starting with `page`. Returns false if there is nothing to send. Does not claim
    /// pages, because they may not be written at once.
    fn prepare(
        &mut self,
        block: usize,
        page: usize,
        ledger: &Ledger,
    ) -> Result<bool, MigrationError>;

    /// Claims the pages that [`Reader::prepare`] has read, and moves the claimed ones to `batch`.
    fn take(&mut self, ledger: &Ledger, batch: &mut Batch) -> Result<(), MigrationError>;
}

/// Pages of one RAM block that are sent one after another.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Byte offsets of the zero pages in the RAM block.
    zero: Vec<u64>,
    normal: Vec<u64>,
    content: Vec<u8>,
}

impl Batch {
    fn clear(&mut self) {
        self.zero.clear();
        self.normal.clear();
        self.content.clear();
    }

    fn is_empty(&self) -> bool {
        self.zero.is_empty() && self.normal.is_empty()
    }

    /// Claims the batch's pages with content, which belong to RAM block `block`. Removes the pages that other threads have
    /// claimed.
    pub(crate) fn claim(&mut self, block: usize, ledger: &Ledger) {
        let mut kept = 0;
        for index in 0..self.normal.len() {
            let offset = self.normal[index];
            let page = usize::try_from(offset).unwrap_or(usize::MAX) / PAGE_SIZE;
            if !ledger.claim(block, page) {
                continue;
            }
            if kept < index {
                let at = index * PAGE_SIZE;
                self.content
                    .copy_within(at..at + PAGE_SIZE, kept * PAGE_SIZE);
                self.normal[kept] = offset;
            }
            kept += 1;
        }
        self.normal.truncate(kept);
        self.content.truncate(kept * PAGE_SIZE);
    }

    /// Adds a page with its content.
    pub(crate) fn add(&mut self, page: usize, content: &[u8]) {
        self.normal.push((page * PAGE_SIZE) as u64);
        self.content.extend_from_slice(content);
    }

    /// Replaces the batch's pages by the numbers `pages` and their content. Swaps buffers: `content` receives the old buffer.
    pub(crate) fn fill(&mut self, pages: impl Iterator<Item = u64>, content: &mut Vec<u8>) {
        self.clear();
        self.normal
            .extend(pages.map(|page| page * PAGE_SIZE as u64));
        std::mem::swap(&mut self.content, content);
    }

    /// Adds a zero page.
    pub(crate) fn add_zero(&mut self, page: usize) {
        self.zero.push((page * PAGE_SIZE) as u64);
    }
}

#[cfg(test)]
impl Batch {
    /// Returns the numbers of the batch's pages.
    pub(crate) fn pages(&self) -> impl Iterator<Item = usize> {
        let offsets = self.zero.iter().chain(&self.normal);
        offsets.map(|offset| usize::try_from(*offset).unwrap() / PAGE_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use hotlift_wire::RamBlockEntry;

    use super::*;

    #[test]
    fn a_batch_has_only_pages_that_no_other_thread_sends() {
        let ledger = Ledger::new(&[RamBlockEntry::new("ram", 8 * PAGE_SIZE as u64)]);
        let mut batch = Batch::default();
        for page in 0..5 {
            batch.add(page, &[u8::try_from(page).unwrap(); PAGE_SIZE]);
        }
        for page in [0, 3] {
            assert!(ledger.claim(0, page));
        }
        batch.claim(0, &ledger);
        let pages = [1, 2, 4].map(|page| (page * PAGE_SIZE) as u64);
        assert_eq!(batch.normal, pages);
        let firsts = batch.content.iter().step_by(PAGE_SIZE).copied();
        assert_eq!(firsts.collect::<Vec<_>>(), [1, 2, 4]);
        assert!((0..5).all(|page| ledger.is_sent(0, page)));
        batch.claim(0, &ledger);
        assert!(batch.is_empty() && batch.content.is_empty());
    }
}
