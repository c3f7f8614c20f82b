//! Pages that are records of the main channel: from a source without multifd, and zero pages of `legacy` detection.

use std::sync::atomic::Ordering;

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::main_channel::PageContent;

use crate::ends::page_set::PageSet;
use crate::ends::stream_source::pending_requests::PendingRequests;
use crate::error::MigrationError;
use crate::pipe::batch::{BATCH_PAGES, Batch};
use crate::pipe::flow::FlowBroken;
use crate::pipe::session::Session;
use crate::pipe::sink::RamLayout;

/// Maximum number of pages in a batch in postcopy: few, but enough for the methods to find repetitions.
const BATCH_IN_POSTCOPY: usize = 32;

/// Collects page records into batches.
pub(crate) struct MainPages<'a> {
    session: &'a Session<'a>,
    /// The source has no multifd channels, and so no sync points.
    alone: bool,
    /// Requested pages in postcopy, which bypass the batches.
    pending_requests: &'a PendingRequests,
    /// Current batch, with the worker that must write it.
    batch: Option<(Option<usize>, Batch)>,
    /// Size of the host pages of each RAM block, in bytes.
    page_sizes: Vec<u64>,
    /// True if the guest runs at the destination.
    switched: bool,
    /// Maximum number of pages of a batch.
    most: usize,
    /// Pages that have come since the last barrier, by RAM block.
    seen: Vec<PageSet>,
    any_seen: bool,
}

impl<'a> MainPages<'a> {
    pub(crate) fn new(
        session: &'a Session<'a>,
        ram: &RamLayout,
        alone: bool,
        pending_requests: &'a PendingRequests,
    ) -> Self {
        // Used only for a source without sync points.
        let blocks = if alone { ram.blocks.as_slice() } else { &[] };
        let seen = blocks
            .iter()
            .map(|block| PageSet::new(block.used_length, &session.memory));
        Self {
            session,
            alone,
            pending_requests,
            batch: None,
            page_sizes: ram.blocks.iter().map(|block| block.page_size).collect(),
            switched: false,
            most: BATCH_PAGES,
            seen: seen.collect(),
            any_seen: false,
        }
    }

    /// Adds a page to the current batch. If the source has no sync points, and the page has already come since the last
    /// barrier, makes a barrier first. Otherwise two versions of the page could be sent on different channels, and overtake
    /// each other.
    pub(crate) fn add(
        &mut self,
        block: usize,
        offset: u64,
        content: PageContent<'_>,
    ) -> Result<(), MigrationError> {
        if self.alone && !self.record(block, offset)? {
            self.settle()?;
            self.session.sink.barrier()?;
            self.barrier_passed();
            self.record(block, offset)?;
        }
        if let PageContent::Xbzrle(delta) = content {
            self.settle()?;
            return self.session.sink.delta(block, offset, delta);
        }
        let worker = self.worker(block, offset);
        if let Some(mut batch) = self.next_batch(worker, block)? {
            self.submit();
            batch.start(block);
            batch.from_main = true;
            self.batch = Some((worker, batch));
        }
        let Some((_, batch)) = &mut self.batch else {
            return Ok(());
        };
        match content {
            PageContent::Zero => batch.zero.push(offset),
            PageContent::Normal(bytes) => batch.push(offset, bytes),
            PageContent::Compressed(stream) => batch.push_compressed(offset, stream),
            PageContent::Xbzrle(_) => {}
        }
        Ok(())
    }

    /// Returns the worker that must write a page; `None` if any worker may. In postcopy, one channel gets all pages of a huge
    /// page. The next relay assembles huge pages, and would otherwise have to store parts of many.
    fn worker(&self, block: usize, offset: u64) -> Option<usize> {
        let size = self.page_sizes[block];
        let is_huge = self.switched && size > PAGE_SIZE as u64;
        let workers = self.session.sink.workers() as u64;
        is_huge.then(|| usize::try_from(offset / size % workers).unwrap_or(0))
    }

    /// Returns a new batch for a page of `block` and `worker`; `None` if the page joins the current batch.
    fn next_batch(
        &mut self,
        worker: Option<usize>,
        block: usize,
    ) -> Result<Option<Batch>, MigrationError> {
        let flow = &self.session.flow;
        let joins = |to: Option<usize>, batch: &Batch| to == worker && batch.block == block;
        match &self.batch {
            Some((to, batch)) if joins(*to, batch) && batch.len() < self.most => Ok(None),
            // Waits for a free batch only while no requested page is awaited, because a requested page may follow this page.
            // Otherwise this page joins the current batch.
            Some((to, batch)) if joins(*to, batch) && batch.len() < BATCH_PAGES => flow
                .take_while(|| self.pending_requests.all_arrived())
                .map_err(|FlowBroken| MigrationError::Cancelled),
            _ => {
                self.submit();
                let batch = self.session.flow.take();
                batch.map(Some).ok_or(MigrationError::Cancelled)
            }
        }
    }

    /// Records a page. Returns false if the page has already come since the last barrier.
    fn record(&mut self, block: usize, offset: u64) -> Result<bool, MigrationError> {
        self.any_seen = true;
        self.seen[block].insert(offset)
    }

    /// Begins postcopy. Batches are small from now on, because the guest may wait for one of their pages.
    pub(crate) fn switch(&mut self) {
        self.switched = true;
        self.most = BATCH_IN_POSTCOPY;
    }

    /// Submits the current batch.
    pub(crate) fn submit(&mut self) {
        if let Some((worker, batch)) = self.batch.take() {
            self.session.flow.submit_to(worker, batch);
        }
    }

    /// Waits until all submitted batches, of any thread, have been written.
    pub(crate) fn settle(&mut self) -> Result<(), MigrationError> {
        self.submit();
        if self.session.flow.drain() {
            return Ok(());
        }
        Err(MigrationError::Cancelled)
    }

    /// Clears the record of pages, because each page may come again after a barrier.
    pub(crate) fn barrier_passed(&mut self) {
        self.session.barriers.fetch_add(1, Ordering::Relaxed);
        if std::mem::replace(&mut self.any_seen, false) {
            self.seen.iter().for_each(PageSet::clear);
        }
    }
}
