//! The save file: the channels of one outgoing migration in one file.
//!
//! ```text
//! header    magic(8)  be32 version  be32 length  JSON            be32 CRC-32 of all before
//! chunk     "HLch"  be16 channel  be16 flags  be64 number
//!           be32 length  be32 CRC-32 of the bytes                be32 CRC-32 of these 24 | bytes
//! trailer   "HLen"  be32 0  be64 chunks  be64 bytes
//!           be32 CRC-32 of all chunk headers                     be32 CRC-32 of these 28
//! ```
//!
//! Channel 0 is main, the multifd channels count from 1. A chunk is what a channel would have sent in
//! one go. The numbers show chunks that are missing, doubled or moved, the trailer those of another
//! file; without a trailer, or with anything behind it, a file is not whole.

use serde::{Deserialize, Serialize};

use super::FileError;

/// First bytes of a file. The line end shows a transfer as text.
pub(crate) const MAGIC: [u8; 8] = *b"HLSAVE\r\n";

/// Version of the format, the handshake of the stream in it included. Another one is refused by name.
pub(crate) const VERSION: u32 = 2;
const CHUNK: [u8; 4] = *b"HLch";
const TRAILER: [u8; 4] = *b"HLen";

/// Bytes of the header before its JSON text.
pub(crate) const HEAD_LEN: usize = 16;

/// Bytes of a chunk's header.
pub(crate) const CHUNK_HEADER_LEN: usize = 28;

/// Bytes of the trailer behind its first four.
pub(crate) const TRAILER_LEN: usize = 32;

/// Longest JSON text of a header, in bytes; ours have about 200.
pub(crate) const INFO_MAX: usize = 64 << 10;

/// Most bytes in a chunk: above a packet of zlib that did not get smaller, and its header.
pub(crate) const CHUNK_MAX: usize = 2 << 20;

/// Flag of a chunk that the reader holds back until the trailer was checked: EOF and what follows it,
/// at which a QEMU runs the guest.
const HELD_BACK: u16 = 1;

/// What a save file says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// The source's machine, e.g. `pc-i440fx-10.0`.
    pub machine: String,
    /// The VM's UUID, 32 hexadecimal digits; all zero if it has none.
    pub uuid: String,
    /// Multifd channels of the stream inside.
    pub channels: u8,
    /// Their page compression method.
    pub method: String,
    /// Seconds from 1970 to the moment when the file was begun.
    pub begun: u64,
    /// Version of Hotlift that wrote the file.
    pub hotlift: String,
}

/// The file's header.
pub(crate) fn header(info: &FileInfo) -> Result<Vec<u8>, FileError> {
    let json = serde_json::to_vec(info).map_err(|source| FileError::Info { source })?;
    let length = u32::try_from(json.len()).unwrap_or(u32::MAX);
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&json);
    bytes.extend_from_slice(&crc32fast::hash(&bytes).to_be_bytes());
    Ok(bytes)
}

/// Length of the JSON text that follows the first [`HEAD_LEN`] bytes of a file.
pub(crate) fn info_len(head: &[u8; HEAD_LEN]) -> Result<usize, FileError> {
    let [version, length] = [be32(head, 8), be32(head, 12)];
    if head[..8] != MAGIC {
        return Err(FileError::NotASave);
    }
    if version != VERSION {
        return Err(FileError::Version { version });
    }
    usize::try_from(length)
        .ok()
        .filter(|length| *length <= INFO_MAX)
        .ok_or(damaged("the header", 0))
}

/// Reads the rest of a header: the JSON text and the checksum, of which `head` is the first part.
pub(crate) fn read_info(head: &[u8; HEAD_LEN], rest: &[u8]) -> Result<FileInfo, FileError> {
    let (json, crc) = rest
        .split_last_chunk()
        .ok_or(FileError::Truncated { position: 0 })?;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(json);
    if hasher.finalize() != u32::from_be_bytes(*crc) {
        return Err(damaged("the header", 0));
    }
    serde_json::from_slice(json).map_err(|source| FileError::Info { source })
}

/// A chunk's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// 0 is main, the multifd channels count from 1.
    pub channel: u16,
    pub held_back: bool,
    /// From 0.
    pub number: u64,
    /// Bytes that follow, 1 to [`CHUNK_MAX`].
    pub length: usize,
    pub crc: u32,
}

impl Chunk {
    pub(crate) fn encode(&self) -> [u8; CHUNK_HEADER_LEN] {
        let flags = if self.held_back { HELD_BACK } else { 0 };
        let length = u32::try_from(self.length).unwrap_or(u32::MAX);
        let mut bytes = [0; CHUNK_HEADER_LEN];
        bytes[..4].copy_from_slice(&CHUNK);
        bytes[4..6].copy_from_slice(&self.channel.to_be_bytes());
        bytes[6..8].copy_from_slice(&flags.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_be_bytes());
        bytes[16..20].copy_from_slice(&length.to_be_bytes());
        bytes[20..24].copy_from_slice(&self.crc.to_be_bytes());
        seal(&mut bytes);
        bytes
    }
}

/// How much a file holds, and the sum over all its chunk headers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Totals {
    pub chunks: u64,
    /// Of all chunks, without their headers.
    pub bytes: u64,
    headers: crc32fast::Hasher,
}

impl Totals {
    pub(crate) fn add(&mut self, chunk: &Chunk, header: &[u8; CHUNK_HEADER_LEN]) {
        self.chunks += 1;
        self.bytes += chunk.length as u64;
        self.headers.update(header);
    }

    /// The trailer that belongs to them.
    pub(crate) fn trailer(&self) -> [u8; TRAILER_LEN] {
        let mut bytes = [0; TRAILER_LEN];
        bytes[..4].copy_from_slice(&TRAILER);
        bytes[8..16].copy_from_slice(&self.chunks.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.bytes.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.headers.clone().finalize().to_be_bytes());
        seal(&mut bytes);
        bytes
    }
}

/// What follows a chunk, or the header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Chunk(Chunk),
    /// The trailer; it begins with the bytes given.
    Trailer,
}

/// Reads what a chunk's header, at byte `position` of the file, says. `channels` is the number of
/// channels, main included.
pub(crate) fn next(
    bytes: &[u8; CHUNK_HEADER_LEN],
    totals: &Totals,
    channels: u16,
    position: u64,
) -> Result<Next, FileError> {
    if bytes.starts_with(&TRAILER) {
        return Ok(Next::Trailer);
    }
    let mut sealed = *bytes;
    seal(&mut sealed);
    let chunk = Chunk {
        channel: be16(bytes, 4),
        held_back: be16(bytes, 6) == HELD_BACK,
        number: u64::from(be32(bytes, 8)) << 32 | u64::from(be32(bytes, 12)),
        length: usize::try_from(be32(bytes, 16)).unwrap_or(usize::MAX),
        crc: be32(bytes, 20),
    };
    // Writing it again leaves nothing unchecked: magic, flags and checksum.
    let is_ours = chunk.encode() == *bytes
        && chunk.number == totals.chunks
        && chunk.channel < channels
        && (1..=CHUNK_MAX).contains(&chunk.length);
    if !is_ours {
        return Err(damaged("a chunk's header", position));
    }
    Ok(Next::Chunk(chunk))
}

/// Puts the checksum of all bytes before them into the last four.
fn seal(bytes: &mut [u8]) {
    if let Some((covered, crc)) = bytes.split_last_chunk_mut() {
        *crc = crc32fast::hash(covered).to_be_bytes();
    }
}

pub(crate) fn damaged(what: &'static str, position: u64) -> FileError {
    FileError::Damaged { what, position }
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
