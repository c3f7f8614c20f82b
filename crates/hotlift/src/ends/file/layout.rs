//! Layout of the save file, as bytes and values.
//!
//! ```text
//! header    magic(8)  be32 version  be32 length  JSON                       be32 CRC-32 of all before
//! blocks    be32 CRC of its position and the rest  be32 method  be16 RAM block  be16 0  be32 length  be64 first page  be64 page_bits | bytes
//! state     the main channel of a migration without its pages: configuration, RAM blocks, devices, EOF
//! index     for each RAM block, for each of its pages, in whole chunks of 512: be64 position entry; 0: zero page
//! checks    be32 CRC of each chunk of the index
//! end       EOF and VM description, replaces the state's EOF and the data after it
//! contents  JSON: positions and CRCs of the parts
//! foot      be32 length of the contents  be32 their CRC  "HLSAVEnd"
//! ```
//!
//! A block has up to 64 pages of one RAM block, compressed together. The pages are from one aligned run of 64. Bit n of
//! `page_bits` stands for page `first page` + n. If a page is written again, its old content stays in the file; the index has
//! its latest position. The header's CRC is the seed of all other CRCs. So a part that was copied from another file fails its
//! check.

use super::foreign::not_a_save;
use hotlift_wire::multifd::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::FileError;

/// First bytes of a file. The line end detects a transfer in text mode.
pub(crate) const MAGIC: [u8; 8] = *b"HLSAVE\r\n";

/// Version of the format. A file with another version is rejected.
pub(crate) const VERSION: u32 = 3;

/// Last bytes of a file.
const END: [u8; 8] = *b"HLSAVEnd";

/// Bytes of the header before its JSON text.
pub(crate) const HEAD_LEN: usize = 16;

/// Bytes of a block before its payload.
pub(crate) const BLOCK_HEAD_LEN: usize = 32;

/// Bytes of the foot.
pub(crate) const FOOT_LEN: usize = 16;

/// Maximum length of a JSON text, in bytes. The texts that Hotlift writes have some hundred bytes.
pub(crate) const JSON_MAX: usize = 64 << 10;

/// Number of pages in a written block, a power of two up to 64. A larger block compresses better. But a guest that waits for a
/// page waits until its whole block is decoded. Measured on nine Silesia files with zstd 1 (an AMD EPYC), for blocks of 4, 16,
/// 32, 64 and 256 KiB:
///
/// - Compressed size: 0.40, 0.34, 0.33, 0.32, 0.30 of the bytes. A dictionary built from the pages changes it by 0.01.
/// - Time to decode a block: 8, 25, 39, 73, 283 us.
pub(crate) const BLOCK_PAGES: u64 = 8;

/// Number of pages that the bits in a block's head can select.
pub(crate) const WINDOW: u64 = 64;

/// Facts about the VM and the save, in the header of a save file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// Machine of the source, e.g. `pc-i440fx-10.0`; empty for a machine type up to 2.3, which does not send its name.
    pub machine: String,
    /// UUID of the VM, 32 hexadecimal digits; all zero if it has none.
    pub uuid: String,
    /// Compression method. Pages that do not shrink are stored uncompressed.
    pub method: String,
    /// Time when the file was created, in seconds since 1970.
    pub begun: u64,
    /// Version of Hotlift that wrote the file.
    pub hotlift: String,
    /// Random id of this file.
    pub id: u64,
    /// Description of the source's VM, from the command that wrote the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<Value>,
    /// Reserved: id of a base file with the pages that this file lacks. This version neither writes nor reads files with a
    /// base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// QEMU's property `multifd-flush-after-each-section`; `None` if the source's multifd channels have not shown it. Readers
    /// that do not know this field ignore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush_after_each_section: Option<bool>,
    /// Time when the guest was paused, in seconds since 1970, from the table of contents; `None` in files of older versions.
    #[serde(default, skip_deserializing, skip_serializing_if = "Option::is_none")]
    pub paused: Option<u64>,
}

impl FileInfo {
    /// Returns the time when the guest was paused, in seconds since 1970. For a file of an older version, returns the time when
    /// the file was created.
    #[must_use]
    pub fn saved_at(&self) -> u64 {
        self.paused.unwrap_or(self.begun)
    }

    /// Returns a VM's UUID as 32 hexadecimal digits.
    pub(crate) fn uuid_text(uuid: [u8; 16]) -> String {
        uuid.map(|byte| format!("{byte:02x}")).concat()
    }

    /// Returns the VM's UUID; `None` if its text is not hexadecimal.
    pub(crate) fn uuid_bytes(&self) -> Option<[u8; 16]> {
        let digits = u128::from_str_radix(&self.uuid, 16).ok()?;
        Some(digits.to_be_bytes())
    }
}

/// Encodes the file's header, and returns it with its CRC.
pub(crate) fn header(info: &FileInfo) -> Result<(Vec<u8>, u32), FileError> {
    let json = serde_json::to_vec(info).map_err(|source| FileError::Info { source })?;
    let length = u32::try_from(json.len()).unwrap_or(u32::MAX);
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&json);
    let crc = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&crc.to_be_bytes());
    Ok((bytes, crc))
}

/// Returns the length of the JSON text after the first [`HEAD_LEN`] bytes of a file.
pub(crate) fn info_len(head: &[u8; HEAD_LEN]) -> Result<usize, FileError> {
    let [version, length] = [be32(head, 8), be32(head, 12)];
    if head[..8] != MAGIC {
        return Err(not_a_save(head));
    }
    if version != VERSION {
        return Err(FileError::Version {
            version,
            own: VERSION,
        });
    }
    usize::try_from(length)
        .ok()
        .filter(|length| *length <= JSON_MAX)
        .ok_or(damaged("the header", 0))
}

/// Decodes and verifies a header, and returns the facts and the header's CRC. `head` is its first part, `rest` the JSON text
/// and the CRC.
pub(crate) fn read_info(head: &[u8; HEAD_LEN], rest: &[u8]) -> Result<(FileInfo, u32), FileError> {
    let (json, crc) = rest
        .split_last_chunk()
        .ok_or(FileError::Truncated { position: 0 })?;
    let crc = u32::from_be_bytes(*crc);
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(json);
    if hasher.finalize() != crc {
        return Err(damaged("the header", 0));
    }
    let info = serde_json::from_slice(json).map_err(|source| FileError::Info { source })?;
    Ok((info, crc))
}

/// Returns a CRC hasher for a part of the file whose header has the CRC `seed`.
pub(crate) fn hasher(seed: u32) -> crc32fast::Hasher {
    crc32fast::Hasher::new_with_initial(seed)
}

/// Returns the CRC of a part of the file whose header has the CRC `seed`.
pub(crate) fn crc_of(seed: u32, parts: &[&[u8]]) -> u32 {
    let mut hasher = hasher(seed);
    parts.iter().for_each(|part| hasher.update(part));
    hasher.finalize()
}

/// Head of a block: describes the payload that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockHead {
    pub method: Method,
    /// Index of the RAM block.
    pub ram_block: usize,
    /// Length of the payload, in bytes.
    pub length: usize,
    /// Number of the page that bit 0 of `page_bits` stands for.
    pub first: u64,
    pub page_bits: u64,
}

impl BlockHead {
    /// Returns the head of the next block to write, and the number of its pages. The block takes the first of `pages`, as long
    /// as they ascend and are in the same aligned run of [`BLOCK_PAGES`]. Returns `None` if `pages` is empty.
    pub(crate) fn of(ram_block: usize, pages: impl Iterator<Item = u64>) -> Option<(Self, usize)> {
        let mut pages = pages.peekable();
        let first = pages.peek().map(|page| page / BLOCK_PAGES * BLOCK_PAGES)?;
        let (mut page_bits, mut count, mut before) = (0, 0, None);
        for page in pages {
            let place = page.wrapping_sub(first);
            if place >= BLOCK_PAGES || before.is_some_and(|before| page <= before) {
                break;
            }
            page_bits |= 1 << place;
            count += 1;
            before = Some(page);
        }
        let head = Self {
            method: Method::None,
            ram_block,
            length: 0,
            first,
            page_bits,
        };
        Some((head, count))
    }

    /// Returns the numbers of the block's pages, in the order of the payload.
    pub(crate) fn pages(&self) -> impl Iterator<Item = u64> + use<> {
        let (first, page_bits) = (self.first, self.page_bits);
        (0..WINDOW)
            .filter(move |place| page_bits >> place & 1 == 1)
            .map(move |place| first + place)
    }

    /// Returns the number of the block's pages.
    pub(crate) fn len(&self) -> usize {
        self.page_bits.count_ones() as usize
    }

    /// Encodes the head of a block with this payload, to be written at byte `position` of the file.
    pub(crate) fn encode(&self, seed: u32, position: u64, payload: &[u8]) -> [u8; BLOCK_HEAD_LEN] {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let ram_block = u16::try_from(self.ram_block).unwrap_or(u16::MAX);
        let mut bytes = [0; BLOCK_HEAD_LEN];
        bytes[4..8].copy_from_slice(&self.method.flag().to_be_bytes());
        bytes[8..10].copy_from_slice(&ram_block.to_be_bytes());
        bytes[12..16].copy_from_slice(&length.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.first.to_be_bytes());
        bytes[24..].copy_from_slice(&self.page_bits.to_be_bytes());
        let crc = crc_of(seed, &[&position.to_be_bytes(), &bytes[4..], payload]);
        bytes[..4].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    /// Decodes and verifies the block at the start of `bytes`, and returns its head and payload; `None` for a damaged block.
    /// `bytes` was read from byte `position` of the file on, and may be longer than the block.
    pub(crate) fn decode(bytes: &[u8], seed: u32, position: u64) -> Option<(Self, &[u8])> {
        let (head, rest) = bytes.split_first_chunk::<BLOCK_HEAD_LEN>()?;
        let length = usize::try_from(be32(head, 12)).ok()?;
        let payload = rest.get(..length)?;
        let crc = crc_of(seed, &[&position.to_be_bytes(), &head[4..], payload]);
        let first = be64(head, 16);
        if crc != be32(head, 0) || first.checked_add(WINDOW).is_none() {
            return None;
        }
        let block = Self {
            method: Method::from_flag(be32(head, 4))?,
            ram_block: u16::from_be_bytes([head[8], head[9]]).into(),
            length,
            first,
            page_bits: be64(head, 24),
        };
        Some((block, payload))
    }
}

/// Index entry of a page: the position of its block, and the page's place in the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Position of the block's first byte.
    pub position: u64,
    /// Length of the block in bytes, rounded up to [`Entry::UNIT`].
    pub length: usize,
    pub place: usize,
}

impl Entry {
    /// Unit in which the index stores lengths, in bytes.
    const UNIT: usize = 64;
    const PLACE_BITS: u32 = 6;
    const LENGTH_BITS: u32 = 14;
    const POSITION_BITS: u32 = u64::BITS - Self::PLACE_BITS - Self::LENGTH_BITS;

    /// Highest file position at which a block can start. It limits a file to 16 TiB.
    pub(crate) const LAST_POSITION: u64 = (1 << Self::POSITION_BITS) - 1;

    /// Encodes the entry for the index. The result is never 0 (a zero page), because no block is at position 0.
    pub(crate) fn encode(self) -> u64 {
        let units = self.length.div_ceil(Self::UNIT) as u64;
        self.position << (Self::PLACE_BITS + Self::LENGTH_BITS)
            | units << Self::PLACE_BITS
            | self.place as u64
    }

    /// Decodes an entry of the index, with `None` for a zero page.
    pub(crate) fn decode(word: u64) -> Option<Self> {
        let part = |from: u32, bits: u32| {
            usize::try_from(word >> from & ((1 << bits) - 1)).unwrap_or(usize::MAX)
        };
        (word != 0).then(|| Self {
            position: word >> (Self::PLACE_BITS + Self::LENGTH_BITS),
            length: part(Self::PLACE_BITS, Self::LENGTH_BITS) * Self::UNIT,
            place: part(0, Self::PLACE_BITS),
        })
    }
}

/// A part of the file, which has its own CRC.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    pub position: u64,
    pub length: u64,
    pub crc: u32,
}

/// Statistics of the blocks of one compression method.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Name of the method.
    pub method: String,
    /// Number of blocks. Blocks whose pages were rewritten later are included.
    pub blocks: u64,
    /// Number of pages in these blocks.
    pub pages: u64,
    /// Length of these blocks in the file, in bytes.
    pub bytes: u64,
}

/// Table of contents: the last JSON text of a file, with the positions of its parts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Contents {
    /// Position of the index.
    pub index: u64,
    pub checks: Part,
    pub state: Part,
    /// Offset of EOF in the `state` part, in bytes.
    pub eof: u64,
    /// EOF and VM description, which replace the state's data from EOF on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<Part>,
    /// File position of the first block with pages that were sent again, because the guest had rewritten them. Blocks after it
    /// may have such pages too.
    pub written_last: u64,
    /// Time when the guest was paused, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<u64>,
    pub shares: Vec<Share>,
}

impl Contents {
    /// Encodes the contents and the foot.
    pub(crate) fn encode(&self, seed: u32) -> Result<Vec<u8>, FileError> {
        let mut bytes = serde_json::to_vec(self).map_err(|source| FileError::Info { source })?;
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let crc = crc_of(seed, &[&bytes]);
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&crc.to_be_bytes());
        bytes.extend_from_slice(&END);
        Ok(bytes)
    }

    /// Returns the length of the table of contents, in bytes. `foot` has the last bytes of the file, at `position`.
    pub(crate) fn length(foot: &[u8; FOOT_LEN], position: u64) -> Result<usize, FileError> {
        if foot[8..] != END {
            return Err(FileError::Truncated { position });
        }
        let length = usize::try_from(be32(foot, 0)).ok();
        length
            .filter(|length| *length <= JSON_MAX && *length as u64 <= position)
            .ok_or(damaged("the foot", position))
    }

    /// Decodes and verifies the table of contents, which begins at `position`. `foot` has its CRC.
    pub(crate) fn decode(
        json: &[u8],
        foot: &[u8; FOOT_LEN],
        seed: u32,
        position: u64,
    ) -> Result<Self, FileError> {
        if crc_of(seed, &[json]) != be32(foot, 4) {
            return Err(damaged("the table of contents", position));
        }
        serde_json::from_slice(json).map_err(|source| FileError::Info { source })
    }
}

pub(crate) fn damaged(what: &'static str, position: u64) -> FileError {
    FileError::Damaged { what, position }
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(field)
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(field)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_lists_pages_of_its_own_range_and_each_once() {
        let block = |pages: &[u64]| {
            let (head, count) = BlockHead::of(1, pages.iter().copied()).unwrap();
            assert_eq!(head.pages().collect::<Vec<_>>(), pages[..count]);
            count
        };
        assert_eq!(block(&[0, 1, 2]), 3);
        assert_eq!(block(&[15, 16]), 1);
        assert_eq!(block(&[33, 39, 40]), 2);
        assert_eq!(block(&[5, 5]), 1);
        assert_eq!(block(&[6, 5]), 1);
        assert_eq!(block(&[u64::MAX - 1, u64::MAX, 0]), 2);
        assert!(BlockHead::of(1, std::iter::empty()).is_none());
    }

    #[test]
    fn an_entry_holds_any_offset_up_to_the_largest_file() {
        for (position, length, place) in
            [(1, 1, 0), (77, 64, 63), (Entry::LAST_POSITION, 300_000, 15)]
        {
            let entry = Entry {
                position,
                length,
                place,
            };
            let back = Entry::decode(entry.encode()).unwrap();
            assert_eq!((back.position, back.place), (position, place));
            assert!((length..length + 64).contains(&back.length));
        }
        assert_eq!(Entry::decode(0), None);
    }

    #[test]
    fn a_block_of_another_file_and_every_flipped_bit_are_detected() {
        let (head, _) = BlockHead::of(2, [64, 66].into_iter()).unwrap();
        let mut bytes = head.encode(7, 99, b"payload").to_vec();
        bytes.extend_from_slice(b"payload, and what follows");
        let (back, payload) = BlockHead::decode(&bytes, 7, 99).unwrap();
        assert_eq!((back.length, payload), (7, &b"payload"[..]));
        assert_eq!(back.pages().collect::<Vec<_>>(), [64, 66]);
        assert!(BlockHead::decode(&bytes, 8, 99).is_none());
        assert!(BlockHead::decode(&bytes, 7, 98).is_none());
        for bit in 0..(BLOCK_HEAD_LEN + 7) * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(BlockHead::decode(&bytes, 7, 99).is_none(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
