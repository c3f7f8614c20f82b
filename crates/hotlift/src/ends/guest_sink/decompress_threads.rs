//! Capability `compress` on the destination: threads that decompress pages of the main channel.
//!
//! ```text
//! mig/dst/main  read records -> a run of streams
//! decompress_N                                   -> guest RAM
//! ```
//!
//! A stream may bring a page twice, and the later one counts: a record of any kind whose page may be
//! with a thread waits for all threads. So does the end of each section of RAM, and with it everything
//! that is no page.

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

/// Pages that are handed over together. With 1, 8, 32 and 128 of them this side took 8.5, 5.9, 5.8 and
/// 5.6 CPU s/GiB (2 threads, Silesia). A run is 0.5 ms of work, and QEMU ends a section after 50 ms.
const RUN_PAGES: usize = 32;

/// Runs for each thread, and one that is being filled.
const RUNS_PER_THREAD: usize = 2;

/// Compressed pages on their way to a thread.
#[derive(Debug)]
struct Run {
    pages: Vec<Page>,
    /// Their streams, one after the other.
    streams: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    block: usize,
    /// In bytes.
    offset: usize,
    /// Of its stream.
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

/// The threads' side of a session.
pub(crate) struct DecompressThreads {
    runs: Arc<Flow<Run>>,
}

impl DecompressThreads {
    /// Those of a migration with this lifetime, whose close ends them.
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

/// How many there are. They wait even if `compress` is off here: it is the source that compresses, and the
/// document of 2015 switches it on there alone.
pub(crate) fn threads(options: &Options) -> usize {
    if options.multifd() {
        0
    } else {
        options.decompress_threads.into()
    }
}

/// Guest RAM that pages are put into.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub guest: &'a dyn Guest,
    /// Pages that hold something.
    pub written: &'a [DirtyBitmap],
}

/// A thread: works on runs until there are no more.
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

/// Puts a compressed page into guest RAM.
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

/// A page could not be decoded.
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

/// The main thread's side.
pub(crate) struct HandOver<'a> {
    runs: &'a Flow<Run>,
    /// What is being filled.
    run: Option<Run>,
    /// Pages in runs that have not been taken back, by RAM block.
    away: Vec<DirtyBitmap>,
    any_away: bool,
    /// Room for all runs.
    taken_back: Vec<Run>,
}

impl<'a> HandOver<'a> {
    /// `None` if there are no threads.
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
            away: blocks
                .map(|block| DirtyBitmap::new(block.pages()))
                .collect(),
            any_away: false,
            taken_back: Vec::with_capacity(RUNS_PER_THREAD * threads + 1),
        })
    }

    /// Hands a page to the threads.
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
        self.away[block].set(offset / PAGE_SIZE);
        self.any_away = true;
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

    /// Returns when no thread has that page, or may have it.
    pub(crate) fn wait_for(&mut self, block: usize, offset: usize) -> Result<(), MigrationError> {
        if self.away[block].test(offset / PAGE_SIZE) {
            self.settle()?;
        }
        Ok(())
    }

    /// Returns when all pages are in their places.
    pub(crate) fn settle(&mut self) -> Result<(), MigrationError> {
        if !self.any_away {
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
        self.any_away = false;
        Ok(())
    }

    /// Empties a run whose pages are in their places.
    fn take_back(&self, run: &mut Run) {
        for page in run.pages.drain(..) {
            self.away[page.block].clear_range(page.offset / PAGE_SIZE, 1);
        }
        run.streams.clear();
    }
}
