//! The save file's layout, as bytes and values.
//!
//! ```text
//! header    magic(8)  be32 version  be32 length  JSON                       be32 CRC-32 of all before
//! blocks    be32 CRC of its position and the rest  be32 method  be16 RAM block  be16 0  be32 length  be64 first page  be64 which | bytes
//! state     the main channel of a migration without its pages: configuration, RAM blocks, devices, EOF
//! index     for each RAM block, for each of its pages, in whole chunks of 512: be64 where it is; 0: it is zero
//! checks    be32 CRC of each chunk of the index
//! end       EOF and VM description, in place of the state's EOF and what follows it
//! contents  JSON: where the parts are, and their CRCs
//! foot      be32 length of the contents  be32 their CRC  "HLSAVEnd"
//! ```
//!
//! A block holds up to 64 pages from 64 in a row, all of one RAM block, compressed together: bit n of `which` is page
//! `first page` + n. What a page was before stays in the file where it was: the index names its last content. Every CRC
//! but the header's starts with the header's, so that parts of another file are not taken for this one's.

use super::foreign::not_a_save;
use hotlift_wire::multifd::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::FileError;

/// First bytes of a file. The line end shows a transfer as text.
pub(crate) const MAGIC: [u8; 8] = *b"HLSAVE\r\n";

/// Version of the format. Another one is refused by name.
pub(crate) const VERSION: u32 = 3;

/// Last bytes of a file.
const END: [u8; 8] = *b"HLSAVEnd";

/// Bytes of the header before its JSON text.
pub(crate) const HEAD_LEN: usize = 16;

/// Bytes of a block before its payload.
pub(crate) const BLOCK_HEAD_LEN: usize = 32;

/// Bytes of the foot.
pub(crate) const FOOT_LEN: usize = 16;

/// Longest JSON text, in bytes; ours have some hundreds.
pub(crate) const JSON_MAX: usize = 64 << 10;

/// Pages of one block that is written, a power of two up to 64. Measured on nine Silesia files with zstd 1 (an AMD EPYC): blocks
/// of 4 KiB leave 0.40 of the bytes, of 16 KiB 0.34, of 32 KiB 0.33, of 64 KiB 0.32, of 256 KiB 0.30, and a page that a guest
/// waits for waits for the decoding of its block: 8, 25, 39, 73, 283 us. A dictionary of the pages' own changes that by 0.01.
pub(crate) const BLOCK_PAGES: u64 = 8;

/// Pages that a block's bits can name.
pub(crate) const WINDOW: u64 = 64;

/// What a save file says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// The source's machine, e.g. `pc-i440fx-10.0`; empty for a machine type up to 2.3, which does not send its name.
    pub machine: String,
    /// The VM's UUID, 32 hexadecimal digits; all zero if it has none.
    pub uuid: String,
    /// Page compression method of what shrinks.
    pub method: String,
    /// Seconds from 1970 to the moment when the file was begun.
    pub begun: u64,
    /// Version of Hotlift that wrote the file.
    pub hotlift: String,
    /// Random: no other file has it.
    pub id: u64,
    /// Description of the source's VM, as the command that wrote the file has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<Value>,
    /// Id of the file that has the pages that are not in this one. None is written so far, and none read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// QEMU's property `multifd-flush-after-each-section`, where the source has shown it by its multifd channels. A reader that
    /// does not know the field decides without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush_after_each_section: Option<bool>,
    /// Seconds from 1970 to the moment when the guest was paused, from the file's table of contents; `None` in files of older
    /// versions.
    #[serde(default, skip_deserializing, skip_serializing_if = "Option::is_none")]
    pub paused: Option<u64>,
}

impl FileInfo {
    /// Returns when the guest's clock stopped, in seconds from 1970. In a file of an older version it is when the save began.
    #[must_use]
    pub fn saved_at(&self) -> u64 {
        self.paused.unwrap_or(self.begun)
    }

    /// The text of a VM's UUID.
    pub(crate) fn uuid_text(uuid: [u8; 16]) -> String {
        uuid.map(|byte| format!("{byte:02x}")).concat()
    }

    /// The VM's UUID, if the text is one.
    pub(crate) fn uuid_bytes(&self) -> Option<[u8; 16]> {
        let digits = u128::from_str_radix(&self.uuid, 16).ok()?;
        Some(digits.to_be_bytes())
    }
}

/// The file's header, and its CRC.
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

/// Length of the JSON text that follows the first [`HEAD_LEN`] bytes of a file.
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

/// Reads the rest of a header: the JSON text and the CRC, of which `head` is the first part.
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

/// Sums up the CRC of a part of the file whose header has the CRC `seed`.
pub(crate) fn hasher(seed: u32) -> crc32fast::Hasher {
    crc32fast::Hasher::new_with_initial(seed)
}

/// CRC of a part of the file whose header has the CRC `seed`.
pub(crate) fn crc_of(seed: u32, parts: &[&[u8]]) -> u32 {
    let mut hasher = hasher(seed);
    parts.iter().for_each(|part| hasher.update(part));
    hasher.finalize()
}

/// What a block says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockHead {
    pub method: Method,
    /// Index of the RAM block.
    pub ram_block: usize,
    /// Bytes of its payload.
    pub length: usize,
    /// Number of the page that bit 0 of `which` means.
    pub first: u64,
    pub which: u64,
}

impl BlockHead {
    /// A block of these pages, whose numbers rise; as many of them as fit one block come first, and how many those are.
    pub(crate) fn of(ram_block: usize, pages: impl Iterator<Item = u64>) -> Option<(Self, usize)> {
        let mut pages = pages.peekable();
        let first = pages.peek().map(|page| page / BLOCK_PAGES * BLOCK_PAGES)?;
        let (mut which, mut count, mut before) = (0, 0, None);
        for page in pages {
            let place = page.wrapping_sub(first);
            if place >= BLOCK_PAGES || before.is_some_and(|before| page <= before) {
                break;
            }
            which |= 1 << place;
            count += 1;
            before = Some(page);
        }
        let head = Self {
            method: Method::None,
            ram_block,
            length: 0,
            first,
            which,
        };
        Some((head, count))
    }

    /// Its pages, in the order of their content.
    pub(crate) fn pages(&self) -> impl Iterator<Item = u64> + use<> {
        let (first, which) = (self.first, self.which);
        (0..WINDOW)
            .filter(move |place| which >> place & 1 == 1)
            .map(move |place| first + place)
    }

    /// How many pages it has.
    pub(crate) fn len(&self) -> usize {
        self.which.count_ones() as usize
    }

    /// The head of a block with that payload at byte `position`.
    pub(crate) fn encode(&self, seed: u32, position: u64, payload: &[u8]) -> [u8; BLOCK_HEAD_LEN] {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let ram_block = u16::try_from(self.ram_block).unwrap_or(u16::MAX);
        let mut bytes = [0; BLOCK_HEAD_LEN];
        bytes[4..8].copy_from_slice(&self.method.flag().to_be_bytes());
        bytes[8..10].copy_from_slice(&ram_block.to_be_bytes());
        bytes[12..16].copy_from_slice(&length.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.first.to_be_bytes());
        bytes[24..].copy_from_slice(&self.which.to_be_bytes());
        let crc = crc_of(seed, &[&position.to_be_bytes(), &bytes[4..], payload]);
        bytes[..4].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    /// Reads and checks the block at the start of `bytes`, which are from byte `position` on and may go on behind it: its
    /// head, and its payload. `None` if it is not what was written there.
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
            which: be64(head, 24),
        };
        Some((block, payload))
    }
}

/// Where a page is: in which block, and at what place among its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Of the block's first byte.
    pub position: u64,
    /// Bytes of the block, rounded up to [`Entry::UNIT`].
    pub length: usize,
    pub place: usize,
}

impl Entry {
    /// What lengths are counted in, in bytes.
    const UNIT: usize = 64;
    const PLACE_BITS: u32 = 6;
    const LENGTH_BITS: u32 = 14;
    const POSITION_BITS: u32 = u64::BITS - Self::PLACE_BITS - Self::LENGTH_BITS;

    /// Longest file, in bytes: 16 TiB.
    pub(crate) const LAST_POSITION: u64 = (1 << Self::POSITION_BITS) - 1;

    /// As the index has it; never 0, since a header comes before all blocks.
    pub(crate) fn encode(self) -> u64 {
        let units = self.length.div_ceil(Self::UNIT) as u64;
        self.position << (Self::PLACE_BITS + Self::LENGTH_BITS)
            | units << Self::PLACE_BITS
            | self.place as u64
    }

    /// What the index says of a page; `None`: it is zero.
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

/// A part of the file with a CRC of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    pub position: u64,
    pub length: u64,
    pub crc: u32,
}

/// What is in blocks of one method.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The method.
    pub method: String,
    /// Blocks, with those whose pages have changed since.
    pub blocks: u64,
    /// Their pages.
    pub pages: u64,
    /// Their bytes in the file.
    pub bytes: u64,
}

/// The last JSON text of a file: where everything is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Contents {
    /// Where the index begins.
    pub index: u64,
    pub checks: Part,
    pub state: Part,
    /// Where EOF is in the state.
    pub eof: u64,
    /// EOF and VM description, in place of what the state has from EOF on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<Part>,
    /// From here on blocks have pages that were sent again: the guest wrote them last.
    pub written_last: u64,
    /// Seconds from 1970 to the moment when the guest was paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<u64>,
    pub shares: Vec<Share>,
}

impl Contents {
    /// The contents and the foot.
    pub(crate) fn encode(&self, seed: u32) -> Result<Vec<u8>, FileError> {
        let mut bytes = serde_json::to_vec(self).map_err(|source| FileError::Info { source })?;
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let crc = crc_of(seed, &[&bytes]);
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&crc.to_be_bytes());
        bytes.extend_from_slice(&END);
        Ok(bytes)
    }

    /// Length of the JSON text before a foot at `position`, the last bytes of a file.
    pub(crate) fn length(foot: &[u8; FOOT_LEN], position: u64) -> Result<usize, FileError> {
        if foot[8..] != END {
            return Err(FileError::Truncated { position });
        }
        let length = usize::try_from(be32(foot, 0)).ok();
        length
            .filter(|length| *length <= JSON_MAX && *length as u64 <= position)
            .ok_or(damaged("the foot", position))
    }

    /// Reads the JSON text that begins at `position`, of which `foot` says the CRC.
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
    fn a_block_names_the_pages_that_fit_it_and_no_page_twice() {
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
    fn an_entry_says_where_a_page_is_up_to_the_largest_file() {
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
    fn a_block_of_another_file_and_every_flipped_bit_are_seen() {
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
