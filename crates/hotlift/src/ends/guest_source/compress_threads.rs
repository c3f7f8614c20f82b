//! Capability `compress` on the source: threads that compress the pages of the main channel.
//!
//! ```text
//! migration thread  fetch and clear dirty bits -> a run of pages        ...  write what came of it
//! compress_N                                  zero? -> copy -> stream
//! ```
//!
//! The migration thread only hands out and writes: had it compressed what no thread was free for, the
//! wire would stand still meanwhile. A page goes out once a round, and a round's end waits for all of
//! its pages, so that the runs of a round need no order between them.
//!
//! A page is copied after its dirty bit was cleared, and compressed from the copy: a codec that sees its
//! input change may write a stream that does not decode, and a change that the copy lacks is dirty
//! again by that very write.

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::MethodError;
use hotlift_methods::legacy::compress::Deflater;
use hotlift_wire::multifd::ZeroPageDetection;

use crate::error::MigrationError;
use crate::figures::Counters;
use crate::guest::Guest;
use crate::options::Options;
use crate::pipe::flow::Flow;
use crate::stream::main_send::MainSend;

/// Pages that are handed out together. With 1, 8, 32 and 128 of them the migration thread took 1.05,
/// 0.53, 0.40 and 0.36 CPU s/GiB (8 threads, level 1, Silesia); the threads gained nothing beyond 8. The
/// last run of a round, which keeps the others waiting, is 1 ms of work.
const RUN_PAGES: usize = 32;

/// Runs for each thread: one in its hands, one that waits for it or for the migration thread.
const RUNS_PER_THREAD: usize = 2;

/// Pages of one RAM block on their way to a thread and back.
#[derive(Debug)]
pub(crate) struct Run {
    block: usize,
    /// Byte offsets in the block.
    offsets: Vec<u64>,
    /// What came of the pages, in their order.
    contents: Vec<Content>,
    /// Bytes of the streams and of the pages that did not shrink, one after the other.
    bytes: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Content {
    Zero,
    /// The next page of the bytes.
    Normal,
    /// The next so many bytes.
    Compressed(usize),
}

impl Run {
    fn new() -> Self {
        Self {
            block: 0,
            offsets: Vec::with_capacity(RUN_PAGES),
            contents: Vec::with_capacity(RUN_PAGES),
            bytes: Vec::with_capacity(RUN_PAGES * PAGE_SIZE),
        }
    }
}

/// The threads' side of a session.
pub(crate) struct CompressThreads {
    runs: Flow<Run>,
}

impl CompressThreads {
    pub(crate) fn new(options: &Options) -> Self {
        Self {
            runs: Flow::new((0..RUNS_PER_THREAD * threads(options)).map(|_| Run::new())),
        }
    }

    /// Ends all threads, and whoever waits for them.
    pub(crate) fn end(&self) {
        self.runs.break_up();
    }
}

/// How many there are.
pub(crate) fn threads(options: &Options) -> usize {
    if options.compress {
        options.compress_threads.into()
    } else {
        0
    }
}

/// A thread: works on runs until there are no more.
pub(crate) fn work(
    threads: &CompressThreads,
    guest: &dyn Guest,
    options: &Options,
) -> Result<(), MigrationError> {
    let failed = |block: &str, offset, source: MethodError| MigrationError::Page {
        block: block.to_owned(),
        offset,
        source,
    };
    // Made when there is work. A stream that ended before it was opened would be a stranger's to the
    // destination, which goes on waiting for its source.
    let mut deflater = None;
    let detect = options.zero_page_detection == ZeroPageDetection::Multifd;
    let mut page = [0; PAGE_SIZE];
    while let Some(mut run) = threads.runs.next() {
        let ram = &guest.ram()[run.block];
        let deflater = match &mut deflater {
            Some(deflater) => deflater,
            none => {
                let made = Deflater::new(options.compress_level);
                none.insert(made.map_err(|source| failed(ram.name(), 0, source))?)
            }
        };
        for offset in &run.offsets {
            let offset = usize::try_from(*offset).unwrap_or(usize::MAX);
            if detect && ram.page_is_zero(offset / PAGE_SIZE) {
                run.contents.push(Content::Zero);
                continue;
            }
            ram.run(offset, PAGE_SIZE)?.copy_to(&mut page);
            let before = run.bytes.len();
            let shrinks = deflater
                .deflate(&page, &mut run.bytes)
                .map_err(|source| failed(ram.name(), offset, source))?;
            run.contents.push(if shrinks {
                Content::Compressed(run.bytes.len() - before)
            } else {
                run.bytes.extend_from_slice(&page);
                Content::Normal
            });
        }
        threads.runs.give_back(run);
    }
    Ok(())
}

/// The migration thread's side in one round.
pub(crate) struct HandOut<'a> {
    runs: &'a Flow<Run>,
    guest: &'a dyn Guest,
    options: &'a Options,
    counters: &'a Counters,
    block: usize,
    /// Offsets of the pages that are handed out next.
    gathered: Vec<u64>,
}

impl<'a> HandOut<'a> {
    pub(crate) fn new(
        threads: &'a CompressThreads,
        guest: &'a dyn Guest,
        options: &'a Options,
        counters: &'a Counters,
    ) -> Self {
        Self {
            runs: &threads.runs,
            guest,
            options,
            counters,
            block: 0,
            gathered: Vec::with_capacity(RUN_PAGES),
        }
    }

    /// Hands out a page whose dirty bit was cleared.
    pub(crate) fn page(
        &mut self,
        main: &mut MainSend,
        block: usize,
        offset: u64,
    ) -> Result<(), MigrationError> {
        if block != self.block || self.gathered.len() == RUN_PAGES {
            self.hand_out(main)?;
            self.block = block;
        }
        self.gathered.push(offset);
        Ok(())
    }

    /// Returns when all pages of the round have been written, or the migration has failed.
    pub(crate) fn finish(&mut self, main: &mut MainSend) -> Result<(), MigrationError> {
        self.hand_out(main)?;
        let runs = self.runs;
        if runs.drain() {
            let mut written = Vec::with_capacity(RUNS_PER_THREAD * threads(self.options));
            while let Some(mut run) = runs.try_take() {
                self.write(main, &mut run)?;
                written.push(run);
            }
            written.into_iter().for_each(|run| runs.release(run));
        }
        Ok(())
    }

    fn hand_out(&mut self, main: &mut MainSend) -> Result<(), MigrationError> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        let runs = self.runs;
        let run = if self.options.compress_wait_thread {
            runs.take()
        } else {
            runs.try_take()
        };
        let Some(mut run) = run else {
            return self.send_uncompressed(main);
        };
        self.write(main, &mut run)?;
        run.block = self.block;
        run.offsets.append(&mut self.gathered);
        runs.submit(run);
        Ok(())
    }

    /// Writes what came of a run, and empties it.
    fn write(&self, main: &mut MainSend, run: &mut Run) -> Result<(), MigrationError> {
        let mut rest = run.bytes.as_slice();
        let mut zero = 0;
        for (offset, content) in run.offsets.iter().zip(&run.contents) {
            let length = match content {
                Content::Zero => 0,
                Content::Normal => PAGE_SIZE,
                Content::Compressed(length) => *length,
            };
            let (bytes, behind) = rest.split_at(length);
            rest = behind;
            match content {
                Content::Zero => {
                    zero += 1;
                    main.zero_page(run.block, *offset)?;
                }
                Content::Normal => main.copied_page(run.block, *offset, bytes)?,
                Content::Compressed(_) => main.compressed_page(run.block, *offset, bytes)?,
            }
        }
        self.counters.add_pages(run.contents.len() - zero, zero);
        run.offsets.clear();
        run.contents.clear();
        run.bytes.clear();
        Ok(())
    }

    /// Without a thread for them, pages go out as they are.
    fn send_uncompressed(&mut self, main: &mut MainSend) -> Result<(), MigrationError> {
        let ram = &self.guest.ram()[self.block];
        let detect = self.options.zero_page_detection == ZeroPageDetection::Multifd;
        let (mut normal, mut zero) = (0, 0);
        for offset in self.gathered.drain(..) {
            let at = usize::try_from(offset).unwrap_or(usize::MAX);
            if detect && ram.page_is_zero(at / PAGE_SIZE) {
                main.zero_page(self.block, offset)?;
                zero += 1;
            } else {
                main.guest_page(self.block, offset, ram.run(at, PAGE_SIZE)?)?;
                normal += 1;
            }
        }
        self.counters.add_pages(normal, zero);
        Ok(())
    }
}
