//! The one error of the crate.

use std::str::Utf8Error;

/// Why bytes are not a migration stream, or a value cannot become one.
///
/// Only [`WireError::Truncated`] can be cured by more bytes; every other variant is final. `what`
/// names the field or record in the words of QEMU's stream.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The input ends inside `what`. Never returned when the whole record was there.
    #[error("{what} is cut short: at least {needed} more bytes belong to it")]
    Truncated {
        /// The field that is incomplete.
        what: &'static str,
        /// Bytes that are certainly missing, at least 1; more may follow them.
        needed: usize,
    },
    /// A field that must have one value has another.
    #[error("{what} is {got:#x}, expected {expected:#x}")]
    Mismatch {
        /// The field.
        what: &'static str,
        /// The value it must have.
        expected: u64,
        /// The value it has.
        got: u64,
    },
    /// A count or length is above what this crate accepts (see [`crate::limits`]) or the format has
    /// room for.
    #[error("{what} is {got}, at most {limit} is accepted")]
    OverLimit {
        /// The count or length.
        what: &'static str,
        /// The largest value accepted.
        limit: u64,
        /// The value it has.
        got: u64,
    },
    /// A type, flag or id is none of those that exist.
    #[error("{what} {got:#x} is not known")]
    Unknown {
        /// The field.
        what: &'static str,
        /// The value it has.
        got: u64,
    },
    /// The source is a Hotlift of another [`VERSION`](crate::handshake::VERSION).
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
    /// A name or length that must not be empty is.
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
        /// Where it stops being UTF-8.
        #[source]
        source: Utf8Error,
    },
    /// A complete record is followed by bytes that belong to nothing.
    #[error("{extra} bytes follow the end of {what}")]
    Trailing {
        /// The record.
        what: &'static str,
        /// How many bytes too many.
        extra: usize,
    },
    /// A record came, or was asked for, at a place where the stream's order has no room for it.
    #[error("{got} where {expected} was due")]
    OutOfOrder {
        /// What came.
        got: &'static str,
        /// What the order asks for.
        expected: &'static str,
    },
    /// A checksum (Hotlift's, QEMU has none) does not agree with the bytes.
    #[error("{what} has CRC-32 {got:#010x}, its sender computed {expected:#010x}")]
    Checksum {
        /// The bytes covered.
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
    /// The length of a device's payload is not known, so nothing behind it can be read.
    #[error("device {idstr} (instance {instance_id}) has a payload of unknown length")]
    UnknownDevice {
        /// Name of the device.
        idstr: String,
        /// Instance of the device.
        instance_id: u32,
    },
    /// The end of a device's state before RAM, whose layout is unknown, was not found.
    #[error("device {idstr} sends state before RAM, and {limit} bytes of it have no end")]
    NoSectionEnd {
        /// Name of the device.
        idstr: String,
        /// Bytes that were searched.
        limit: u64,
    },
    /// A device's state before RAM has not the length that the VM description has.
    #[error("the state before RAM of device {idstr} was read as {got} bytes, and {}", in_description(*described))]
    SectionLength {
        /// Name of the device.
        idstr: String,
        /// The length in the description, if it is there.
        described: Option<u64>,
        /// Bytes that were read.
        got: u64,
    },
    /// A page names a RAM block that the block list does not have.
    #[error("RAM block {block:?} is not in the block list")]
    UnknownBlock {
        /// Name of the block.
        block: String,
    },
    /// The RAM block list has a name twice.
    #[error("RAM block {block:?} is listed twice")]
    DuplicateBlock {
        /// Name of the block.
        block: String,
    },
    /// A RAM block's length is zero, no multiple of the page size, or more than the list's total
    /// leaves for it.
    #[error("RAM block {block:?} has length {length:#x}, {remaining:#x} bytes of the total remain")]
    BadBlockLength {
        /// Name of the block.
        block: String,
        /// Its length in bytes.
        length: u64,
        /// Bytes of the announced total that the blocks before it left.
        remaining: u64,
    },
    /// A page does not lie wholly inside its RAM block, or not on a page boundary.
    #[error("page at {offset:#x} is no page of RAM block {block:?} of length {block_length:#x}")]
    BadPageOffset {
        /// Name of the block.
        block: String,
        /// Byte offset of the page in the block.
        offset: u64,
        /// Length of the block in bytes.
        block_length: u64,
    },
    /// A range of bytes is not whole pages of its RAM block.
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
    /// Bitmap and pages of a RAM block in a `mapped-ram` file do not follow its header in this order,
    /// are not aligned, or do not end in the file.
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
    /// The VM description is not the JSON that QEMU writes.
    #[error("VM description cannot be read")]
    Description {
        /// What the JSON reader says.
        #[source]
        source: serde_json::Error,
    },
}

impl WireError {
    /// Refuses bytes, `what`, whose CRC-32 is not the one that was sent with them.
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

/// What a VM description has of a device's length.
fn in_description(length: Option<u64>) -> String {
    match length {
        Some(length) => format!("its VM description has {length}"),
        None => "no VM description has its length".to_owned(),
    }
}
