//! Capability `compress` at the destination: threads that decompress pages of the main channel.
//!
//! ```text
//! mig/dst/main  read records -> a run of streams
//! decompress_N                                   -> guest RAM
//! ```
//!
//! A stream may contain a page twice; the later content is valid. So before the main thread handles a page again, it waits
//! until no thread can still have the earlier content. It also waits for all threads at the end of each RAM section.

use std::sync::Arc;

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_methods::MethodError;
use hotlift_methods::legacy::compress::Inflater;
use hotlift_wire::limits;

use crate::error::MigrationError;
use crate::guest::Guest;
use crate::life::Life;
use crate::options::Options;
use crate::pipe::flow::Flow;

/// Number of pages in a run (the unit of work for a thread). With 1, 8, 32 and 128 pages the destination took 8.5, 5.9, 5.8 and
/// 5.6 CPU s/GiB (2 threads, Silesia). A run is 0.5 ms of work, and QEMU ends a RAM section after 50 ms.
const RUN_PAGES: usize = 32;

/// Number of runs per thread, in addition to the run that the main thread fills.
const RUNS_PER_THREAD: usize = 2;

/// Compressed pages that one thread decompresses.
#[derive(Debug)]
struct Run {
    pages: Vec<Page>,
    /// zlib streams of all pages, concatenated.
    streams: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    block: usize,
    /// Byte offset in the block.
    offset: usize,
    /// Length of the page's zlib stream, in bytes.
    length: usize,
}

impl Run {
    fn new() -> Self {
        Self {
            pages: Vec::with_capacity(RUN_PAGES),
            streams: Vec::with_capacity(RUN_PAGES * limits::COMPRESSED_PAGE),
        }
    }
}

/// Queue of runs from the main thread to the decompression threads.
pub(crate) struct DecompressThreads {
    runs: Arc<Flow<Run>>,
}

impl DecompressThreads {
    /// Creates the queue. The close of the migration's `life` ends the threads.
    pub(crate) fn new(options: &Options, life: &Life) -> Self {
        let count = match threads(options) {
            0 => 0,
            threads => RUNS_PER_THREAD * threads + 1,
        };
        let runs = Arc::new(Flow::new((0..count).map(|_| Run::new())));
        life.register(&runs);
        Self { runs }
    }
}

/// Returns the number of decompression threads; 0 with multifd. They also run without `compress`: QEMU's documentation of 2015
/// enables this capability only at the source.
pub(crate) fn threads(options: &Options) -> usize {
    if options.stream.multifd() {
        0
    } else {
        options.decompress_threads.into()
    }
}

/// Guest RAM as the destination of pages.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub guest: &'a dyn Guest,
    /// Pages with content, by RAM block.
    pub written: &'a [DirtyBitmap],
}

/// Body of a decompression thread: decompresses runs until the queue is closed.
pub(crate) fn work(threads: &DecompressThreads, target: Target<'_>) -> Result<(), MigrationError> {
    let mut inflater = Inflater::new().map_err(|source| failed(target.guest, 0, 0, source))?;
    while let Some(run) = threads.runs.next() {
        let mut rest = run.streams.as_slice();
        for page in &run.pages {
            let (stream, behind) = rest.split_at(page.length);
            rest = behind;
            inflate(target, &mut inflater, page.block, page.offset, stream)?;
        }
        threads.runs.give_back(run);
    }
    Ok(())
}

/// Decompresses a page into guest RAM.
pub(crate) fn inflate(
    target: Target<'_>,
    inflater: &mut Inflater,
    block: usize,
    offset: usize,
    stream: &[u8],
) -> Result<(), MigrationError> {
    let page = target.guest.ram()[block].run(offset, PAGE_SIZE)?;
    target.written[block].set(offset / PAGE_SIZE);
    inflater
        .inflate(stream, page)
        .map_err(|source| failed(target.guest, block, offset, source))
}

/// Returns the error for a page that could not be decoded.
pub(crate) fn failed(
    guest: &dyn Guest,
    block: usize,
    offset: usize,
    source: MethodError,
) -> MigrationError {
    let name = guest.ram().get(block).map_or("", |ram| ram.name());
    MigrationError::Page {
        block: name.to_owned(),
        offset,
        source,
    }
}

/// Collects pages into runs, in the main thread.
pub(crate) struct DecompressQueue<'a> {
    runs: &'a Flow<Run>,
    /// Run that is being filled.
    run: Option<Run>,
    /// Pages of runs that threads may still have, by RAM block.
    pages_in_threads: Vec<DirtyBitmap>,
    any_in_use: bool,
    /// Empty runs for reuse. The vector has capacity for all runs.
    taken_back: Vec<Run>,
}

impl<'a> DecompressQueue<'a> {
    /// Creates the queue's end for the main thread; `None` if there are no decompression threads.
    pub(crate) fn new(
        pool: &'a DecompressThreads,
        guest: &dyn Guest,
        options: &Options,
    ) -> Option<Self> {
        let threads = threads(options);
        let blocks = guest.ram().iter();
        (threads > 0).then(|| Self {
            runs: &pool.runs,
            run: None,
            pages_in_threads: blocks
                .map(|block| DirtyBitmap::new(block.pages()))
                .collect(),
            any_in_use: false,
            taken_back: Vec::with_capacity(RUNS_PER_THREAD * threads + 1),
        })
    }

    /// Queues a page for the threads.
    pub(crate) fn page(
        &mut self,
        block: usize,
        offset: usize,
        stream: &[u8],
    ) -> Result<(), MigrationError> {
        self.wait_for(block, offset)?;
        let mut run = match self.run.take() {
            Some(run) => run,
            None => {
                let mut run = self.runs.take().ok_or(MigrationError::Cancelled)?;
                self.take_back(&mut run);
                run
            }
        };
        self.pages_in_threads[block].set(offset / PAGE_SIZE);
        self.any_in_use = true;
        run.pages.push(Page {
            block,
            offset,
            length: stream.len(),
        });
        run.streams.extend_from_slice(stream);
        if run.pages.len() == RUN_PAGES {
            self.runs.submit(run);
        } else {
            self.run = Some(run);
        }
        Ok(())
    }

    /// Waits until no thread can still have this page.
    pub(crate) fn wait_for(&mut self, block: usize, offset: usize) -> Result<(), MigrationError> {
        if self.pages_in_threads[block].test(offset / PAGE_SIZE) {
            self.settle()?;
        }
        Ok(())
    }

    /// Waits until all queued pages are in guest RAM.
    pub(crate) fn settle(&mut self) -> Result<(), MigrationError> {
        if !self.any_in_use {
            return Ok(());
        }
        let runs = self.runs;
        if let Some(run) = self.run.take() {
            runs.submit(run);
        }
        if !runs.drain() {
            return Err(MigrationError::Cancelled);
        }
        while let Some(mut run) = runs.try_take() {
            self.take_back(&mut run);
            self.taken_back.push(run);
        }
        self.taken_back.drain(..).for_each(|run| runs.release(run));
        self.any_in_use = false;
        Ok(())
    }

    /// Clears a run whose pages are in guest RAM.
    fn take_back(&self, run: &mut Run) {
        for page in run.pages.drain(..) {
            self.pages_in_threads[page.block].clear_range(page.offset / PAGE_SIZE, 1);
        }
        run.streams.clear();
    }
}
