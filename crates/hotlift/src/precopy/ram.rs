//! Pages of guest RAM that the source must send, and their distribution to threads.
//!
//! Channel threads take chunks of RAM from a shared cursor. Each thread finds the dirty pages of its chunk, clears the dirty
//! log, detects zero pages, and sends the pages. In QEMU one thread distributes the pages; it limits a fast migration long
//! before memory bandwidth does.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};

use crate::error::MigrationError;
use crate::guest::Guest;

/// Count of pages in a chunk: 4 MiB. Large enough that the cursor costs nothing. Small enough that the last chunk of a round
/// delays a channel by only some milliseconds of compression. A multiple of 64, as KVM requires to clear its log.
const CHUNK_PAGES: usize = 1024;

/// Contiguous pages that one thread processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Index of the RAM block.
    pub block: usize,
    /// Number of the chunk's first page; a multiple of 64.
    pub first_page: usize,
    /// Count of pages, at least 1.
    pub pages: usize,
}

/// Dirty pages of all RAM blocks, and the cursor over the chunks of RAM.
pub(crate) struct RamState<'a> {
    guest: &'a dyn Guest,
    dirty: Vec<DirtyBitmap>,
    chunks: Vec<Chunk>,
    /// Index of the next chunk to take.
    next: AtomicUsize,
    /// Chunks below this index may be taken. With `legacy` zero page detection, the migration thread raises it after it has
    /// searched a chunk.
    released: Mutex<usize>,
    more_released: Condvar,
    /// True until the first round is over. In the first round, many pages were never touched by the guest.
    first_round: AtomicBool,
    /// Count of dirty log syncs, including the start of the log.
    syncs: AtomicU64,
}

impl<'a> RamState<'a> {
    /// Creates the state in which all pages of all RAM blocks are dirty.
    pub(crate) fn new(guest: &'a dyn Guest) -> Self {
        let dirty: Vec<_> = guest
            .ram()
            .iter()
            .map(|block| {
                let bitmap = DirtyBitmap::new(block.pages());
                bitmap.set_all();
                bitmap
            })
            .collect();
        let chunks = guest
            .ram()
            .iter()
            .enumerate()
            .flat_map(|(block, ram)| {
                (0..ram.pages())
                    .step_by(CHUNK_PAGES)
                    .map(move |first_page| Chunk {
                        block,
                        first_page,
                        pages: CHUNK_PAGES.min(ram.pages() - first_page),
                    })
            })
            .collect();
        Self {
            guest,
            dirty,
            chunks,
            next: AtomicUsize::new(usize::MAX),
            released: Mutex::new(0),
            more_released: Condvar::new(),
            first_round: AtomicBool::new(true),
            syncs: AtomicU64::new(0),
        }
    }

    /// Returns the total size of all RAM blocks in bytes.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.guest.ram().iter().map(|ram| ram.len() as u64).sum()
    }

    /// Returns the count of dirty pages, which must be sent.
    pub(crate) fn pending(&self) -> u64 {
        self.dirty.iter().map(DirtyBitmap::count).sum()
    }

    /// Starts the guest's dirty log. Counts as the first dirty log sync, because every page is dirty at the start.
    pub(crate) fn start_log(&self) -> Result<(), MigrationError> {
        self.guest.start_dirty_log()?;
        self.syncs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the count of dirty log syncs, including the start of the log.
    pub(crate) fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::Relaxed)
    }

    /// Fetches the dirty log of all RAM blocks. Returns the count of pages that became dirty.
    pub(crate) fn sync(&self) -> Result<u64, MigrationError> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        let mut newly_dirty = 0;
        for (block, dirty) in self.dirty.iter().enumerate() {
            newly_dirty += self.guest.sync_dirty_log(block, dirty)?;
        }
        Ok(newly_dirty)
    }

    /// Starts a round over all chunks. With `hold`, a chunk can be taken only after [`RamState::release`].
    pub(crate) fn start_round(&self, hold: bool) {
        *self.lock_released() = if hold { 0 } else { self.chunks.len() };
        self.next.store(0, Ordering::Release);
    }

    /// Ends a round. All of its chunks must have been processed.
    pub(crate) fn end_round(&self) {
        self.first_round.store(false, Ordering::Release);
    }

    /// Returns all chunks in order. The thread that releases chunks needs them.
    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Allows threads to take all chunks.
    pub(crate) fn release_all(&self) {
        self.release(self.chunks.len());
    }

    /// Allows threads to take the first `count` chunks.
    pub(crate) fn release(&self, count: usize) {
        *self.lock_released() = count;
        self.more_released.notify_all();
    }

    /// Takes the next chunk; waits until it is released. Returns `None` if all chunks of the round were taken.
    pub(crate) fn take(&self) -> Option<Chunk> {
        let index = self.next.fetch_add(1, Ordering::AcqRel);
        let chunk = *self.chunks.get(index)?;
        let released = self.lock_released();
        let waits = self
            .more_released
            .wait_while(released, |released| *released <= index);
        drop(waits);
        Some(chunk)
    }

    fn lock_released(&self) -> std::sync::MutexGuard<'_, usize> {
        self.released.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the dirty bits of `chunk` to `words`, and clears the guest's dirty log for `chunk`. Pages must be read only after
    /// this call, so that later writes become visible. `words` has one bit per page, the first page in bit 0 of the first word.
    /// Returns true if any bit was set.
    pub(crate) fn fetch_and_clear(
        &self,
        chunk: Chunk,
        words: &mut Vec<u64>,
    ) -> Result<bool, MigrationError> {
        let any = self.fetch(chunk, words);
        if any {
            self.guest
                .clear_dirty_log(chunk.block, chunk.first_page, chunk.pages)?;
        }
        Ok(any)
    }

    /// Moves the dirty bits of `chunk` to `words`. Does not clear the guest's dirty log, which was already cleared in this
    /// round. Returns true if any bit was set.
    pub(crate) fn fetch(&self, chunk: Chunk, words: &mut Vec<u64>) -> bool {
        let bitmap = &self.dirty[chunk.block];
        let first_word = chunk.first_page / 64;
        words.clear();
        words.extend(
            (first_word..first_word + chunk.pages.div_ceil(64)).map(|word| bitmap.take_word(word)),
        );
        words.iter().any(|word| *word != 0)
    }

    /// Marks a page as dirty again, after its dirty bit was fetched.
    pub(crate) fn put_back(&self, block: usize, page: usize) {
        self.dirty[block].set(page);
    }

    /// Returns true if a page is dirty, which means that it must be sent.
    pub(crate) fn is_dirty(&self, block: usize, page: usize) -> bool {
        self.dirty[block].test(page)
    }

    /// Clears the dirty bit of a page, so that the page is not sent.
    pub(crate) fn settle(&self, block: usize, page: usize) {
        self.dirty[block].clear_range(page, 1);
    }

    /// Returns the ranges of dirty pages in a RAM block: byte offset and length in bytes.
    pub(crate) fn dirty_ranges(&self, block: usize) -> Vec<(u64, u64)> {
        let page_size = PAGE_SIZE as u64;
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let dirty = &self.dirty[block];
        for offset in (0..dirty.pages()).filter(|page| dirty.test(*page)) {
            let start = offset as u64 * page_size;
            match ranges.last_mut() {
                Some((first, length)) if *first + *length == start => *length += page_size,
                _ => ranges.push((start, page_size)),
            }
        }
        ranges
    }

    /// Sets in `words` the bits of pages of `chunk` that the guest has never touched, as the kernel reports. All bits are 0 if
    /// the kernel cannot report this. All bits are also 0 after the first round, because every dirty page was written.
    pub(crate) fn untouched(&self, chunk: Chunk, words: &mut Vec<u64>) {
        words.clear();
        words.resize(chunk.pages.div_ceil(64), 0);
        if self.first_round.load(Ordering::Acquire) {
            let ram = &self.guest.ram()[chunk.block];
            if !matches!(
                ram.untouched(chunk.first_page, chunk.pages, words),
                Ok(true)
            ) {
                words.fill(0);
            }
        }
    }
}

/// Iterates over the pages of `chunk` whose bits are set in `words`: index in the chunk, and byte offset in the RAM block.
pub(crate) fn offsets(chunk: Chunk, words: &[u64]) -> impl Iterator<Item = (usize, usize)> + '_ {
    words.iter().enumerate().flat_map(move |(index, word)| {
        let mut rest = *word;
        std::iter::from_fn(move || {
            if rest == 0 {
                return None;
            }
            let bit = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let page = index * 64 + bit;
            Some((page, (chunk.first_page + page) * PAGE_SIZE))
        })
    })
}
