//! The error type of the crate.

use std::str::Utf8Error;

/// Reason why bytes cannot be decoded, or why a value cannot be encoded.
///
/// Only [`WireError::Truncated`] can be resolved by more bytes; every other variant is final. `what` names the field or record
/// in the terms of QEMU's stream.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The input ends inside `what`. Never returned for a complete record.
    #[error("{what} is cut short: at least {needed} more bytes belong to it")]
    Truncated {
        /// The incomplete field.
        what: &'static str,
        /// Number of bytes that are certainly missing, at least 1; more may follow.
        needed: usize,
    },
    /// A field with one permitted value has another.
    #[error("{what} is {got:#x}, expected {expected:#x}")]
    Mismatch {
        /// The field.
        what: &'static str,
        /// The required value.
        expected: u64,
        /// The actual value.
        got: u64,
    },
    /// A count or length exceeds the limit of this crate (see [`crate::limits`]) or of the format.
    #[error("{what} is {got}, at most {limit} is accepted")]
    OverLimit {
        /// The count or length.
        what: &'static str,
        /// The largest accepted value.
        limit: u64,
        /// The actual value.
        got: u64,
    },
    /// A type, flag or id is unknown.
    #[error("{what} {got:#x} is not known")]
    Unknown {
        /// The field.
        what: &'static str,
        /// The actual value.
        got: u64,
    },
    /// The source is a Hotlift with another [`VERSION`](crate::handshake::VERSION).
    #[error("a channel of a Hotlift with version {got} of the protocol")]
    HotliftVersion {
        /// Its version.
        got: u16,
    },
    /// The stream uses a part of QEMU's format that is not implemented here.
    #[error("{what} is not supported")]
    Unsupported {
        /// The part.
        what: &'static str,
    },
    /// A required name or length is empty.
    #[error("{what} is empty")]
    Empty {
        /// The field.
        what: &'static str,
    },
    /// A name or text is not UTF-8.
    #[error("{what} is not UTF-8")]
    NotUtf8 {
        /// The field.
        what: &'static str,
        /// Position of the first invalid byte.
        #[source]
        source: Utf8Error,
    },
    /// Unexpected bytes follow a complete record.
    #[error("{extra} bytes follow the end of {what}")]
    Trailing {
        /// The record.
        what: &'static str,
        /// Number of extra bytes.
        extra: usize,
    },
    /// A record was received, or written, out of order.
    #[error("{got} where {expected} was due")]
    OutOfOrder {
        /// The record.
        got: &'static str,
        /// The expected record.
        expected: &'static str,
    },
    /// A checksum (Hotlift's, QEMU has none) does not match the bytes.
    #[error("{what} has CRC-32 {got:#010x}, its sender computed {expected:#010x}")]
    Checksum {
        /// The covered bytes.
        what: &'static str,
        /// The sum that was sent.
        expected: u32,
        /// The sum of the bytes that arrived.
        got: u32,
    },
    /// A PART or END section refers to a section id that no START introduced, or that has ended.
    #[error("section id {id} has no open START section")]
    UnknownSectionId {
        /// The id.
        id: u32,
    },
    /// A section id or a device (`idstr` and instance) appears twice.
    #[error("section {id} ({idstr}, instance {instance_id}) repeats an earlier section")]
    DuplicateSection {
        /// Section id on the wire.
        id: u32,
        /// Name of the device.
        idstr: String,
        /// Instance of the device.
        instance_id: u32,
    },
    /// The length of a device's payload is unknown, so the rest of the stream cannot be read.
    #[error("device {idstr} (instance {instance_id}) has a payload of unknown length")]
    UnknownDevice {
        /// Name of the device.
        idstr: String,
        /// Instance of the device.
        instance_id: u32,
    },
    /// The end of a device's state before RAM was not found; its layout is unknown.
    #[error("device {idstr} sends state before RAM, and {limit} bytes of it have no end")]
    NoSectionEnd {
        /// Name of the device.
        idstr: String,
        /// Number of searched bytes.
        limit: u64,
    },
    /// The length of a device's state before RAM differs from the VM description.
    #[error("the state before RAM of device {idstr} was read as {got} bytes, and {}", in_description(*described))]
    SectionLength {
        /// Name of the device.
        idstr: String,
        /// The length in the description, if present.
        described: Option<u64>,
        /// Bytes that were read.
        got: u64,
    },
    /// A page names a RAM block that is not in the block list.
    #[error("RAM block {block:?} is not in the block list")]
    UnknownBlock {
        /// Name of the block.
        block: String,
    },
    /// The RAM block list has a duplicate name.
    #[error("RAM block {block:?} is listed twice")]
    DuplicateBlock {
        /// Name of the block.
        block: String,
    },
    /// A RAM block's length is zero, not a multiple of the page size, or more than what remains of the list's total.
    #[error("RAM block {block:?} has length {length:#x}, {remaining:#x} bytes of the total remain")]
    BadBlockLength {
        /// Name of the block.
        block: String,
        /// Its length in bytes.
        length: u64,
        /// Rest of the announced total after the blocks before it.
        remaining: u64,
    },
    /// A page is not completely inside its RAM block, or not on a page boundary.
    #[error("page at {offset:#x} is no page of RAM block {block:?} of length {block_length:#x}")]
    BadPageOffset {
        /// Name of the block.
        block: String,
        /// Byte offset of the page in the block.
        offset: u64,
        /// Length of the block in bytes.
        block_length: u64,
    },
    /// A range does not consist of whole pages of its RAM block.
    #[error(
        "{length:#x} bytes from {start:#x} are no pages of RAM block {block:?} of length {block_length:#x}"
    )]
    BadRange {
        /// Name of the block.
        block: String,
        /// Byte offset of the range in the block.
        start: u64,
        /// Length of the range in bytes.
        length: u64,
        /// Length of the block in bytes.
        block_length: u64,
    },
    /// Bitmap and pages of a RAM block in a `mapped-ram` file do not follow its header in this order, are not aligned, or do
    /// not end in the file.
    #[error(
        "RAM block {block:?} of length {length:#x} has its bitmap at {bitmap_offset:#x} and its pages \
         at {pages_offset:#x} of a file of {file_len:#x} bytes"
    )]
    BadMappedBlock {
        /// Name of the block.
        block: String,
        /// File position of its bitmap.
        bitmap_offset: u64,
        /// File position of its first page.
        pages_offset: u64,
        /// Its length in bytes.
        length: u64,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// A page record continues "the same block" before any block was named.
    #[error("first page record has RAM_SAVE_FLAG_CONTINUE, but no block was named yet")]
    NoCurrentBlock,
    /// The VM description is not QEMU's JSON.
    #[error("VM description cannot be read")]
    Description {
        /// Error of the JSON parser.
        #[source]
        source: serde_json::Error,
    },
}

impl WireError {
    /// Rejects bytes, named `what`, whose CRC-32 differs from the received one.
    pub(crate) fn check_crc(what: &'static str, expected: u32, got: u32) -> Result<(), Self> {
        if expected == got {
            return Ok(());
        }
        Err(Self::Checksum {
            what,
            expected,
            got,
        })
    }
}

/// Returns the text on a device's length in the VM description.
fn in_description(length: Option<u64>) -> String {
    match length {
        Some(length) => format!("its VM description has {length}"),
        None => "no VM description has its length".to_owned(),
    }
}
