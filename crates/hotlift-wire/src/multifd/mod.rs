//! Multifd channels: one [`InitialPacket`], then page packets, each a header of fixed size and a
//! payload in the migration's compression [`Method`].
//!
//! ```text
//! channel: initial packet (64) | header (1344) payload | header (1344) payload | ... | close
//! ```
//!
//! A channel has no end record: its connection is closed between packets. A packet with SYNC is a sync point: after SYNC the
//! receiver reads no further packet of this channel until SYNC has arrived on all channels, and the flush on the main channel.

mod initial;
mod packet;

pub use initial::{Hello, INITIAL_PACKET_LEN, InitialPacket, ZeroPageDetection};
pub use packet::{PacketFields, PacketHeader, PacketRules, PacketWriter, first_method};

use crate::reader::as_u64;
use crate::{PAGE_SIZE, WireError, limits};

/// First four bytes of the opening packet and of every packet header (`MULTIFD_MAGIC`).
pub const MAGIC: u32 = 0x1122_3344;

/// Version in the opening packet and in every packet header (`MULTIFD_VERSION`).
pub const VERSION: u32 = 1;

/// Length of a packet header in bytes, for QEMU's packets of 128 pages of 4 KiB.
pub const HEADER_LEN: usize = PacketLayout::QEMU.header_len();

/// Compression method of a packet's payload: QEMU's `multifd-compression`, with the values of QEMU's flags (`MULTIFD_FLAG_*`).
/// One more method exists only in Hotlift.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Method {
    /// Uncompressed pages.
    None = 0,
    /// zlib: one stream for all packets of a channel.
    Zlib = 0x02,
    /// zstd: one stream for all packets of a channel.
    Zstd = 0x04,
    /// Raw deflate, each page separately, after a table of lengths (Intel IAA).
    Qpl = 0x08,
    /// zlib, each page separately, after a table of lengths (HiSilicon).
    Uadk = 0x10,
    /// gzip members with the extra field of Intel QAT.
    Qatzip = 0x20,
    /// LZ4, one block for each packet; only between two Hotlifts. QEMU defines bits up to 0x40, and refuses others.
    Lz4 = 0x80,
}

impl Method {
    /// All methods, in the order of their flags.
    pub const ALL: [Self; 7] = [
        Self::None,
        Self::Zlib,
        Self::Zstd,
        Self::Qpl,
        Self::Uadk,
        Self::Qatzip,
        Self::Lz4,
    ];

    /// Returns the method's bit in a packet's flags; 0 for [`Method::None`].
    pub const fn flag(self) -> u32 {
        self as u32
    }

    /// Returns the bits of all methods together.
    const fn flags() -> u32 {
        let (mut flags, mut method) = (0, 0);
        while method < Self::ALL.len() {
            flags |= Self::ALL[method].flag();
            method += 1;
        }
        flags
    }

    /// Returns the method's code in a [`Hello`], which equals its flag.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the method with exactly these flag bits; `None` if there is none.
    pub fn from_flag(flag: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.flag() == flag)
    }

    /// Returns true if QEMU supports the method; false if it exists only in Hotlift.
    pub const fn is_qemus(self) -> bool {
        !matches!(self, Self::Lz4)
    }

    /// Returns QEMU's name of the method; for [`Method::Lz4`] Hotlift's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::Qpl => "qpl",
            Self::Uadk => "uadk",
            Self::Qatzip => "qatzip",
            Self::Lz4 => "lz4",
        }
    }
}

/// Page size and maximum number of pages of a migration's packets. Fixed for QEMU; two Hotlifts agree on it by [`Hello`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketLayout {
    page_size: usize,
    pages: usize,
}

impl PacketLayout {
    /// Layout of QEMU's packets on x86: 128 pages of 4 KiB (`MULTIFD_PACKET_SIZE` of 512 KiB).
    pub const QEMU: Self = Self {
        page_size: PAGE_SIZE,
        pages: 128,
    };

    /// Creates a layout. A packet has at most `pages` pages (1 to [`limits::PACKET_PAGES`]) of `page_size` bytes (a power of
    /// two from 1 KiB to 64 KiB). Other values are an error.
    pub fn new(page_size: usize, pages: usize) -> Result<Self, WireError> {
        if !page_size.is_power_of_two() || !(1 << 10..=64 << 10).contains(&page_size) {
            return Err(WireError::Unknown {
                what: "multifd page size",
                got: as_u64(page_size),
            });
        }
        if pages == 0 {
            return Err(WireError::Empty {
                what: "multifd packet",
            });
        }
        if pages > limits::PACKET_PAGES {
            return Err(WireError::OverLimit {
                what: "pages of a multifd packet",
                limit: as_u64(limits::PACKET_PAGES),
                got: as_u64(pages),
            });
        }
        Ok(Self { page_size, pages })
    }

    /// Returns the size of a page in bytes.
    pub const fn page_size(self) -> usize {
        self.page_size
    }

    /// Returns the maximum number of pages in a packet. The offset table in its header has the same number of entries.
    pub const fn pages(self) -> usize {
        self.pages
    }

    /// Returns the length of a packet header in bytes. The length includes all entries of the offset table, used or not.
    pub const fn header_len(self) -> usize {
        packet::OFFSETS + 8 * self.pages
    }

    /// Returns the maximum length of a payload in bytes, for all methods.
    pub const fn max_payload(self) -> usize {
        limits::PAYLOAD_FACTOR * self.page_size * self.pages
    }
}

/// Fails if a field does not have the expected value.
fn expect<T: TryInto<u64> + PartialEq>(
    got: T,
    expected: T,
    what: &'static str,
) -> Result<(), WireError> {
    if got == expected {
        return Ok(());
    }
    Err(WireError::Mismatch {
        what,
        expected: expected.try_into().unwrap_or(u64::MAX),
        got: got.try_into().unwrap_or(u64::MAX),
    })
}
