//! RAM blocks on the wire: a name, and a length that bounds page offsets.

use crate::WireError;
use crate::reader::as_u64;

/// One entry of the RAM block list in the START section of `ram`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBlockEntry {
    /// QEMU's `idstr` of the block, 1 to 255 bytes, unique in the list.
    pub name: String,
    /// Length in bytes (`used_length`), a positive multiple of the page size.
    pub used_length: u64,
    /// Size in bytes of the host's pages for the block, a power of two: postcopy places only whole host pages. More than
    /// [`PAGE_SIZE`](crate::PAGE_SIZE) only in a stream that announces postcopy.
    pub page_size: u64,
    /// Guest physical address, only in streams with capability `x-ignore-shared`.
    pub guest_address: Option<u64>,
}

impl RamBlockEntry {
    /// Creates an entry of an ordinary stream (without `x-ignore-shared`).
    pub fn new(name: impl Into<String>, used_length: u64) -> Self {
        Self {
            name: name.into(),
            used_length,
            page_size: as_u64(crate::PAGE_SIZE),
            guest_address: None,
        }
    }

    /// Checks that `offset` is a multiple of `page_size` (a power of two) and that the whole page lies in the block. QEMU
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

    /// Does the same as [`RamBlockEntry::check_page`] for a packet's pages.
    pub(crate) fn check_pages(&self, offsets: &[u64], page_size: usize) -> Result<(), WireError> {
        let page_size = as_u64(page_size);
        let is_page = |offset: u64| {
            let end = offset.checked_add(page_size);
            offset.is_multiple_of(page_size) && end.is_some_and(|end| end <= self.used_length)
        };
        // All offsets are aligned if their OR is, and end in the block if the highest does: one test for each packet, and the
        // loops vectorise.
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

/// Returns the index of the block called `name`. `hint` is tried first: consecutive pages are nearly always in one block.
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
