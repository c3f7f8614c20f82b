//! The error type of the crate.

use std::str::Utf8Error;

/// Reason why bytes cannot be decoded, or a value cannot be encoded.
///
/// More bytes can resolve only [`WireError::Truncated`]; all other errors are final. `what` names the field or record with
/// QEMU's term.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The input ends inside `what`. Never returned for a complete record.
    #[error("{what} is cut short: at least {needed} more bytes belong to it")]
    Truncated {
        /// The incomplete field.
        what: &'static str,
        /// Number of bytes that are missing at least, never 0; the record may need more.
        needed: usize,
    },
    /// A field does not have its only permitted value.
    #[error("{what} is {got:#x}, expected {expected:#x}")]
    Mismatch {
        /// The field.
        what: &'static str,
        /// The required value.
        expected: u64,
        /// The actual value.
        got: u64,
    },
    /// A count or length exceeds a limit of this crate (see [`crate::limits`]) or of the format.
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
        /// The source's version.
        got: u16,
    },
    /// The stream uses a part of QEMU's format that this crate does not implement.
    #[error("{what} is not supported")]
    Unsupported {
        /// The part that is not implemented.
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
        /// The complete record.
        what: &'static str,
        /// Number of extra bytes.
        extra: usize,
    },
    /// A record was received or written out of order.
    #[error("{got} where {expected} was due")]
    OutOfOrder {
        /// The record out of order.
        got: &'static str,
        /// The expected record.
        expected: &'static str,
    },
    /// A checksum does not match the received bytes. Only a Hotlift sends checksums, a QEMU sends none.
    #[error("{what} has CRC-32 {got:#010x}, its sender computed {expected:#010x}")]
    Checksum {
        /// The bytes that the checksum covers.
        what: &'static str,
        /// The checksum that was received.
        expected: u32,
        /// The checksum computed from the received bytes.
        got: u32,
    },
    /// The section id of a PART or END section is not that of an open section: no START had it, or the section has ended.
    #[error("section id {id} has no open START section")]
    UnknownSectionId {
        /// The section id.
        id: u32,
    },
    /// A section id appears twice, or a device (name and instance) does.
    #[error("section {id} ({idstr}, instance {instance_id}) repeats an earlier section")]
    DuplicateSection {
        /// Section id in the stream.
        id: u32,
        /// Name of the device.
        idstr: String,
        /// Instance of the device.
        instance_id: u32,
    },
    /// The length of a device's state is unknown, so the rest of the stream cannot be read.
    #[error("device {idstr} (instance {instance_id}) has a payload of unknown length")]
    UnknownDevice {
        /// Name of the device.
        idstr: String,
        /// Instance of the device.
        instance_id: u32,
    },
    /// The end of a device's state before RAM was not found. The layout of this state is unknown.
    #[error("device {idstr} sends state before RAM, and {limit} bytes of it have no end")]
    NoSectionEnd {
        /// Name of the device.
        idstr: String,
        /// Number of bytes that were searched.
        limit: u64,
    },
    /// A device's state before RAM does not have the length given in the VM description, or is missing there.
    #[error("the state before RAM of device {idstr} was read as {got} bytes, and {}", in_description(*described))]
    SectionLength {
        /// Name of the device.
        idstr: String,
        /// Length in bytes given in the VM description; `None` if the device is not described.
        described: Option<u64>,
        /// Length in bytes that was read.
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
    /// A RAM block's length is zero, is not a multiple of the page size, or exceeds the rest of the announced total.
    #[error("RAM block {block:?} has length {length:#x}, {remaining:#x} bytes of the total remain")]
    BadBlockLength {
        /// Name of the block.
        block: String,
        /// Length of the block in bytes.
        length: u64,
        /// Announced total minus the lengths of the blocks before this one, in bytes.
        remaining: u64,
    },
    /// A page is not completely inside its RAM block, or not at a multiple of the page size.
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
    /// Bitmap and pages of a RAM block in a `mapped-ram` file are at invalid positions. Bitmap and pages must follow the
    /// block's header in this order, must be aligned, and must end inside the file.
    #[error(
        "RAM block {block:?} of length {length:#x} has its bitmap at {bitmap_offset:#x} and its pages \
         at {pages_offset:#x} of a file of {file_len:#x} bytes"
    )]
    BadMappedBlock {
        /// Name of the block.
        block: String,
        /// File position of the block's bitmap.
        bitmap_offset: u64,
        /// File position of the block's first page.
        pages_offset: u64,
        /// Length of the block in bytes.
        length: u64,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// A page record refers to the previous record's RAM block, but is the first record.
    #[error("first page record has RAM_SAVE_FLAG_CONTINUE, but no block was named yet")]
    NoCurrentBlock,
    /// The VM description is not JSON in QEMU's format.
    #[error("VM description cannot be read")]
    Description {
        /// Error of the JSON parser.
        #[source]
        source: serde_json::Error,
    },
}

impl WireError {
    /// Fails if the received CRC-32 `expected` differs from the computed `got`. `what` names the bytes that the CRC-32 covers.
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

/// Returns the part of an error message about a device's length in the VM description.
fn in_description(length: Option<u64>) -> String {
    match length {
        Some(length) => format!("its VM description has {length}"),
        None => "no VM description has its length".to_owned(),
    }
}
