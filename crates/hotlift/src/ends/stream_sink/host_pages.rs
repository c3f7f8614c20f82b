//! Pages of a VM whose host has it in huge pages, for a QEMU in postcopy: it places a host page whole, and takes its pages one
//! behind the other on one connection. They come here in any order, over several.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::MemoryLimit;
use hotlift_wire::RamBlockEntry;

use crate::error::{Channel, MigrationError};
use crate::lock::lock;
use crate::postcopy::LARGEST_PAGE;
use crate::stream::main_send::PageRecords;

/// Pages of the largest host page.
const MOST: usize = LARGEST_PAGE / PAGE_SIZE;

/// Host pages that are not whole.
pub(super) struct HostPages {
    /// Bytes of the host pages of each RAM block.
    sizes: Vec<u64>,
    memory: MemoryLimit,
    /// By RAM block and byte offset.
    parts: Mutex<HashMap<(usize, u64), Gathered>>,
}

/// What has come of a host page.
pub(super) struct Gathered {
    block: usize,
    /// A bit a page, the lowest first.
    has: [u64; MOST / 64],
    zero: Vec<u64>,
    normal: Vec<u64>,
    content: Vec<u8>,
    /// What was taken of it, in bytes.
    memory: (MemoryLimit, usize),
}

impl Gathered {
    /// Its pages, to be written without any other between them.
    pub(super) fn pages(&self) -> PageRecords<'_> {
        PageRecords {
            block: self.block,
            zero: &self.zero,
            normal: &self.normal,
            content: &self.content,
        }
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        let (memory, bytes) = &self.memory;
        memory.give_back(*bytes);
    }
}

impl HostPages {
    /// Of a VM with these RAM blocks. What is gathered takes its memory from `memory`.
    pub(super) fn new(blocks: &[RamBlockEntry], memory: &MemoryLimit) -> Self {
        Self {
            sizes: blocks.iter().map(|block| block.page_size).collect(),
            memory: memory.clone(),
            parts: Mutex::default(),
        }
    }

    /// Whether pages of this RAM block have to be gathered.
    pub(super) fn are_huge(&self, block: usize) -> bool {
        self.sizes[block] > PAGE_SIZE as u64
    }

    /// Takes in a page; its host page, if that is whole now.
    ///
    /// # Errors
    /// If the page has come before, or if there is no memory for it.
    pub(super) fn add(
        &self,
        block: usize,
        offset: u64,
        content: Option<&[u8; PAGE_SIZE]>,
    ) -> Result<Option<Gathered>, MigrationError> {
        let size = self.sizes[block];
        let start = offset / size * size;
        let mut parts = lock(&self.parts);
        let mut part = match parts.entry((block, start)) {
            Entry::Occupied(part) => part,
            Entry::Vacant(none) => none.insert_entry(self.begin(block)?),
        };
        let gathered = part.get_mut();
        let page = usize::try_from(offset - start).unwrap_or(usize::MAX) / PAGE_SIZE;
        let bit = 1 << (page % 64);
        if gathered.has[page / 64] & bit != 0 {
            return Err(unexpected("a page that has come before"));
        }
        gathered.has[page / 64] |= bit;
        match content {
            None => gathered.zero.push(offset),
            Some(content) => {
                gathered.normal.push(offset);
                gathered.content.extend_from_slice(content);
            }
        }
        let pages = (gathered.zero.len() + gathered.normal.len()) as u64;
        Ok((pages * PAGE_SIZE as u64 == size).then(|| part.remove()))
    }

    fn begin(&self, block: usize) -> Result<Gathered, MigrationError> {
        let bytes = usize::try_from(self.sizes[block]).unwrap_or(usize::MAX);
        let taken = self.memory.take(bytes);
        taken.map_err(|source| MigrationError::memory(Channel::Main, source))?;
        Ok(Gathered {
            block,
            has: [0; MOST / 64],
            zero: Vec::new(),
            normal: Vec::new(),
            content: Vec::with_capacity(bytes),
            memory: (self.memory.clone(), bytes),
        })
    }

    /// Whether all are whole, as they are behind the last page.
    ///
    /// # Errors
    /// If one is not.
    pub(super) fn are_whole(&self) -> Result<(), MigrationError> {
        match lock(&self.parts).is_empty() {
            true => Ok(()),
            false => Err(unexpected("the end, with a part of a huge page missing")),
        }
    }
}

fn unexpected(what: &str) -> MigrationError {
    MigrationError::Protocol {
        channel: Channel::Main,
        got: what.to_owned(),
        doing: "gathering huge pages in postcopy",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block of ordinary pages, and one of two huge ones; `memory` for so many.
    fn two_blocks(memory: usize) -> HostPages {
        let mut huge = RamBlockEntry::new("huge", 2 * LARGEST_PAGE as u64);
        huge.page_size = LARGEST_PAGE as u64;
        let memory = MemoryLimit::new(memory * MOST * PAGE_SIZE);
        HostPages::new(
            &[RamBlockEntry::new("small", LARGEST_PAGE as u64), huge],
            &memory,
        )
    }

    fn offset(page: usize) -> u64 {
        (page * PAGE_SIZE) as u64
    }

    #[test]
    fn a_host_page_comes_out_whole_however_its_pages_come() {
        let host_pages = two_blocks(2);
        assert!(!host_pages.are_huge(0) && host_pages.are_huge(1));
        let content = |page: usize| {
            (!page.is_multiple_of(3)).then(|| [u8::try_from(page % 251).unwrap(); PAGE_SIZE])
        };
        let mut whole = Vec::new();
        // From behind, and both in turn.
        for page in (0..MOST).rev().flat_map(|page| [page, MOST + page]) {
            let added = host_pages
                .add(1, offset(page), content(page).as_ref())
                .unwrap();
            whole.extend(added);
            let left = host_pages.are_whole();
            assert_eq!(left.is_ok(), page == MOST, "{page}");
        }
        let firsts = [0, MOST];
        assert_eq!(whole.len(), firsts.len());
        for (gathered, first) in whole.iter().zip(firsts) {
            let PageRecords {
                block,
                zero,
                normal,
                content: bytes,
            } = gathered.pages();
            assert_eq!((block, zero.len() + normal.len()), (1, MOST));
            let mut pages: Vec<_> = zero.iter().chain(normal).copied().collect();
            pages.sort_unstable();
            assert!(pages.into_iter().eq((first..first + MOST).map(offset)));
            for (at, page) in normal.iter().zip(bytes.chunks(PAGE_SIZE)) {
                let number = usize::try_from(*at).unwrap() / PAGE_SIZE;
                assert_eq!(
                    Some(page),
                    content(number).as_ref().map(<[u8; PAGE_SIZE]>::as_slice)
                );
            }
        }
        drop(whole);
        assert_eq!(host_pages.memory.used(), 0);
    }

    #[test]
    fn a_page_that_comes_twice_or_never_and_one_too_many_are_errors() {
        let host_pages = two_blocks(1);
        host_pages.add(1, offset(5), None).unwrap();
        assert!(host_pages.add(1, offset(5), None).is_err());
        let over = host_pages.add(1, offset(MOST), None);
        assert!(matches!(over, Err(MigrationError::MemoryLimit { .. })));
        assert!(host_pages.are_whole().is_err());
    }
}
