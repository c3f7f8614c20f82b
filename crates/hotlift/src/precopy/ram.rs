//! The source's view of guest RAM: which pages are still to be sent, and who takes which.
//!
//! Channel threads take chunks of RAM from a shared cursor and scan, clear, test and send them by
//! themselves. One thread that hands out pages, as QEMU's migration thread does, is the limit of a
//! fast migration long before memory is.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};

use crate::error::MigrationError;
use crate::guest::Guest;

/// Pages of a chunk: 4 MiB. Large enough that taking one costs nothing, small enough that the last
/// chunk of a round keeps no channel waiting for more than some milliseconds of compression. A
/// multiple of 64, as clearing KVM's log demands.
const CHUNK_PAGES: usize = 1024;

/// A run of pages that one thread works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Index of the RAM block.
    pub block: usize,
    /// First page; a multiple of 64.
    pub first_page: usize,
    /// Number of pages, at least 1.
    pub pages: usize,
}

/// Dirty pages of all RAM blocks and the cursor over them.
pub(crate) struct RamState<'a> {
    guest: &'a dyn Guest,
    dirty: Vec<DirtyBitmap>,
    chunks: Vec<Chunk>,
    /// Index of the next chunk that nobody has taken.
    next: AtomicUsize,
    /// Chunks below this index may be taken; the migration thread raises it as it has looked for
    /// zero pages (`legacy` detection).
    released: Mutex<usize>,
    more_released: Condvar,
    /// True until the first round is over: pages may never have been touched.
    first_round: AtomicBool,
    /// Reads of the dirty log.
    syncs: AtomicU64,
}

impl<'a> RamState<'a> {
    /// All pages of all blocks, all to be sent.
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

    /// Bytes of all blocks.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.guest.ram().iter().map(|ram| ram.len() as u64).sum()
    }

    /// Pages that are to be sent.
    pub(crate) fn pending(&self) -> u64 {
        self.dirty.iter().map(DirtyBitmap::count).sum()
    }

    /// Starts the dirty log. It counts as the first read of it: every page is dirty.
    pub(crate) fn start_log(&self) -> Result<(), MigrationError> {
        self.guest.start_dirty_log()?;
        self.syncs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Reads of the dirty log so far.
    pub(crate) fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::Relaxed)
    }

    /// Fetches the dirty log of all blocks; returns how many pages it added.
    pub(crate) fn sync(&self) -> Result<u64, MigrationError> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        let mut newly_dirty = 0;
        for (block, dirty) in self.dirty.iter().enumerate() {
            newly_dirty += self.guest.sync_dirty_log(block, dirty)?;
        }
        Ok(newly_dirty)
    }

    /// Starts a round over all chunks. With `hold`, none may be taken before it is released.
    pub(crate) fn start_round(&self, hold: bool) {
        *self.lock_released() = if hold { 0 } else { self.chunks.len() };
        self.next.store(0, Ordering::Release);
    }

    /// Ends a round whose chunks have all been worked on.
    pub(crate) fn end_round(&self) {
        self.first_round.store(false, Ordering::Release);
    }

    /// All chunks, in order; for the thread that releases them.
    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Lets all chunks be taken.
    pub(crate) fn release_all(&self) {
        self.release(self.chunks.len());
    }

    /// Lets the first `count` chunks be taken.
    pub(crate) fn release(&self, count: usize) {
        *self.lock_released() = count;
        self.more_released.notify_all();
    }

    /// Takes the next chunk, waiting for its release; `None` when the round has no more.
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

    /// Fetches the dirty bits of `chunk` into `words` (one bit a page, first page in bit 0 of the
    /// first word) and re-arms the guest's log for them; true if there was any. From here on its
    /// pages may be read.
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

    /// Fetches the dirty bits of a chunk whose log was re-armed in this round already.
    pub(crate) fn fetch(&self, chunk: Chunk, words: &mut Vec<u64>) -> bool {
        let bitmap = &self.dirty[chunk.block];
        let first_word = chunk.first_page / 64;
        words.clear();
        words.extend(
            (first_word..first_word + chunk.pages.div_ceil(64)).map(|word| bitmap.take_word(word)),
        );
        words.iter().any(|word| *word != 0)
    }

    /// Marks a page that was fetched as still to be sent.
    pub(crate) fn put_back(&self, block: usize, page: usize) {
        self.dirty[block].set(page);
    }

    /// Whether a page is still to be sent.
    pub(crate) fn is_dirty(&self, block: usize, page: usize) -> bool {
        self.dirty[block].test(page)
    }

    /// A page need not be sent any more.
    pub(crate) fn settle(&self, block: usize, page: usize) {
        self.dirty[block].clear_range(page, 1);
    }

    /// The runs of pages of a RAM block that are still to be sent: byte offset and length of each.
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

    /// Asks the kernel which pages of a fetched `chunk` were never touched: bits in `words`, all 0
    /// if it cannot tell or after the first round, where every dirty page was written.
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

/// Byte offsets, within their block, of the pages whose bits are set in the words of `chunk`.
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
