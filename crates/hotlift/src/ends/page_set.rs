//! Sets of pages, whose memory is that of the pages in them: how much RAM there is, a peer says.

use std::sync::OnceLock;

use hotlift_mem::{DirtyBitmap, PAGE_SIZE};
use hotlift_methods::MemoryLimit;

use crate::error::{Channel, MigrationError};

/// Pages that share a bitmap, which is made when the first of them is put in: 1 GiB of RAM, 32 KiB.
const PART: usize = 1 << 18;

const PART_BYTES: usize = PART / 8;

/// Pages of one RAM block.
#[derive(Debug)]
pub(crate) struct PageSet {
    parts: Vec<OnceLock<DirtyBitmap>>,
    memory: MemoryLimit,
}

impl PageSet {
    /// No pages of a RAM block of `length` bytes. Those put in take their memory from `memory`.
    pub(crate) fn new(length: u64, memory: &MemoryLimit) -> Self {
        let parts = length.div_ceil((PART * PAGE_SIZE) as u64);
        Self {
            parts: (0..parts).map(|_| OnceLock::new()).collect(),
            memory: memory.clone(),
        }
    }

    /// Puts in the page at byte `offset`; false if it was in, or is none of the block's.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn insert(&self, offset: u64) -> Result<bool, MigrationError> {
        let page = usize::try_from(offset).unwrap_or(usize::MAX) / PAGE_SIZE;
        let Some(part) = self.parts.get(page / PART) else {
            return Ok(false);
        };
        Ok(self.made(part)?.set(page % PART))
    }

    /// Takes the memory for all pages now.
    ///
    /// # Errors
    /// If there is none.
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

    /// Whether the page at byte `offset` is in.
    pub(crate) fn contains(&self, offset: u64) -> bool {
        let page = usize::try_from(offset).unwrap_or(usize::MAX) / PAGE_SIZE;
        let part = self.parts.get(page / PART).and_then(OnceLock::get);
        part.is_some_and(|part| part.test(page % PART))
    }

    /// Takes out every page: their byte offsets, in order.
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

    /// Takes out every page.
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
    fn pages_are_in_once_and_come_out_in_order() {
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
    fn a_large_block_takes_memory_for_what_is_in_it() {
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
