//! Sets of pages. A bitmap is allocated when its first page is inserted, because the peer may state a false size of RAM.

use std::sync::OnceLock;

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_methods::MemoryLimit;

use crate::error::{Channel, MigrationError};

/// Number of pages that share a bitmap. The bitmap has 32 KiB for 1 GiB of RAM.
const PART: usize = 1 << 18;

const PART_BYTES: usize = PART / 8;

/// Set of pages of one RAM block.
#[derive(Debug)]
pub(crate) struct PageSet {
    parts: Vec<OnceLock<DirtyBitmap>>,
    memory: MemoryLimit,
}

impl PageSet {
    /// Creates an empty set for a RAM block of `length` bytes. Bitmaps are charged to `memory` when they are allocated.
    pub(crate) fn new(length: u64, memory: &MemoryLimit) -> Self {
        let parts = length.div_ceil((PART * PAGE_SIZE) as u64);
        Self {
            parts: (0..parts).map(|_| OnceLock::new()).collect(),
            memory: memory.clone(),
        }
    }

    /// Inserts the page at byte `offset`. Returns false if it is already in the set, or outside the block.
    ///
    /// # Errors
    /// [`MigrationError::MemoryLimit`] if the memory limit is reached.
    pub(crate) fn insert(&self, offset: u64) -> Result<bool, MigrationError> {
        let page = usize::try_from(offset).unwrap_or(usize::MAX) / PAGE_SIZE;
        let Some(part) = self.parts.get(page / PART) else {
            return Ok(false);
        };
        Ok(self.made(part)?.set(page % PART))
    }

    /// Allocates the bitmaps of all pages now.
    ///
    /// # Errors
    /// [`MigrationError::MemoryLimit`] if the memory limit is reached.
    pub(crate) fn reserve(&self) -> Result<(), MigrationError> {
        for part in &self.parts {
            self.made(part)?;
        }
        Ok(())
    }

    fn made<'p>(&self, part: &'p OnceLock<DirtyBitmap>) -> Result<&'p DirtyBitmap, MigrationError> {
        if part.get().is_none() {
            let taken = self.memory.take(PART_BYTES);
            taken.map_err(|source| MigrationError::memory(Channel::Main, source))?;
        }
        Ok(part.get_or_init(|| DirtyBitmap::new(PART)))
    }

    /// Returns true if the page at byte `offset` is in the set.
    pub(crate) fn contains(&self, offset: u64) -> bool {
        let page = usize::try_from(offset).unwrap_or(usize::MAX) / PAGE_SIZE;
        let part = self.parts.get(page / PART).and_then(OnceLock::get);
        part.is_some_and(|part| part.test(page % PART))
    }

    /// Removes all pages and returns their byte offsets, in order.
    pub(crate) fn take(&self) -> impl Iterator<Item = u64> {
        let made = (0_u64..).zip(&self.parts);
        let made = made.filter_map(|(part, bitmap)| Some((part, bitmap.get()?)));
        made.flat_map(|(part, bitmap)| {
            (0..bitmap.words()).flat_map(move |word| {
                let mut bits = bitmap.take_word(word);
                std::iter::from_fn(move || {
                    let bit = bits.trailing_zeros();
                    bits &= bits.wrapping_sub(1);
                    let page = part * PART as u64 + word as u64 * 64 + u64::from(bit);
                    (bit < u64::BITS).then_some(page * PAGE_SIZE as u64)
                })
            })
        })
    }

    /// Removes all pages.
    pub(crate) fn clear(&self) {
        for bitmap in self.parts.iter().filter_map(OnceLock::get) {
            bitmap.clear_range(0, bitmap.pages());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_stored_once_and_returned_in_order() {
        let gib = 1 << 30;
        let set = PageSet::new(3 * gib + 4096, &MemoryLimit::new(4 * PART_BYTES));
        let pages = [3 * gib, 2 * gib - 4096, 0, 2 * gib, 63 * 4096, 64 * 4096];
        assert!(pages.iter().all(|&page| set.insert(page).unwrap()));
        assert!(!pages.iter().any(|&page| set.insert(page).unwrap()));
        assert!(!set.insert(4 * gib).unwrap(), "behind the block");
        assert!(pages.iter().all(|&page| set.contains(page)));
        assert!(!set.contains(4096) && !set.contains(4 * gib));
        let mut sorted = pages.to_vec();
        sorted.sort_unstable();
        assert_eq!(set.take().collect::<Vec<_>>(), sorted);
        assert_eq!(set.take().count(), 0);
        set.insert(gib).unwrap();
        set.clear();
        assert!(set.insert(gib).unwrap());
    }

    #[test]
    fn a_large_block_uses_memory_only_for_stored_pages() {
        let memory = MemoryLimit::new(2 * PART_BYTES);
        let set = PageSet::new(64 << 40, &memory);
        assert!(set.insert((64 << 40) - 4096).unwrap());
        let made = set.parts.iter().filter_map(OnceLock::get).count();
        assert_eq!((set.parts.len(), made), (1 << 16, 1));
        assert_eq!(memory.used(), PART_BYTES);
        set.insert(0).unwrap();
        assert!(set.insert(1 << 30).is_err(), "more than there is");
    }
}
