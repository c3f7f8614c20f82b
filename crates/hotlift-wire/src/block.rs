//! A RAM block in the stream: its name, and its length, which limits page offsets.

use crate::WireError;
use crate::reader::as_u64;

/// An entry of the RAM block list in the START section of `ram`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBlockEntry {
    /// Name of the block (QEMU's `idstr`), 1 to 255 bytes, unique in the list.
    pub name: String,
    /// Length in bytes (`used_length`), a positive multiple of the page size.
    pub used_length: u64,
    /// Size in bytes of the host's pages that back the block, a power of two. Postcopy places only whole host pages. More than
    /// [`PAGE_SIZE`](crate::PAGE_SIZE) only in a stream that announces postcopy.
    pub page_size: u64,
    /// Guest physical address; `Some` only in streams with capability `x-ignore-shared`.
    pub guest_address: Option<u64>,
}

impl RamBlockEntry {
    /// Creates an entry for a stream without `x-ignore-shared`, with pages of 4 KiB.
    pub fn new(name: impl Into<String>, used_length: u64) -> Self {
        Self {
            name: name.into(),
            used_length,
            page_size: as_u64(crate::PAGE_SIZE),
            guest_address: None,
        }
    }

    /// Checks that `offset` is a multiple of `page_size` (a power of two), and that the whole page is inside the block. QEMU
    /// checks only the first byte of a page.
    pub(crate) fn check_page(&self, offset: u64, page_size: usize) -> Result<(), WireError> {
        self.check_pages(&[offset], page_size)
    }

    /// Checks that `length` bytes from `start` are whole pages of the block.
    pub(crate) fn check_range(&self, start: u64, length: u64) -> Result<(), WireError> {
        let end = start.checked_add(length);
        let pages = (start | length).is_multiple_of(as_u64(crate::PAGE_SIZE));
        if pages && end.is_some_and(|end| end <= self.used_length) {
            return Ok(());
        }
        Err(WireError::BadRange {
            block: self.name.clone(),
            start,
            length,
            block_length: self.used_length,
        })
    }

    /// Checks several pages as [`RamBlockEntry::check_page`] does.
    pub(crate) fn check_pages(&self, offsets: &[u64], page_size: usize) -> Result<(), WireError> {
        let page_size = as_u64(page_size);
        let is_page = |offset: u64| {
            let end = offset.checked_add(page_size);
            offset.is_multiple_of(page_size) && end.is_some_and(|end| end <= self.used_length)
        };
        // All offsets are aligned if their bitwise OR is, and all pages are inside the block if the highest one is. So each
        // packet needs only one test, and the compiler can vectorise the loops.
        let bits = offsets.iter().fold(0, |bits, offset| bits | offset);
        let highest = offsets
            .iter()
            .fold(0, |highest: u64, &offset| highest.max(offset));
        if bits.is_multiple_of(page_size) && is_page(highest) {
            return Ok(());
        }
        match offsets.iter().find(|&&offset| !is_page(offset)) {
            None => Ok(()),
            Some(&offset) => Err(WireError::BadPageOffset {
                block: self.name.clone(),
                offset,
                block_length: self.used_length,
            }),
        }
    }
}

/// Returns the index of the block with this `name`. Tries the index `hint` first, because consecutive pages are nearly always
/// in one block.
pub(crate) fn find(blocks: &[RamBlockEntry], name: &[u8], hint: usize) -> Result<usize, WireError> {
    let is_named = |block: &RamBlockEntry| block.name.as_bytes() == name;
    if blocks.get(hint).is_some_and(is_named) {
        return Ok(hint);
    }
    blocks
        .iter()
        .position(is_named)
        .ok_or_else(|| WireError::UnknownBlock {
            block: String::from_utf8_lossy(name).into_owned(),
        })
}
