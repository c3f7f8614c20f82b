//! What can go wrong with guest memory.

use std::io;

/// A failure of guest memory. Each variant names the RAM block it concerns.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// A RAM block's name does not fit the one length byte that the stream has for it.
    #[error("name of a RAM block must have 1 to 255 bytes, got {got}")]
    Name {
        /// Bytes of the name.
        got: usize,
    },
    /// A RAM block's length is zero or not a whole number of pages.
    #[error("length of RAM block {block} must be a positive multiple of 4096, got {got}")]
    Length {
        /// Name of the RAM block.
        block: String,
        /// Bytes asked for.
        got: usize,
    },
    /// A region given for a RAM block does not start on a page.
    #[error("RAM block {block} must start on a page, got address {address:#x}")]
    Address {
        /// Name of the RAM block.
        block: String,
        /// Host address of the region.
        address: usize,
    },
    /// A region given for a RAM block cannot be both read and written.
    #[error("RAM block {block} must be mapped readable and writable, got protection {prot:#x}")]
    Protection {
        /// Name of the RAM block.
        block: String,
        /// The region's `PROT_*` bits.
        prot: i32,
    },
    /// A range reaches beyond its RAM block.
    #[error(
        "range at {offset:#x} of {len:#x} bytes is outside RAM block {block} of {block_len:#x} bytes"
    )]
    OutOfBounds {
        /// Name of the RAM block.
        block: String,
        /// First byte of the range.
        offset: usize,
        /// Bytes of the range.
        len: usize,
        /// Bytes of the RAM block.
        block_len: usize,
    },
    /// An offset is not a multiple of what the access needs.
    #[error("offset {offset:#x} in RAM block {block} must be a multiple of {align}")]
    Unaligned {
        /// Name of the RAM block.
        block: String,
        /// The offset.
        offset: usize,
        /// Bytes that it must be a multiple of.
        align: usize,
    },
    /// A bitmap given for an answer is too short for the pages asked about.
    #[error("answer about {pages} pages needs {needed} words, got {got}")]
    AnswerTooShort {
        /// Pages asked about.
        pages: usize,
        /// Words needed.
        needed: usize,
        /// Words given.
        got: usize,
    },
    /// This process gets no userfaultfd, or none that works.
    #[error(
        "cannot bring pages as they are touched: userfaultfd needs read and write access to /dev/userfaultfd, root, or \
         vm.unprivileged_userfaultfd=1"
    )]
    NoUserfault {
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The RAM block's kind of memory can have no missing pages.
    #[error(
        "pages of RAM block {block} cannot be brought as they are touched: it is neither anonymous memory nor a memfd \
         or tmpfs file mapped shared, or has huge pages (hugetlbfs)"
    )]
    NotLazy {
        /// Name of the RAM block.
        block: String,
        /// The kernel's answer, where it was asked.
        #[source]
        source: Option<io::Error>,
    },
    /// The kernel refused a call on the RAM block's memory.
    #[error("cannot {action} RAM block {block} ({len:#x} bytes)")]
    Kernel {
        /// What was asked for, as a verb phrase ("map").
        action: &'static str,
        /// Name of the RAM block.
        block: String,
        /// Bytes concerned.
        len: usize,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}
