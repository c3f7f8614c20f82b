//! The source of a postcopy: the destination runs the guest before it has all pages, and asks for those that it needs.
//!
//! | file | what it does |
//! |---|---|
//! | `order` | what the guest waits for, for how long it did, and when the end may come |
//! | `turns` | who writes next: an answer comes before the background |
//! | `near` | what the background sends first: the neighbours of what was asked for |
//! | `ledger` | which pages are sent, each once, to whoever asks for it first; which are asked for; which come next |
//! | `way` | main or the connection of requested pages: where a page goes out |
//! | `connection` | a connection that carries them: answers, the background, the end |
//! | `recovery` | what the destination has, where a connection was lost |
//!
//! What the destination has in pages of more than 4 KiB (hugetlbfs), it can only place as these: all pages of one go out
//! together, with no other between them.
//!
//! Every page is sent at most once a connection: QEMU ends a stream that has one twice. Pages that are never sent are zero
//! once the stream has ended.

mod connection;
mod ledger;
mod near;
pub(crate) mod order;
pub(crate) mod recovery;
pub(crate) mod turns;
mod way;

use std::ops::Range;

use hotlift_mem::PAGE_SIZE;

use crate::error::MigrationError;

pub(crate) use connection::Connection;
pub(crate) use ledger::{Ledger, Next};
pub(crate) use near::Near;
pub(crate) use recovery::go_on;
pub(crate) use way::Way;

pub(crate) use crate::stream::main_channel::LARGEST_PAGE;

/// The last byte of a stream (`QEMU_VM_EOF`).
const EOF: u8 = 0;

/// Where the pages come from.
pub(crate) trait Pages: Sync {
    /// What one thread needs for its reading.
    type Reader<'p>: Reader
    where
        Self: 'p;

    fn reader(&self) -> Result<Self::Reader<'_>, MigrationError>;

    /// The pages that the background looks at next; `None` once it has looked at all.
    fn next(&self) -> Result<Option<Vec<Place>>, MigrationError>;

    /// Ends every wait for pages: nobody takes any more.
    fn abandon(&self) {}

    /// The guest has asked for this page: it soon needs those around it.
    fn asked_for(&self, block: usize, page: usize) {
        let _ = (block, page);
    }

    /// Passes on what keeps a page from being read, unless all others are to be sent all the same.
    fn unless_damaged(&self, outcome: Result<(), MigrationError>) -> Result<(), MigrationError> {
        outcome
    }
}

/// RAM block and page.
pub(crate) type Place = (usize, usize);

/// One thread's reader of pages.
pub(crate) trait Reader {
    /// Reads a page that was asked for; `None` for one that is zero.
    fn page(&mut self, block: usize, page: usize) -> Result<Option<&[u8]>, MigrationError>;

    /// Reads a page into a batch.
    fn add(&mut self, block: usize, page: usize, batch: &mut Batch) -> Result<(), MigrationError> {
        match self.page(block, page)? {
            None => batch.add_zero(page),
            Some(content) => batch.add(page, content),
        }
        Ok(())
    }

    /// The same of all these pages.
    fn add_all(
        &mut self,
        block: usize,
        mut pages: Range<usize>,
        batch: &mut Batch,
    ) -> Result<(), MigrationError> {
        pages.try_for_each(|page| self.add(block, page, batch))
    }

    /// What goes behind the page that was asked for, if it was not zero. Nothing of it is claimed.
    fn follow(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        let _ = batch;
        Ok(())
    }

    /// Makes the reading of these pages quick, as far as they are not sent.
    fn read_ahead(&mut self, share: &[Place], ledger: &Ledger) -> Result<(), MigrationError> {
        let _ = (share, ledger);
        Ok(())
    }

    /// Makes ready what the background sends from this page on; false if that is nothing. Nothing is claimed before it
    /// can be written.
    fn prepare(
        &mut self,
        block: usize,
        page: usize,
        ledger: &Ledger,
    ) -> Result<bool, MigrationError>;

    /// Claims what was made ready.
    fn take(&mut self, ledger: &Ledger, batch: &mut Batch) -> Result<(), MigrationError>;
}

/// Pages of one RAM block that go out together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Byte offsets.
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

    /// Claims its pages with content of RAM block `block`, and drops those that others send.
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

    /// A page with its content.
    pub(crate) fn add(&mut self, page: usize, content: &[u8]) {
        self.normal.push((page * PAGE_SIZE) as u64);
        self.content.extend_from_slice(content);
    }

    /// Pages by number and their content, in place of what is here, which `content` has then.
    pub(crate) fn fill(&mut self, pages: impl Iterator<Item = u64>, content: &mut Vec<u8>) {
        self.clear();
        self.normal
            .extend(pages.map(|page| page * PAGE_SIZE as u64));
        std::mem::swap(&mut self.content, content);
    }

    /// A page that is zero.
    pub(crate) fn add_zero(&mut self, page: usize) {
        self.zero.push((page * PAGE_SIZE) as u64);
    }
}

#[cfg(test)]
impl Batch {
    /// Numbers of its pages.
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
    fn a_batch_has_the_pages_that_nobody_else_sends_with_their_content() {
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
