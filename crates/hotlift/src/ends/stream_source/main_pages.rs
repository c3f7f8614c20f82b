//! Pages that are records of the main channel: those of a source without multifd, and zero pages of
//! `legacy` detection.

use std::sync::atomic::Ordering;

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::main_channel::PageContent;

use crate::ends::page_set::PageSet;
use crate::ends::stream_source::demand::Demand;
use crate::error::MigrationError;
use crate::pipe::batch::{BATCH_PAGES, Batch};
use crate::pipe::flow::Broken;
use crate::pipe::session::Session;
use crate::pipe::sink::RamLayout;

/// Pages of a batch in postcopy: enough for the methods to find repetitions.
const BATCH_IN_POSTCOPY: usize = 32;

/// Gathers page records into batches.
pub(crate) struct MainPages<'a> {
    session: &'a Session<'a>,
    /// The source has no multifd channels, and so no sync points.
    alone: bool,
    /// Pages that are waited for in postcopy, which do not come here.
    demand: &'a Demand,
    /// With the worker that it is for.
    batch: Option<(Option<usize>, Batch)>,
    /// Bytes of the host pages of each RAM block.
    page_sizes: Vec<u64>,
    /// The guest runs on the other side.
    switched: bool,
    /// Pages of a batch at most.
    most: usize,
    /// Which pages have come since the last barrier, by RAM block.
    seen: Vec<PageSet>,
    any_seen: bool,
}

impl<'a> MainPages<'a> {
    pub(crate) fn new(
        session: &'a Session<'a>,
        ram: &RamLayout,
        alone: bool,
        demand: &'a Demand,
    ) -> Self {
        // Only where the pages are looked up.
        let blocks = if alone { ram.blocks.as_slice() } else { &[] };
        let seen = blocks
            .iter()
            .map(|block| PageSet::new(block.used_length, &session.memory));
        Self {
            session,
            alone,
            demand,
            batch: None,
            page_sizes: ram.blocks.iter().map(|block| block.page_size).collect(),
            switched: false,
            most: BATCH_PAGES,
            seen: seen.collect(),
            any_seen: false,
        }
    }

    /// Takes in a page. Where the source has no sync points, a page that comes again since the last one
    /// makes one: its versions must not overtake each other on different channels.
    pub(crate) fn add(
        &mut self,
        block: usize,
        offset: u64,
        content: PageContent<'_>,
    ) -> Result<(), MigrationError> {
        if self.alone && !self.note(block, offset)? {
            self.settle()?;
            self.session.sink.barrier()?;
            self.barrier_passed();
            self.note(block, offset)?;
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

    /// The worker that is to write a page, if not any may. In postcopy one channel has all of a huge page: the relay behind
    /// puts it together again, and would have to keep a part of many where one channel is far ahead of another.
    fn worker(&self, block: usize, offset: u64) -> Option<usize> {
        let size = self.page_sizes[block];
        let is_huge = self.switched && size > PAGE_SIZE as u64;
        let workers = self.session.sink.workers() as u64;
        is_huge.then(|| usize::try_from(offset / size % workers).unwrap_or(0))
    }

    /// A new batch for a page of `block` and `worker`; `None` if it joins those that were gathered.
    fn next_batch(
        &mut self,
        worker: Option<usize>,
        block: usize,
    ) -> Result<Option<Batch>, MigrationError> {
        let flow = &self.session.flow;
        let joins = |to: Option<usize>, batch: &Batch| to == worker && batch.block == block;
        match &self.batch {
            Some((to, batch)) if joins(*to, batch) && batch.len() < self.most => Ok(None),
            // All are being written, and behind this page there may be one that is waited for: it is not to wait for them.
            Some((to, batch)) if joins(*to, batch) && batch.len() < BATCH_PAGES => flow
                .take_while(|| self.demand.is_met())
                .map_err(|Broken| MigrationError::Cancelled),
            _ => {
                self.submit();
                let batch = self.session.flow.take();
                batch.map(Some).ok_or(MigrationError::Cancelled)
            }
        }
    }

    /// Notes a page; false if it has come before.
    fn note(&mut self, block: usize, offset: u64) -> Result<bool, MigrationError> {
        self.any_seen = true;
        self.seen[block].insert(offset)
    }

    /// Postcopy begins. Batches are small from here on: somebody may wait for a page of one.
    pub(crate) fn switch(&mut self) {
        self.switched = true;
        self.most = BATCH_IN_POSTCOPY;
    }

    /// Hands on what was gathered.
    pub(crate) fn submit(&mut self) {
        if let Some((worker, batch)) = self.batch.take() {
            self.session.flow.submit_to(worker, batch);
        }
    }

    /// Returns when everything that was handed on, by any thread, has been written.
    pub(crate) fn settle(&mut self) -> Result<(), MigrationError> {
        self.submit();
        if self.session.flow.drain() {
            return Ok(());
        }
        Err(MigrationError::Cancelled)
    }

    /// Every page may come again.
    pub(crate) fn barrier_passed(&mut self) {
        self.session.barriers.fetch_add(1, Ordering::Relaxed);
        if std::mem::replace(&mut self.any_seen, false) {
            self.seen.iter().for_each(PageSet::clear);
        }
    }
}
