//! Multifd channels: one [`InitialPacket`], then page packets, each a header of fixed size and a
//! payload in the migration's compression [`Method`].
//!
//! ```text
//! channel: initial packet (64) | header (1344) payload | header (1344) payload | ... | close
//! ```
//!
//! There is no end record: a channel closes between packets. A packet with SYNC is a barrier: the receiver reads no further
//! until SYNC has arrived on all channels, and the flush on the main channel.

mod initial;
mod packet;

pub use initial::{Hello, INITIAL_PACKET_LEN, InitialPacket, ZeroPageDetection};
pub use packet::{PacketFields, PacketHeader, PacketRules, PacketWriter, first_method};

use crate::reader::as_u64;
use crate::{PAGE_SIZE, WireError, limits};

/// First four bytes of the initial packet and of every packet header (`MULTIFD_MAGIC`).
pub const MAGIC: u32 = 0x1122_3344;

/// Version in the initial packet and every packet header (`MULTIFD_VERSION`).
pub const VERSION: u32 = 1;

/// Bytes of a packet header for QEMU's packets of 128 pages of 4 KiB.
pub const HEADER_LEN: usize = PacketLayout::QEMU.header_len();

/// Method of a packet's payload: QEMU's `multifd-compression`, as its flag in packet headers (`MULTIFD_FLAG_*`), and one method
/// that only Hotlift knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Method {
    /// Uncompressed pages.
    None = 0,
    /// One zlib stream for each channel.
    Zlib = 0x02,
    /// One zstd stream for each channel.
    Zstd = 0x04,
    /// A table of lengths and raw deflate pages (Intel IAA).
    Qpl = 0x08,
    /// A table of lengths and zlib pages (HiSilicon).
    Uadk = 0x10,
    /// gzip members with QAT's extra field.
    Qatzip = 0x20,
    /// One LZ4 block for each packet, only between two Hotlifts. QEMU defines bits up to 0x40, and refuses others.
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

    /// Returns the method's bits in a packet's flags, 0 for [`Method::None`].
    pub const fn flag(self) -> u32 {
        self as u32
    }

    /// Returns the bits of all methods.
    const fn flags() -> u32 {
        let (mut flags, mut method) = (0, 0);
        while method < Self::ALL.len() {
            flags |= Self::ALL[method].flag();
            method += 1;
        }
        flags
    }

    /// Returns the method's byte in a [`Hello`]: its flag.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the method with exactly these bits, if it exists.
    pub fn from_flag(flag: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.flag() == flag)
    }

    /// Returns true if QEMU supports the method; the others are only for two Hotlifts.
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

/// Size of a migration's packets: fixed for QEMU, agreed by [`Hello`] between two Hotlifts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketLayout {
    page_size: usize,
    pages: usize,
}

impl PacketLayout {
    /// QEMU's packets on x86: 128 pages of 4 KiB (`MULTIFD_PACKET_SIZE` of 512 KiB).
    pub const QEMU: Self = Self {
        page_size: PAGE_SIZE,
        pages: 128,
    };

    /// Creates a layout of up to `pages` pages (1 to [`limits::PACKET_PAGES`]) of `page_size` bytes (a power of two from 1 KiB
    /// to 64 KiB).
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

    /// Returns the number of bytes in a page.
    pub const fn page_size(self) -> usize {
        self.page_size
    }

    /// Returns the maximum number of pages in a packet, and of entries in its header's offset table.
    pub const fn pages(self) -> usize {
        self.pages
    }

    /// Returns the length of a packet header: all offset entries are on the wire, used or not.
    pub const fn header_len(self) -> usize {
        packet::OFFSETS + 8 * self.pages
    }

    /// Returns the maximum length of a payload, in any method.
    pub const fn max_payload(self) -> usize {
        limits::PAYLOAD_FACTOR * self.page_size * self.pages
    }
}

/// Rejects a field with an unexpected value.
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
