//! The header of a packet, which precedes its payload.
//!
//! ```text
//!  0 magic  4 version  8 flags  12 pages_alloc  16 normal pages  20 next_packet_size
//! 24 packet_num (be64)  32 zero pages  36 reserved  40 "HLCK"  44 header CRC  48 payload CRC
//! 52 reserved  64 RAM block name (256, NUL padded)  320 offsets (be64 each; normal, then zero)
//! ```
//!
//! Bytes 40 to 51 contain Hotlift's checksums, where QEMU sends zero and ignores other values. The first CRC-32 covers the
//! header, with bytes 44 to 51 as zero. The second covers the payload. With method none the second is 0: the guest may write to
//! the pages while they are sent, and such pages are sent again.

use super::{MAGIC, Method, PacketLayout, VERSION, expect};
use crate::block::{self, RamBlockEntry};
use crate::reader::as_u64;
use crate::{Reader, WireError};

const FLAG_SYNC: u32 = 0x01;
/// Flag bits of all methods.
const FLAG_METHODS: u32 = Method::flags();
const FLAG_DEVICE_STATE: u32 = 0x40;

const FLAGS: usize = 8;
const NORMAL: usize = 16;
const ZERO: usize = 32;
const CHECK: usize = 40;
const CHECK_SUMS: usize = 44;
const CHECK_END: usize = 52;
const NAME: usize = 64;
const NAME_LEN: usize = 256;
pub(super) const OFFSETS: usize = NAME + NAME_LEN;

const CHECK_MAGIC: [u8; 4] = *b"HLCK";

/// Returns the method of the first packet with pages. `bytes` must start after the opening packet of a QEMU's channel. Returns
/// `None` if no packet with pages has arrived, or a header is invalid.
#[must_use]
pub fn first_method(bytes: &[u8]) -> Option<Method> {
    let mut rest = bytes;
    loop {
        let word = |at: usize| Some(u32::from_be_bytes(*rest.get(at..)?.first_chunk()?));
        let (magic, flags) = (word(0)?, word(FLAGS)?);
        let pages = (word(NORMAL)?, word(ZERO)?);
        if magic != MAGIC {
            return None;
        }
        if pages != (0, 0) {
            return Method::from_flag(flags & FLAG_METHODS);
        }
        rest = rest.get(super::HEADER_LEN..)?;
    }
}

/// Variable fields of a packet header.
#[derive(Debug, Clone, Copy, Default)]
pub struct PacketFields<'a> {
    /// True if the packet is a sync point. QEMU 9.0 and later sends no pages in such a packet.
    pub sync: bool,
    /// Number of the packet, counted over all channels. Receivers use it only in messages.
    pub packet_num: u64,
    /// Name of the RAM block of the pages; empty if the packet has no pages.
    pub block: &'a str,
    /// Byte offsets of the pages with content, in the order of the payload.
    pub normal: &'a [u64],
    /// Byte offsets of the zero pages.
    pub zero: &'a [u64],
    /// Length of the payload in bytes; 0 if no page has content.
    pub payload_len: u32,
    /// CRC-32 of the payload; 0 with method none. Ignored if the writer adds no checksums.
    pub payload_crc: u32,
}

/// Encodes the packet headers of one channel, all in the same buffer.
#[derive(Debug)]
pub struct PacketWriter {
    layout: PacketLayout,
    method: Method,
    checksummed: bool,
    header: Vec<u8>,
}

impl PacketWriter {
    /// Creates an encoder for packets of `layout`, compressed by `method`. With `checksummed`, headers have Hotlift's
    /// checksums, which QEMU ignores.
    pub fn new(layout: PacketLayout, method: Method, checksummed: bool) -> Self {
        let mut header = vec![0; layout.header_len()];
        header[..4].copy_from_slice(&MAGIC.to_be_bytes());
        header[4..8].copy_from_slice(&VERSION.to_be_bytes());
        Self {
            layout,
            method,
            checksummed,
            header,
        }
    }

    /// Sets the method of the following packets.
    pub fn set_method(&mut self, method: Method) {
        self.method = method;
    }

    /// Encodes the header for `fields`, and returns the bytes, which are valid until the next call. Does not allocate.
    ///
    /// Unused offsets and the rest of the name are zero, as in QEMU 9.0 and later. A packet without pages has no method bits,
    /// and 0 as `pages_alloc`, the same as QEMU's SYNC packets.
    ///
    /// # Errors
    ///
    /// If there are more pages than the layout allows, or the block name is empty or longer than 255 bytes.
    pub fn header(&mut self, fields: &PacketFields<'_>) -> Result<&[u8], WireError> {
        let pages = fields.normal.len() + fields.zero.len();
        if pages > self.layout.pages() {
            return Err(over(
                "pages of a multifd packet",
                self.layout.pages(),
                pages,
            ));
        }
        if fields.block.len() >= NAME_LEN {
            return Err(over(
                "RAM block name of a multifd packet",
                NAME_LEN - 1,
                fields.block.len(),
            ));
        }
        if fields.block.is_empty() && pages > 0 {
            return Err(WireError::Empty {
                what: "RAM block name of a multifd packet",
            });
        }

        let sync = if fields.sync { FLAG_SYNC } else { 0 };
        let (method, pages_alloc) = match pages {
            0 => (0, 0),
            _ => (self.method.flag(), count(self.layout.pages())),
        };
        let mut at = FLAGS;
        let mut put = |bytes: &[u8]| {
            self.header[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&(sync | method).to_be_bytes());
        put(&pages_alloc.to_be_bytes());
        put(&count(fields.normal.len()).to_be_bytes());
        put(&fields.payload_len.to_be_bytes());
        put(&fields.packet_num.to_be_bytes());
        put(&count(fields.zero.len()).to_be_bytes());

        self.header[CHECK..NAME].fill(0);
        let (name, padding) = self.header[NAME..OFFSETS].split_at_mut(fields.block.len());
        name.copy_from_slice(fields.block.as_bytes());
        padding.fill(0);

        let (entries, _) = self.header[OFFSETS..].as_chunks_mut::<8>();
        let (normal, rest) = entries.split_at_mut(fields.normal.len());
        let (zero, unused) = rest.split_at_mut(fields.zero.len());
        for (entries, offsets) in [(normal, fields.normal), (zero, fields.zero)] {
            for (entry, offset) in entries.iter_mut().zip(offsets) {
                *entry = offset.to_be_bytes();
            }
        }
        unused.as_flattened_mut().fill(0);

        if self.checksummed {
            self.header[CHECK..CHECK_SUMS].copy_from_slice(&CHECK_MAGIC);
            let header_crc = crc32fast::hash(&self.header);
            let (header_sum, payload_sum) = self.header[CHECK_SUMS..CHECK_END].split_at_mut(4);
            header_sum.copy_from_slice(&header_crc.to_be_bytes());
            payload_sum.copy_from_slice(&fields.payload_crc.to_be_bytes());
        }
        Ok(&self.header)
    }
}

/// Rules by which a receiver checks packet headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketRules {
    /// Layout of the migration's packets.
    pub layout: PacketLayout,
    /// Required method of packets with pages; `None` accepts any known method.
    pub method: Option<Method>,
    /// True if headers must have Hotlift's checksums: the peer has sent a [`Hello`](super::Hello). A checksum that is present
    /// is always verified.
    pub checksum_required: bool,
}

/// A decoded and checked packet header. Allocated once for a channel, and reused for each packet.
#[derive(Debug)]
pub struct PacketHeader {
    sync: bool,
    method: Method,
    packet_num: u64,
    block: usize,
    offsets: Vec<u64>,
    normal: usize,
    payload_len: usize,
    payload_crc: Option<u32>,
}

impl PacketHeader {
    /// Creates an empty header with space for all offsets of a packet of `layout`.
    pub fn new(layout: PacketLayout) -> Self {
        Self {
            sync: false,
            method: Method::None,
            packet_num: 0,
            block: 0,
            offsets: Vec::with_capacity(layout.pages()),
            normal: 0,
            payload_len: 0,
            payload_crc: None,
        }
    }

    /// Decodes the header in `bytes`, which have the length [`PacketLayout::header_len`]. Replaces the previous header. After
    /// an error the content is unspecified.
    ///
    /// Before 9.0, QEMU's headers without pages contain the block name, offsets and `next_packet_size` of earlier packets.
    /// These fields are then ignored. If Hotlift's checksum is present, a packet without pages must have no payload.
    pub fn decode(
        &mut self,
        bytes: &[u8],
        rules: &PacketRules,
        blocks: &[RamBlockEntry],
    ) -> Result<(), WireError> {
        let mut reader = Reader::new(bytes);
        let header = reader.take(rules.layout.header_len(), "multifd packet header")?;
        reader.finish("multifd packet header")?;

        let mut reader = Reader::new(header);
        expect(reader.be32("multifd magic")?, MAGIC, "multifd magic")?;
        expect(reader.be32("multifd version")?, VERSION, "multifd version")?;
        let payload_crc = read_checksum(header, rules.checksum_required)?;
        let flags = reader.be32("multifd packet flags")?;
        let pages_alloc = reader.length(rules.layout.pages(), "multifd pages_alloc")?;
        let normal = reader.length(pages_alloc, "normal pages of a multifd packet")?;
        let next_packet_size = reader.be32("multifd next_packet_size")?;
        let packet_num = reader.be64("multifd packet_num")?;
        let zero = reader.length(pages_alloc - normal, "zero pages of a multifd packet")?;

        let method = read_method(flags, normal + zero, rules.method)?;
        self.payload_len = payload_len(normal, next_packet_size, method, rules.layout)?;
        if let Some(crc) = payload_crc {
            if normal == 0 {
                expect(next_packet_size, 0, "length of a payload without pages")?;
            }
            if normal == 0 || method == Method::None {
                expect(crc, 0, "checksum of an unchecked payload")?;
            }
        }

        self.offsets.clear();
        if normal + zero > 0 {
            let name = &header[NAME..OFFSETS];
            let length = name.iter().position(|&byte| byte == 0);
            let name = &name[..length.ok_or(over("RAM block name", NAME_LEN - 1, NAME_LEN))?];
            self.block = block::find(blocks, name, self.block)?;
            let (entries, _) = header[OFFSETS..].as_chunks::<8>();
            let used = entries[..normal + zero].iter();
            self.offsets
                .extend(used.map(|&entry| u64::from_be_bytes(entry)));
            blocks[self.block].check_pages(&self.offsets, rules.layout.page_size())?;
        }
        self.sync = flags & FLAG_SYNC != 0;
        self.method = method;
        self.packet_num = packet_num;
        self.normal = normal;
        self.payload_crc = payload_crc;
        Ok(())
    }

    /// Returns true if the packet is a sync point. Pages in the same packet come before the sync point.
    pub fn sync(&self) -> bool {
        self.sync
    }

    /// Returns the method of the payload; meaningless in a packet without pages.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Returns the sender's packet number, for messages only: numbers may be missing, repeated or out of order.
    pub fn packet_num(&self) -> u64 {
        self.packet_num
    }

    /// Returns the index of the pages' RAM block in the list given to [`PacketHeader::decode`]; meaningless in a packet without
    /// pages.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Returns the byte offsets of the pages with content, in the order of the payload. Each is a multiple of the page size,
    /// and the whole page is inside the block. An offset may occur twice.
    pub fn normal(&self) -> &[u64] {
        &self.offsets[..self.normal]
    }

    /// Returns the byte offsets of the zero pages, which were checked like those of [`PacketHeader::normal`].
    pub fn zero(&self) -> &[u64] {
        &self.offsets[self.normal..]
    }

    /// Returns the length of the payload in bytes, at most [`PacketLayout::max_payload`]; 0 if no page has content.
    pub fn payload_len(&self) -> usize {
        self.payload_len
    }

    /// Returns the expected CRC-32 of the payload. Returns `None` if the header has no checksums, the payload is empty, or its
    /// method is none.
    pub fn payload_crc(&self) -> Option<u32> {
        self.payload_crc
            .filter(|_| self.normal > 0 && self.method != Method::None)
    }

    /// Compares the CRC-32 of `payload` with [`PacketHeader::payload_crc`]. Succeeds if there is none.
    pub fn check_payload(&self, payload: &[u8]) -> Result<(), WireError> {
        let Some(expected) = self.payload_crc() else {
            return Ok(());
        };
        let got = crc32fast::hash(payload);
        WireError::check_crc("multifd payload", expected, got)
    }
}

/// Verifies the checksum of the header, and returns that of the payload; `None` if the header has no checksums.
fn read_checksum(header: &[u8], required: bool) -> Result<Option<u32>, WireError> {
    let mut reader = Reader::new(&header[CHECK..CHECK_END]);
    let magic = reader.be32("checksum of a multifd packet")?;
    if magic != u32::from_be_bytes(CHECK_MAGIC) {
        if required {
            expect(
                magic,
                u32::from_be_bytes(CHECK_MAGIC),
                "checksum magic of a multifd packet",
            )?;
        }
        return Ok(None);
    }
    let expected = reader.be32("checksum of a multifd packet")?;
    let payload = reader.be32("checksum of a multifd payload")?;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[..CHECK_SUMS]);
    hasher.update(&[0; CHECK_END - CHECK_SUMS]);
    hasher.update(&header[CHECK_END..]);
    let got = hasher.finalize();
    WireError::check_crc("multifd packet header", expected, got)?;
    Ok(Some(payload))
}

/// Reads the method from the flags. The method of a packet without pages is not checked: with zlib, QEMU 7.2 sends such packets
/// without method bits.
fn read_method(flags: u32, pages: usize, demanded: Option<Method>) -> Result<Method, WireError> {
    if flags & FLAG_DEVICE_STATE != 0 {
        return Err(WireError::Unsupported {
            what: "device state on a multifd channel",
        });
    }
    let unknown = WireError::Unknown {
        what: "multifd packet flags",
        got: u64::from(flags),
    };
    if flags & !(FLAG_SYNC | FLAG_METHODS) != 0 {
        return Err(unknown);
    }
    let method = Method::from_flag(flags & FLAG_METHODS).ok_or(unknown)?;
    if let Some(demanded) = demanded
        && pages > 0
    {
        expect(method.flag(), demanded.flag(), "multifd method flag")?;
    }
    Ok(method)
}

fn payload_len(
    normal: usize,
    next_packet_size: u32,
    method: Method,
    layout: PacketLayout,
) -> Result<usize, WireError> {
    if normal == 0 {
        return Ok(0);
    }
    let length = usize::try_from(next_packet_size).unwrap_or(usize::MAX);
    if length == 0 {
        return Err(WireError::Empty {
            what: "multifd payload",
        });
    }
    if length > layout.max_payload() {
        return Err(over("multifd payload length", layout.max_payload(), length));
    }
    if method == Method::None {
        let expected = normal * layout.page_size();
        expect(length, expected, "multifd payload length")?;
    }
    Ok(length)
}

fn over(what: &'static str, limit: usize, got: usize) -> WireError {
    WireError::OverLimit {
        what,
        limit: as_u64(limit),
        got: as_u64(got),
    }
}

/// Converts a number of pages to its format in the stream. The numbers of a layout are far below 32 bits.
fn count(pages: usize) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}
