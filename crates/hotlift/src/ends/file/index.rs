//! Where each page of a save file is, in memory (`block_sink` writes it): a word a page, in chunks that take memory when they
//! are first needed.
//!
//! A chunk is 4 KiB and stands for 2 MiB of RAM. So a file is open at once, whatever the size of its VM, and a source that
//! says it has much RAM does not take memory for it before it sends the pages.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::RamBlockEntry;

use super::layout::Entry;

/// Words of a chunk.
pub(crate) const WORDS: usize = 512;

/// Bytes of a chunk in the file.
pub(crate) const CHUNK_LEN: usize = WORDS * 8;

/// Chunks of a group, which is made when the first of them is: 1 GiB of RAM, 12 KiB. How many there are, a file says.
const GROUP: usize = 512;

type Chunk = Box<[AtomicU64]>;

type Group = Box<[OnceLock<Chunk>]>;

/// The words of all pages.
pub(crate) struct Index {
    groups: Vec<OnceLock<Group>>,
    chunks: usize,
    /// For each RAM block its first chunk, and its pages.
    blocks: Vec<(usize, usize)>,
}

impl Index {
    /// Of the pages of these RAM blocks; nothing is in it yet.
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

    /// Chunks of the index of these RAM blocks.
    pub(crate) fn chunks_of(blocks: &[RamBlockEntry]) -> u64 {
        let each = blocks.iter().map(|block| block.used_length);
        each.map(|bytes| bytes.div_ceil((WORDS * PAGE_SIZE) as u64))
            .sum()
    }

    pub(crate) fn chunks(&self) -> usize {
        self.chunks
    }

    /// RAM blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Pages of a RAM block.
    pub(crate) fn pages(&self, block: usize) -> usize {
        self.blocks[block].1
    }

    /// The chunk that a page is in, and its word there; `None` if there is no such page.
    pub(crate) fn place(&self, block: usize, page: usize) -> Option<(usize, usize)> {
        let (first, pages) = *self.blocks.get(block)?;
        (page < pages).then_some((first + page / WORDS, page % WORDS))
    }

    /// Whether a chunk has its words.
    pub(crate) fn has(&self, chunk: usize) -> bool {
        self.chunk(chunk).is_some()
    }

    /// Gives a chunk its words, as they are in the file; one of zeros takes no memory.
    pub(crate) fn fill(&self, chunk: usize, bytes: &[u8; CHUNK_LEN]) {
        if *bytes == [0; CHUNK_LEN] {
            let _ = self.place_of(chunk).set(Chunk::default());
            return;
        }
        let words = bytes.as_chunks::<8>().0.iter();
        let words = words.map(|word| AtomicU64::new(u64::from_be_bytes(*word)));
        let _ = self.place_of(chunk).set(words.collect());
    }

    /// The words of a chunk, as they are in the file; `None` if all are 0.
    pub(crate) fn bytes(&self, chunk: usize) -> Option<[u8; CHUNK_LEN]> {
        let words = self.chunk(chunk)?;
        let mut bytes = [0; CHUNK_LEN];
        for (into, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *into = word.load(Ordering::Relaxed).to_be_bytes();
        }
        Some(bytes)
    }

    /// What is known of a page at that place; `None`: it is zero.
    pub(crate) fn get(&self, (chunk, word): (usize, usize)) -> Option<Entry> {
        let word = self.chunk(chunk)?.get(word)?;
        Entry::decode(word.load(Ordering::Relaxed))
    }

    /// A page is there from now on, or is zero; what it was before.
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
    fn the_memory_of_an_index_is_that_of_the_pages_that_are_read_and_not_of_the_ram_that_a_file_has()
     {
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
