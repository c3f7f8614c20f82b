//! Which pages have to be sent: one bit a page, shared by all threads of a side.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// One bit for each page of a RAM block (QEMU's `RAMBlock::bmap`), all clear at first.
///
/// A taker clears bits *before* it reads their pages, a marker sets a page's bit *after* it wrote
/// the page. All changes are read-modify-write operations with acquire and release on one word, so
/// either the taker sees the write, or the bit that follows the write survives the taker. This is why
/// no method skips the write when a bit is set already: on x86, too, a plain load may pass the
/// page write that waits in the store buffer, and the taker would read the old page under a
/// consumed bit.
///
/// Pages past the end do not exist: setting them changes nothing and counts nothing.
#[derive(Debug)]
pub struct DirtyBitmap {
    words: Box<[AtomicU64]>,
    pages: usize,
}

impl DirtyBitmap {
    /// A clear bitmap for `pages` pages.
    pub fn new(pages: usize) -> Self {
        let words = (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { words, pages }
    }

    /// Pages that the bitmap covers.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Words that the bitmap covers them with, 64 pages each.
    pub fn words(&self) -> usize {
        self.words.len()
    }

    /// Marks `page`; true if it was clear.
    pub fn set(&self, page: usize) -> bool {
        if page >= self.pages {
            return false;
        }
        let bit = 1 << (page % 64);
        self.words[page / 64].fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Marks `pages` pages from `first` on; returns how many were clear.
    pub fn set_range(&self, first: usize, pages: usize) -> u64 {
        self.each_word(first, pages, |word, mask| {
            mask & !word.fetch_or(mask, Ordering::AcqRel)
        })
    }

    /// Marks every page.
    pub fn set_all(&self) {
        self.set_range(0, self.pages);
    }

    /// Clears `pages` pages from `first` on; returns how many were marked.
    pub fn clear_range(&self, first: usize, pages: usize) -> u64 {
        self.each_word(first, pages, |word, mask| {
            mask & word.fetch_and(!mask, Ordering::AcqRel)
        })
    }

    /// True if `page` is marked.
    pub fn test(&self, page: usize) -> bool {
        page < self.pages && self.words[page / 64].load(Ordering::Acquire) >> (page % 64) & 1 == 1
    }

    /// Takes the 64 pages from `64 * index` on: returns their bits (the lowest is the first page) and
    /// clears them in the same step, so that each mark has one taker. Zero past the end.
    pub fn take_word(&self, index: usize) -> u64 {
        match self.words.get(index) {
            // A look before the swap keeps clear words (most, in late rounds) shared between the
            // caches of the takers. It consumes nothing, so it may miss a mark, which then stays.
            Some(word) if word.load(Ordering::Relaxed) != 0 => word.swap(0, Ordering::AcqRel),
            _ => 0,
        }
    }

    /// Marks the pages whose bits are set in `from`, the lowest bit of `from[0]` being page
    /// `64 * first_word` (the layout of KVM's dirty log); returns how many were clear.
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

    /// Pages that are marked. Exact only while nobody marks or takes.
    pub fn count(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.words.iter().map(ones).sum()
    }

    /// Bits of word `index` that stand for pages.
    fn valid_bits(&self, index: usize) -> u64 {
        bits(0..(self.pages - index * 64).min(64))
    }

    /// Applies `change` to each word of the range with the mask of its bits, and counts the bits
    /// that it returns.
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

/// The bits of `range`, which is not empty and ends at 64 or before.
fn bits(range: Range<usize>) -> u64 {
    (u64::MAX >> (64 - range.len())) << range.start
}
