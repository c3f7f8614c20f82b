//! Collects the 4 KiB pages of huge pages for a QEMU in postcopy. QEMU places a huge page as a whole. It must receive the 4 KiB
//! pages of a huge page one after the other on one connection. This relay receives them in any order, over several connections.

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

/// Number of 4 KiB pages in the largest host page.
const LARGEST_HOST_PAGE: usize = LARGEST_PAGE / PAGE_SIZE;

/// Incomplete host pages.
pub(super) struct HostPages {
    /// Size of the host pages of each RAM block, in bytes.
    sizes: Vec<u64>,
    memory: MemoryLimit,
    /// Incomplete host pages by RAM block and byte offset.
    parts: Mutex<HashMap<(usize, u64), Gathered>>,
}

/// Collected pages of a host page.
pub(super) struct Gathered {
    block: usize,
    /// One bit per page, the lowest first.
    has: [u64; LARGEST_HOST_PAGE / 64],
    zero: Vec<u64>,
    normal: Vec<u64>,
    content: Vec<u8>,
    /// Memory limit, and the bytes charged to it.
    memory: (MemoryLimit, usize),
}

impl Gathered {
    /// Returns the pages of the host page. They must be written without other pages between them.
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
    /// Creates an empty collection for these RAM blocks. Collected pages are charged to `memory`.
    pub(super) fn new(blocks: &[RamBlockEntry], memory: &MemoryLimit) -> Self {
        Self {
            sizes: blocks.iter().map(|block| block.page_size).collect(),
            memory: memory.clone(),
            parts: Mutex::default(),
        }
    }

    /// Returns true if pages of this RAM block must be collected.
    pub(super) fn are_huge(&self, block: usize) -> bool {
        self.sizes[block] > PAGE_SIZE as u64
    }

    /// Adds a page. Returns its host page if that is complete now, else `None`.
    ///
    /// # Errors
    /// - [`MigrationError::Protocol`] if the page has already arrived.
    /// - [`MigrationError::MemoryLimit`] if the memory limit is reached.
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
            return Err(unexpected("a page that arrived before"));
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
            has: [0; LARGEST_HOST_PAGE / 64],
            zero: Vec::new(),
            normal: Vec::new(),
            content: Vec::with_capacity(bytes),
            memory: (self.memory.clone(), bytes),
        })
    }

    /// Checks that no host page is incomplete. Called after the last page.
    ///
    /// # Errors
    /// [`MigrationError::Protocol`] if a host page is incomplete.
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

    /// Returns a block of ordinary pages, and one of two huge pages, with memory for `memory` huge pages.
    fn two_blocks(memory: usize) -> HostPages {
        let mut huge = RamBlockEntry::new("huge", 2 * LARGEST_PAGE as u64);
        huge.page_size = LARGEST_PAGE as u64;
        let memory = MemoryLimit::new(memory * LARGEST_HOST_PAGE * PAGE_SIZE);
        HostPages::new(
            &[RamBlockEntry::new("small", LARGEST_PAGE as u64), huge],
            &memory,
        )
    }

    fn offset(page: usize) -> u64 {
        (page * PAGE_SIZE) as u64
    }

    #[test]
    fn a_host_page_is_assembled_from_pages_in_any_order() {
        let host_pages = two_blocks(2);
        assert!(!host_pages.are_huge(0) && host_pages.are_huge(1));
        let content = |page: usize| {
            (!page.is_multiple_of(3)).then(|| [u8::try_from(page % 251).unwrap(); PAGE_SIZE])
        };
        let mut whole = Vec::new();
        // In reverse order, alternating between the two.
        for page in (0..LARGEST_HOST_PAGE)
            .rev()
            .flat_map(|page| [page, LARGEST_HOST_PAGE + page])
        {
            let added = host_pages
                .add(1, offset(page), content(page).as_ref())
                .unwrap();
            whole.extend(added);
            let left = host_pages.are_whole();
            assert_eq!(left.is_ok(), page == LARGEST_HOST_PAGE, "{page}");
        }
        let firsts = [0, LARGEST_HOST_PAGE];
        assert_eq!(whole.len(), firsts.len());
        for (gathered, first) in whole.iter().zip(firsts) {
            let PageRecords {
                block,
                zero,
                normal,
                content: bytes,
            } = gathered.pages();
            assert_eq!((block, zero.len() + normal.len()), (1, LARGEST_HOST_PAGE));
            let mut pages: Vec<_> = zero.iter().chain(normal).copied().collect();
            pages.sort_unstable();
            assert!(
                pages
                    .into_iter()
                    .eq((first..first + LARGEST_HOST_PAGE).map(offset))
            );
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
    fn duplicate_missing_and_surplus_pages_are_errors() {
        let host_pages = two_blocks(1);
        host_pages.add(1, offset(5), None).unwrap();
        assert!(host_pages.add(1, offset(5), None).is_err());
        let over = host_pages.add(1, offset(LARGEST_HOST_PAGE), None);
        assert!(matches!(over, Err(MigrationError::MemoryLimit { .. })));
        assert!(host_pages.are_whole().is_err());
    }
}
