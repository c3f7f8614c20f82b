//! Pages of a guest that is paused at the source of a postcopy. The guest runs at the destination, and waits for these pages.

use std::ops::Range;
use std::sync::Mutex;

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::multifd::ZeroPageDetection;

use crate::ends::guest_source::source::GuestSource;
use crate::error::MigrationError;
use crate::lock::lock;
use crate::postcopy::{Batch, Ledger, Pages, Place, PrefetchQueue, Reader};

/// Number of pages in one background write. A requested page waits for at most one such write.
const BATCH: usize = 16;

/// Number of pages in a share (unit of work): 256 KiB. The neighbours of a requested page wait for at most one share.
const SHARE: usize = 64;

/// Pages still to send: first near the latest request, then in order.
pub(crate) struct GuestPages<'a> {
    source: &'a GuestSource<'a>,
    near: PrefetchQueue,
    /// RAM block and pages of the current chunk that no thread has taken yet.
    rest: Mutex<(usize, Range<usize>)>,
}

impl<'a> GuestPages<'a> {
    /// Creates the set of all dirty pages.
    pub(crate) fn new(source: &'a GuestSource<'a>) -> Self {
        source.ram.start_round(false);
        Self {
            source,
            near: PrefetchQueue::new(source.guest.ram().iter().map(|block| block.pages())),
            rest: Mutex::new((0, 0..0)),
        }
    }
}

impl Pages for GuestPages<'_> {
    type Reader<'p>
        = GuestReader<'p>
    where
        Self: 'p;

    fn reader(&self) -> Result<GuestReader<'_>, MigrationError> {
        Ok(GuestReader {
            source: self.source,
            prepared: (0, 0),
            page: Box::new([0; PAGE_SIZE]),
        })
    }

    fn next(&self) -> Result<Option<Vec<Place>>, MigrationError> {
        if let near @ Some(_) = self.near.next() {
            return Ok(near);
        }
        let mut rest = lock(&self.rest);
        if rest.1.is_empty() {
            let Some(chunk) = self.source.ram.take() else {
                return Ok(None);
            };
            let first = chunk.first_page;
            *rest = (chunk.block, first..first + chunk.pages);
        }
        let (block, pages) = &mut *rest;
        let share = pages.by_ref().take(SHARE);
        Ok(Some(share.map(|page| (*block, page)).collect()))
    }

    fn record_request(&self, block: usize, page: usize) {
        self.near.record_request(block, page);
    }
}

/// Reader of one thread.
pub(crate) struct GuestReader<'a> {
    source: &'a GuestSource<'a>,
    /// RAM block and first page of the last `prepare` call. The background sends pages from there on.
    prepared: (usize, usize),
    page: Box<[u8; PAGE_SIZE]>,
}

impl GuestReader<'_> {
    /// Copies a page into the buffer. Returns false for a zero page that may be sent as a zero page.
    fn read(&mut self, block: usize, page: usize) -> Result<bool, MigrationError> {
        let GuestSource { guest, ram, .. } = self.source;
        ram.settle(block, page);
        let detection = self.source.options.zero_pages.detection;
        let memory = &guest.ram()[block];
        if detection != ZeroPageDetection::None && memory.page_is_zero(page) {
            return Ok(false);
        }
        memory.read(page * PAGE_SIZE, &mut *self.page)?;
        Ok(true)
    }
}

impl Reader for GuestReader<'_> {
    /// Reads clean pages too: if the destination requests a page, it does not have the page.
    fn page(&mut self, block: usize, page: usize) -> Result<Option<&[u8]>, MigrationError> {
        let has_content = self.read(block, page)?;
        Ok(has_content.then_some(&*self.page))
    }

    fn prepare(&mut self, block: usize, page: usize, _: &Ledger) -> Result<bool, MigrationError> {
        self.prepared = (block, page);
        Ok(self.source.ram.is_dirty(block, page))
    }

    fn take(&mut self, ledger: &Ledger, batch: &mut Batch) -> Result<(), MigrationError> {
        let (block, first) = self.prepared;
        for page in first..first + BATCH {
            if self.source.ram.is_dirty(block, page) && ledger.claim(block, page) {
                match self.read(block, page)? {
                    true => batch.add(page, &*self.page),
                    false => batch.add_zero(page),
                }
            }
        }
        Ok(())
    }
}
