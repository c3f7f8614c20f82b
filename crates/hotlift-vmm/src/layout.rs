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

/// Name of the only RAM block (QEMU's name for a PC's RAM).
pub const RAM_BLOCK: &str = "pc.ram";

/// Maximum vCPUs of a built-in guest: the guest program has this many blocks.
pub const MAX_VCPUS: u8 = 8;

/// Minimum RAM, in bytes: the program, the table, and a few MiB to write to.
pub const MIN_RAM: u64 = 8 << 20;

/// Maximum RAM, in bytes: the range of the guest program's page tables.
pub const MAX_RAM: u64 = 64 << 30;

/// Offset of the table.
pub const TABLE: u64 = MIB2;

/// Bytes of a record, in the table and in a page.
pub const RECORD_LEN: u64 = 16;

const MIB2: u64 = 2 << 20;
const PAGE: u64 = PAGE_SIZE as u64;

/// RAM and working set are inconsistent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// RAM too small, too large, or not whole pages.
    #[error("RAM of {got} bytes, must be whole pages between {MIN_RAM} and {MAX_RAM} bytes")]
    Ram {
        /// Requested bytes.
        got: u64,
    },
    /// No vCPU, or more than [`MAX_VCPUS`].
    #[error("{got} vCPUs, must be between 1 and {MAX_VCPUS}")]
    Vcpus {
        /// Requested number.
        got: u8,
    },
    /// The working set has less than a page per vCPU, or exceeds the room in RAM.
    #[error("working set of {got} bytes, must be between {min} and {max} bytes")]
    WorkingSet {
        /// Requested bytes.
        got: u64,
        /// Minimum bytes.
        min: u64,
        /// Maximum bytes.
        max: u64,
    },
}

/// Layout of one guest's RAM. Offsets are bytes from the start of the RAM block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    ram_bytes: u64,
    vcpus: u8,
    pages: u64,
    base: u64,
}

impl Layout {
    /// Lays out `ram_bytes` of RAM for `vcpus` vCPUs that write to `working_set` bytes (rounded down to pages), or to all
    /// available RAM.
    ///
    /// # Errors
    /// [`LayoutError`] if a number is out of its range.
    pub fn new(ram_bytes: u64, vcpus: u8, working_set: Option<u64>) -> Result<Self, LayoutError> {
        if !(MIN_RAM..=MAX_RAM).contains(&ram_bytes) || !ram_bytes.is_multiple_of(PAGE) {
            return Err(LayoutError::Ram { got: ram_bytes });
        }
        if vcpus == 0 || vcpus > MAX_VCPUS {
            return Err(LayoutError::Vcpus { got: vcpus });
        }
        // Room for the table's rounding up to 2 MiB is set aside first, so that the rest divides.
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

    /// Returns the bytes of RAM.
    pub fn ram_bytes(&self) -> u64 {
        self.ram_bytes
    }

    /// Returns the number of vCPUs.
    pub fn vcpus(&self) -> u8 {
        self.vcpus
    }

    /// Returns the pages of the working set.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the bytes of the working set.
    pub fn working_set(&self) -> u64 {
        self.pages * PAGE
    }

    /// Returns the number of pages of the working set that one vCPU owns. It is the same for all, so up to `vcpus - 1` pages at
    /// the end have no owner.
    pub fn owned(&self) -> u64 {
        self.pages / u64::from(self.vcpus)
    }

    /// Returns the range that is filled before the start: working set and rest, to the end of RAM.
    pub fn filled(&self) -> Range<u64> {
        self.base..self.ram_bytes
    }

    /// Returns the table, with the unused bytes up to the working set.
    pub fn table(&self) -> Range<u64> {
        TABLE..self.base
    }

    /// Returns the offset of the table's entry for page `page` of the working set.
    pub fn entry(&self, page: u64) -> u64 {
        TABLE + page * RECORD_LEN
    }

    /// Returns the offset of the record in page `page` of the working set.
    pub fn record(&self, page: u64) -> u64 {
        self.base + page * PAGE + slot(page)
    }

    /// Returns the bytes of a record within page `index` of the filled range; `None` beyond the working set.
    pub fn record_in_page(&self, index: u64) -> Option<Range<usize>> {
        (index < self.pages).then(|| {
            let start = to_usize(slot(index));
            start..start + to_usize(RECORD_LEN)
        })
    }

    /// Returns the pages of the filled range.
    pub fn filled_pages(&self) -> u64 {
        (self.ram_bytes - self.base) / PAGE
    }
}

/// Returns the offset of the record within page `page`: one of 64 slots, so that records neither share a cache set nor sit at
/// the usual place of a page's header.
fn slot(page: u64) -> u64 {
    (page & 63) * 64
}

/// Record that a write stores in its page and in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Record {
    /// Number of writes to the page.
    pub version: u64,
    /// vCPU << 56 | number of the write among all writes of that vCPU, from 1; 0 if never written.
    pub sequence: u64,
}

impl Record {
    /// Returns the record after write number `number` of `vcpu`, on a page whose record was `self`.
    pub fn next(self, vcpu: u8, number: u64) -> Self {
        Self {
            version: self.version.wrapping_add(1),
            sequence: u64::from(vcpu) << 56 | number,
        }
    }

    /// Returns the record's bytes in memory.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    /// Reads a record from the first 16 bytes of `bytes`, which must have them.
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

/// Returns page `index` of the filled range as a RAM offset.
pub(crate) fn filled_offset(layout: &Layout, index: u64) -> usize {
    to_usize(layout.filled().start) + to_usize(index) * PAGE_SIZE
}
