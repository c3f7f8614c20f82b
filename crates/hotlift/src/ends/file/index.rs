//! The index of a save file in memory: one 64-bit entry per page, with the page's position. Entries are grouped in chunks,
//! which are allocated on first use. `block_sink` writes the index to the file.
//!
//! A chunk has 4 KiB and covers 2 MiB of RAM. It is read on first use, so a file opens at once for every size of VM. A source
//! that claims a large RAM causes no allocation before it sends pages.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::RamBlockEntry;

use super::layout::Entry;

/// Number of entries in a chunk.
pub(crate) const WORDS: usize = 512;

/// Bytes of a chunk in the file.
pub(crate) const CHUNK_LEN: usize = WORDS * 8;

/// Number of chunks in a group. A group covers 1 GiB of RAM; its table takes 12 KiB. The table is allocated with the group's
/// first chunk, because the size of RAM that a file or source states may be false.
const GROUP: usize = 512;

type Chunk = Box<[AtomicU64]>;

type Group = Box<[OnceLock<Chunk>]>;

/// Index of a save file: the entries of all pages.
pub(crate) struct Index {
    groups: Vec<OnceLock<Group>>,
    chunks: usize,
    /// First chunk and number of pages of each RAM block.
    blocks: Vec<(usize, usize)>,
}

impl Index {
    /// Creates an empty index of the pages of these RAM blocks.
    pub(crate) fn new(blocks: &[RamBlockEntry]) -> Self {
        let mut chunks = 0;
        let blocks = blocks.iter().map(|block| {
            let pages = usize::try_from(block.used_length).unwrap_or(usize::MAX) / PAGE_SIZE;
            let first = chunks;
            chunks += pages.div_ceil(WORDS);
            (first, pages)
        });
        let blocks = blocks.collect();
        let mut groups = Vec::new();
        groups.resize_with(chunks.div_ceil(GROUP), OnceLock::new);
        Self {
            groups,
            chunks,
            blocks,
        }
    }

    fn chunk(&self, chunk: usize) -> Option<&Chunk> {
        self.groups[chunk / GROUP].get()?[chunk % GROUP].get()
    }

    fn place_of(&self, chunk: usize) -> &OnceLock<Chunk> {
        let new = || (0..GROUP).map(|_| OnceLock::new()).collect();
        &self.groups[chunk / GROUP].get_or_init(new)[chunk % GROUP]
    }

    /// Returns the number of chunks for these RAM blocks.
    pub(crate) fn chunks_of(blocks: &[RamBlockEntry]) -> u64 {
        let each = blocks.iter().map(|block| block.used_length);
        each.map(|bytes| bytes.div_ceil((WORDS * PAGE_SIZE) as u64))
            .sum()
    }

    pub(crate) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Returns the number of RAM blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the number of pages of a RAM block.
    pub(crate) fn pages(&self, block: usize) -> usize {
        self.blocks[block].1
    }

    /// Returns the chunk of a page and its entry there, or `None` if the page does not exist.
    pub(crate) fn place(&self, block: usize, page: usize) -> Option<(usize, usize)> {
        let (first, pages) = *self.blocks.get(block)?;
        (page < pages).then_some((first + page / WORDS, page % WORDS))
    }

    /// Returns true if a chunk's entries are in memory.
    pub(crate) fn has(&self, chunk: usize) -> bool {
        self.chunk(chunk).is_some()
    }

    /// Sets the entries of a chunk from its bytes in the file. A chunk of zeros takes no memory.
    pub(crate) fn fill(&self, chunk: usize, bytes: &[u8; CHUNK_LEN]) {
        if *bytes == [0; CHUNK_LEN] {
            let _ = self.place_of(chunk).set(Chunk::default());
            return;
        }
        let words = bytes.as_chunks::<8>().0.iter();
        let words = words.map(|word| AtomicU64::new(u64::from_be_bytes(*word)));
        let _ = self.place_of(chunk).set(words.collect());
    }

    /// Returns the bytes of a chunk for the file, or `None` if no entry of the chunk was ever set.
    pub(crate) fn bytes(&self, chunk: usize) -> Option<[u8; CHUNK_LEN]> {
        let words = self.chunk(chunk)?;
        let mut bytes = [0; CHUNK_LEN];
        for (into, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *into = word.load(Ordering::Relaxed).to_be_bytes();
        }
        Some(bytes)
    }

    /// Returns the entry of a page, or `None` for a zero page.
    pub(crate) fn get(&self, (chunk, word): (usize, usize)) -> Option<Entry> {
        let word = self.chunk(chunk)?.get(word)?;
        Entry::decode(word.load(Ordering::Relaxed))
    }

    /// Sets the entry of a page, and returns the previous entry. `None` is a zero page in both.
    pub(crate) fn set(&self, (chunk, word): (usize, usize), entry: Option<Entry>) -> Option<Entry> {
        if entry.is_none() && self.chunk(chunk).is_none() {
            return None;
        }
        let new = || (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let words = self.place_of(chunk).get_or_init(new);
        let entry = entry.map_or(0, Entry::encode);
        Entry::decode(words[word].swap(entry, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_an_index_follows_the_pages_read_not_the_ram_of_the_file() {
        let index = Index::new(&[RamBlockEntry::new("pc.ram", 16 << 40)]);
        let made = |index: &Index| {
            let made = index.groups.iter().filter(|group| group.get().is_some());
            made.count()
        };
        let last = index.place(0, (1 << 32) - 1).unwrap();
        assert_eq!(last.0 + 1, index.chunks());
        assert!(!index.has(last.0) && index.get(last).is_none() && index.bytes(last.0).is_none());
        assert_eq!(made(&index), 0);
        index.fill(last.0, &[0; CHUNK_LEN]);
        assert!(index.has(last.0) && !index.has(0) && index.get(last).is_none());
        assert_eq!(made(&index), 1);
        assert!(index.groups.len() * size_of::<OnceLock<Group>>() <= 1 << 20);
    }
}
