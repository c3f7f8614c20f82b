//! Layout of a built-in guest's RAM, and the record of each write.
//!
//! ```text
//! 0          program, its page tables, its vCPUs' blocks   (the kvm guest; else never touched)
//! 2 MiB      table: the record that each page must carry, 16 bytes a page of the working set
//! base       working set (on the next 2 MiB border)
//!            the rest of RAM: filled, never written again
//! end
//! ```
//!
//! Page p of the working set belongs to vCPU `p % vcpus` alone, so that no two vCPUs ever write the same page.
//! `guest/hotlift.s` defines the same layout.

use std::ops::Range;

use hotlift_mem::PAGE_SIZE;

use crate::bytes::to_usize;

/// Name of the only RAM block; QEMU uses the same name for a PC's RAM.
pub const RAM_BLOCK: &str = "pc.ram";

/// Maximum number of vCPUs of a built-in guest: the guest program has this number of blocks.
pub const MAX_VCPUS: u8 = 8;

/// Minimum RAM, in bytes: the program, the table, and a few MiB for the working set.
pub const MIN_RAM: u64 = 8 << 20;

/// Maximum RAM, in bytes: the guest program's page tables map no more.
pub const MAX_RAM: u64 = 64 << 30;

/// Offset of the record table in RAM, in bytes.
pub const TABLE: u64 = MIB2;

/// Length of a write record in bytes, in the table and in a page.
pub const RECORD_LEN: u64 = 16;

const MIB2: u64 = 2 << 20;
const PAGE: u64 = PAGE_SIZE as u64;

/// The sizes of RAM and working set do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// RAM is too small, too large, or not a multiple of the page size.
    #[error("RAM of {got} bytes, must be whole pages between {MIN_RAM} and {MAX_RAM} bytes")]
    Ram {
        /// Requested RAM, in bytes.
        got: u64,
    },
    /// The guest has no vCPU, or more than [`MAX_VCPUS`].
    #[error("{got} vCPUs, must be between 1 and {MAX_VCPUS}")]
    Vcpus {
        /// Requested number of vCPUs.
        got: u8,
    },
    /// The working set has less than one page per vCPU, or does not fit into RAM.
    #[error("working set of {got} bytes, must be between {min} and {max} bytes")]
    WorkingSet {
        /// Requested size, in bytes.
        got: u64,
        /// Minimum size, in bytes.
        min: u64,
        /// Maximum size, in bytes.
        max: u64,
    },
}

/// Layout of one guest's RAM. Offsets count bytes from the start of the RAM block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    ram_bytes: u64,
    vcpus: u8,
    pages: u64,
    base: u64,
}

impl Layout {
    /// Computes the layout of `ram_bytes` of RAM for `vcpus` vCPUs. `working_set` is in bytes and rounded down to
    /// pages; `None` is all available RAM.
    ///
    /// # Errors
    /// [`LayoutError`] if an argument is out of its range.
    pub fn new(ram_bytes: u64, vcpus: u8, working_set: Option<u64>) -> Result<Self, LayoutError> {
        if !(MIN_RAM..=MAX_RAM).contains(&ram_bytes) || !ram_bytes.is_multiple_of(PAGE) {
            return Err(LayoutError::Ram { got: ram_bytes });
        }
        if vcpus == 0 || vcpus > MAX_VCPUS {
            return Err(LayoutError::Vcpus { got: vcpus });
        }
        // Bytes for rounding the table up to 2 MiB are reserved first. The rest is divided.
        let max = (ram_bytes - TABLE - MIB2) / (PAGE + RECORD_LEN) * PAGE;
        let min = u64::from(vcpus) * PAGE;
        let got = working_set.unwrap_or(max);
        if !(min..=max).contains(&got) {
            return Err(LayoutError::WorkingSet { got, min, max });
        }
        let pages = got / PAGE;
        let base = (TABLE + pages * RECORD_LEN).next_multiple_of(MIB2);
        Ok(Self {
            ram_bytes,
            vcpus,
            pages,
            base,
        })
    }

    /// Returns the size of RAM, in bytes.
    pub fn ram_bytes(&self) -> u64 {
        self.ram_bytes
    }

    /// Returns the number of vCPUs.
    pub fn vcpus(&self) -> u8 {
        self.vcpus
    }

    /// Returns the number of pages in the working set.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the size of the working set, in bytes.
    pub fn working_set(&self) -> u64 {
        self.pages * PAGE
    }

    /// Returns the number of working set pages that each vCPU owns. The number is equal for all vCPUs, so up to `vcpus
    /// - 1` pages at the end have no owner.
    pub fn owned(&self) -> u64 {
        self.pages / u64::from(self.vcpus)
    }

    /// Returns the range of RAM that is filled before the start: the working set and all bytes after it.
    pub fn filled(&self) -> Range<u64> {
        self.base..self.ram_bytes
    }

    /// Returns the range of the record table, including the unused bytes before the working set.
    pub fn table(&self) -> Range<u64> {
        TABLE..self.base
    }

    /// Returns the offset of the table entry for page `page` of the working set.
    pub fn entry(&self, page: u64) -> u64 {
        TABLE + page * RECORD_LEN
    }

    /// Returns the offset of the write record in page `page` of the working set.
    pub fn record(&self, page: u64) -> u64 {
        self.base + page * PAGE + slot(page)
    }

    /// Returns the range of the write record within page `index` of the filled range; `None` after the working set.
    pub fn record_in_page(&self, index: u64) -> Option<Range<usize>> {
        (index < self.pages).then(|| {
            let start = to_usize(slot(index));
            start..start + to_usize(RECORD_LEN)
        })
    }

    /// Returns the number of pages in the filled range.
    pub fn filled_pages(&self) -> u64 {
        (self.ram_bytes - self.base) / PAGE
    }
}

/// Returns the offset of the write record within page `page`. There are 64 possible offsets, so that records do not
/// share a cache set and are not always at the start of a page.
fn slot(page: u64) -> u64 {
    (page & 63) * 64
}

/// Write record: each write stores it in the written page and in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Record {
    /// Number of writes to the page so far.
    pub version: u64,
    /// vCPU << 56 | number of the last write among all writes of this vCPU, from 1; 0 if the page was never written.
    pub sequence: u64,
}

impl Record {
    /// Returns the record after write number `number` of `vcpu`, on a page with the record `self`.
    pub fn next(self, vcpu: u8, number: u64) -> Self {
        Self {
            version: self.version.wrapping_add(1),
            sequence: u64::from(vcpu) << 56 | number,
        }
    }

    /// Returns the record as bytes in memory.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    /// Decodes the first 16 bytes of `bytes`, which must not be shorter.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let half = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(eight)
        };
        Self {
            version: half(0),
            sequence: half(8),
        }
    }
}

/// Returns the RAM offset of page `index` of the filled range.
pub(crate) fn filled_offset(layout: &Layout, index: u64) -> usize {
    to_usize(layout.filled().start) + to_usize(index) * PAGE_SIZE
}
