//! Bitmap of the pages to send: one bit for each page, shared by all threads of one side of a migration.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// One bit for each page of a RAM block (QEMU's `RAMBlock::bmap`), initially clear.
///
/// A thread that takes a page clears the bit *before* it reads the page. A thread that marks a page sets the bit *after* it
/// wrote the page. All changes are read-modify-write operations with acquire and release on one word. So either the taking
/// thread sees the write, or the bit is set again after the clear. For this reason no method skips the change if a bit is
/// already set. Even on x86, a plain load may run before a page write that is still in the store buffer. The taking thread
/// would then read the old page, and the mark would be lost.
///
/// Pages past the end do not exist: marking them has no effect and is not counted.
#[derive(Debug)]
pub struct DirtyBitmap {
    words: Box<[AtomicU64]>,
    pages: usize,
}

impl DirtyBitmap {
    /// Creates a clear bitmap for `pages` pages. Its memory is allocated when bits are set, because a peer or a file may give a
    /// large number.
    pub fn new(pages: usize) -> Self {
        const { assert!(align_of::<AtomicU64>() == align_of::<u64>()) };
        // The allocator does not write to memory that the kernel has already zeroed.
        let words = vec![0_u64; pages.div_ceil(64)].into_boxed_slice();
        let words = Box::into_raw(words) as *mut [AtomicU64];
        // SAFETY: only this function owns the box; an AtomicU64 has a u64's size, bits and, as asserted, alignment.
        let words = unsafe { Box::from_raw(words) };
        Self { words, pages }
    }

    /// Returns the number of covered pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the number of words, 64 pages each.
    pub fn words(&self) -> usize {
        self.words.len()
    }

    /// Marks `page`; returns true if it was not marked before.
    pub fn set(&self, page: usize) -> bool {
        if page >= self.pages {
            return false;
        }
        let bit = 1 << (page % 64);
        self.words[page / 64].fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Marks `pages` pages from `first` on; returns the number of pages that were not marked before.
    pub fn set_range(&self, first: usize, pages: usize) -> u64 {
        self.each_word(first, pages, |word, mask| {
            mask & !word.fetch_or(mask, Ordering::AcqRel)
        })
    }

    /// Marks every page.
    pub fn set_all(&self) {
        self.set_range(0, self.pages);
    }

    /// Clears `pages` pages from `first` on; returns the number of pages that were marked.
    pub fn clear_range(&self, first: usize, pages: usize) -> u64 {
        self.each_word(first, pages, |word, mask| {
            mask & word.fetch_and(!mask, Ordering::AcqRel)
        })
    }

    /// Returns true if `page` is marked; false past the end.
    pub fn test(&self, page: usize) -> bool {
        page < self.pages && self.words[page / 64].load(Ordering::Acquire) >> (page % 64) & 1 == 1
    }

    /// Returns the bits of the 64 pages from `64 * index` on and clears them atomically: each mark is returned to one thread
    /// only. The lowest bit is the first page. Returns 0 past the end.
    pub fn take_word(&self, index: usize) -> u64 {
        match self.words.get(index) {
            // The load before the swap keeps clear words shared between the caches of the threads; in late rounds most words
            // are clear. If the load misses a mark, the mark stays.
            Some(word) if word.load(Ordering::Relaxed) != 0 => word.swap(0, Ordering::AcqRel),
            _ => 0,
        }
    }

    /// Marks the pages whose bits are set in `from`. The lowest bit of `from[0]` is page `64 * first_word`, as in KVM's dirty
    /// log. Returns the number of pages that were not marked before.
    pub fn or_words(&self, first_word: usize, from: &[u64]) -> u64 {
        let Some(words) = self.words.get(first_word..) else {
            return 0;
        };
        let mut newly = 0;
        for (i, (word, &bits)) in words.iter().zip(from).enumerate() {
            let bits = bits & self.valid_bits(first_word + i);
            if bits != 0 {
                let added = bits & !word.fetch_or(bits, Ordering::AcqRel);
                newly += u64::from(added.count_ones());
            }
        }
        newly
    }

    /// Returns the number of marked pages. Exact only without concurrent changes.
    pub fn count(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.words.iter().map(ones).sum()
    }

    /// Returns a mask of the bits of word `index` that represent pages.
    fn valid_bits(&self, index: usize) -> u64 {
        bits(0..(self.pages - index * 64).min(64))
    }

    /// Calls `change` for each word of the range, with the mask of the range's bits in this word. Returns the number of bits
    /// that `change` returned.
    fn each_word(
        &self,
        first: usize,
        pages: usize,
        change: impl Fn(&AtomicU64, u64) -> u64,
    ) -> u64 {
        let end = first.saturating_add(pages).min(self.pages);
        let mut changed = 0;
        let mut page = first;
        while page < end {
            let word = page / 64;
            let stop = end.min((word + 1) * 64);
            let mask = bits(page - word * 64..stop - word * 64);
            changed += u64::from(change(&self.words[word], mask).count_ones());
            page = stop;
        }
        changed
    }
}

/// Returns a word with the bits of `range` set. `range` must not be empty, and must end at 64 or before.
fn bits(range: Range<usize>) -> u64 {
    (u64::MAX >> (64 - range.len())) << range.start
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_bitmap_takes_no_memory_before_it_is_written() {
        let resident = || {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages = statm.split(' ').nth(1).unwrap();
            pages.parse::<usize>().unwrap() * crate::PAGE_SIZE
        };
        let before = resident();
        // 16 TiB of RAM: 512 MiB of bits.
        let bitmap = DirtyBitmap::new(1 << 32);
        assert!(bitmap.set((1 << 32) - 1) && !bitmap.test(0));
        // Other tests run concurrently.
        assert!(resident() < before + (256 << 20));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Set(usize),
        SetRange(usize, usize),
        SetAll,
        ClearRange(usize, usize),
        TakeWord(usize),
        OrWords(usize, Vec<u64>),
    }

    fn step() -> impl Strategy<Value = Step> {
        let page = || prop_oneof![9 => 0..300_usize, 1 => Just(usize::MAX)];
        prop_oneof![
            page().prop_map(Step::Set),
            (page(), page()).prop_map(|(first, pages)| Step::SetRange(first, pages)),
            Just(Step::SetAll),
            (page(), page()).prop_map(|(first, pages)| Step::ClearRange(first, pages)),
            (0..6_usize).prop_map(Step::TakeWord),
            (0..6_usize, proptest::collection::vec(any::<u64>(), 0..6))
                .prop_map(|(word, bits)| Step::OrWords(word, bits)),
        ]
    }

    /// Sets or clears the pages of `model` for which `chosen` holds; returns the number of changed pages.
    fn change(model: &mut [bool], to: bool, chosen: impl Fn(usize) -> bool) -> u64 {
        let mut changed = 0;
        for (page, bit) in model.iter_mut().enumerate() {
            if chosen(page) && *bit != to {
                *bit = to;
                changed += 1;
            }
        }
        changed
    }

    proptest! {
        #[test]
        fn every_step_does_what_it_does_to_a_list_of_flags(
            pages in 0..260_usize,
            steps in proptest::collection::vec(step(), 0..40),
        ) {
            let bitmap = DirtyBitmap::new(pages);
            let mut model = vec![false; pages];
            for step in steps {
                match step {
                    Step::Set(page) => {
                        let newly = change(&mut model, true, |p| p == page);
                        prop_assert_eq!(u64::from(bitmap.set(page)), newly);
                    }
                    Step::SetRange(first, n) => {
                        let newly = change(&mut model, true, |p| p >= first && p - first < n);
                        prop_assert_eq!(bitmap.set_range(first, n), newly);
                    }
                    Step::SetAll => {
                        bitmap.set_all();
                        model.fill(true);
                    }
                    Step::ClearRange(first, n) => {
                        let cleared = change(&mut model, false, |p| p >= first && p - first < n);
                        prop_assert_eq!(bitmap.clear_range(first, n), cleared);
                    }
                    Step::TakeWord(word) => {
                        let before = model.clone();
                        change(&mut model, false, |p| p / 64 == word);
                        let taken = bitmap.take_word(word);
                        for bit in 0..64 {
                            let marked = before.get(word * 64 + bit).copied().unwrap_or(false);
                            prop_assert_eq!(taken >> bit & 1 == 1, marked);
                        }
                    }
                    Step::OrWords(first, words) => {
                        let newly = change(&mut model, true, |p| {
                            let word = (p / 64).checked_sub(first).and_then(|w| words.get(w));
                            word.is_some_and(|word| word >> (p % 64) & 1 == 1)
                        });
                        prop_assert_eq!(bitmap.or_words(first, &words), newly);
                    }
                }
                prop_assert_eq!(bitmap.count(), model.iter().filter(|bit| **bit).count() as u64);
                for page in 0..pages + 70 {
                    prop_assert_eq!(bitmap.test(page), model.get(page).copied().unwrap_or(false));
                }
            }
            prop_assert_eq!(bitmap.pages(), pages);
            prop_assert_eq!(bitmap.words(), pages.div_ceil(64));
        }
    }

    /// A guest writes each page once, all of them already marked, while a taker repeatedly takes the guest's current word.
    /// After one more take when the guest has stopped, every write must have been copied.
    #[test]
    fn a_page_written_after_a_take_is_marked_again() {
        const PAGES: usize = 64 * 16;
        const STOPPED: usize = usize::MAX;
        const STARTING: usize = STOPPED - 1;
        let bitmap = DirtyBitmap::new(PAGES);
        let guest: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
        let copy = [const { Cell::new(0) }; PAGES];
        let take = |word: usize| {
            let mut bits = bitmap.take_word(word);
            while bits != 0 {
                let page = word * 64 + bits.trailing_zeros() as usize;
                copy[page].set(guest[page].load(Ordering::Relaxed));
                bits &= bits - 1;
            }
        };
        for generation in 1..=400 {
            bitmap.set_all();
            let at = AtomicUsize::new(STARTING);
            thread::scope(|scope| {
                scope.spawn(|| {
                    for (page, value) in guest.iter().enumerate() {
                        at.store(page / 64, Ordering::Relaxed);
                        value.store(generation, Ordering::Relaxed);
                        bitmap.set(page);
                    }
                    at.store(STOPPED, Ordering::Release);
                });
                loop {
                    match at.load(Ordering::Acquire) {
                        STOPPED => break,
                        STARTING => thread::yield_now(),
                        word => take(word),
                    }
                }
            });
            (0..bitmap.words()).for_each(take);
            let stale = copy.iter().position(|page| page.get() != generation);
            assert_eq!(stale, None, "a page of generation {generation}");
        }
    }

    #[test]
    fn takers_share_the_marks_without_overlap() {
        let bitmap = DirtyBitmap::new(64 * 1000 + 3);
        bitmap.set_all();
        let taken: u64 = thread::scope(|scope| {
            let take = || (0..bitmap.words()).map(|w| u64::from(bitmap.take_word(w).count_ones()));
            let takers: Vec<_> = (0..3)
                .map(|_| scope.spawn(move || take().sum::<u64>()))
                .collect();
            takers.into_iter().map(|t| t.join().expect("taker")).sum()
        });
        assert_eq!(taken, 64 * 1000 + 3);
        assert_eq!(bitmap.count(), 0);
    }
}
