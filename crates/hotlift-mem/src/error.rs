//! Errors of guest memory.

use std::io;

/// A failure of guest memory. Each variant names its RAM block.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// A RAM block's name does not fit its length byte in the stream.
    #[error("name of a RAM block must have 1 to 255 bytes, got {got}")]
    Name {
        /// Length of the name in bytes.
        got: usize,
    },
    /// A RAM block's length is zero or not a whole number of pages.
    #[error("length of RAM block {block} must be a positive multiple of 4096, got {got}")]
    Length {
        /// Name of the RAM block.
        block: String,
        /// Requested length in bytes.
        got: usize,
    },
    /// A region for a RAM block does not start on a page boundary.
    #[error("RAM block {block} must start on a page, got address {address:#x}")]
    Address {
        /// Name of the RAM block.
        block: String,
        /// Host address of the region.
        address: usize,
    },
    /// A region for a RAM block is not both readable and writable.
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
        /// Start of the range in bytes.
        offset: usize,
        /// Length of the range in bytes.
        len: usize,
        /// Length of the RAM block in bytes.
        block_len: usize,
    },
    /// An offset has the wrong alignment for the access.
    #[error("offset {offset:#x} in RAM block {block} must be a multiple of {align}")]
    Unaligned {
        /// Name of the RAM block.
        block: String,
        /// Rejected offset in bytes.
        offset: usize,
        /// Required alignment in bytes.
        align: usize,
    },
    /// A bitmap for an answer is too short for the queried pages.
    #[error("answer about {pages} pages needs {needed} words, got {got}")]
    AnswerTooShort {
        /// Number of queried pages.
        pages: usize,
        /// Required number of words.
        needed: usize,
        /// Given number of words.
        got: usize,
    },
    /// This process cannot use userfaultfd, or a call of userfaultfd failed.
    #[error(
        "cannot serve page faults: userfaultfd needs read and write access to /dev/userfaultfd, root, or \
         vm.unprivileged_userfaultfd=1"
    )]
    NoUserfault {
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The RAM block's kind of memory does not support missing pages (userfaultfd).
    #[error(
        "cannot serve page faults of RAM block {block}: it is neither anonymous memory nor a memfd or tmpfs file mapped \
         shared, or has huge pages (hugetlbfs)"
    )]
    NotLazy {
        /// Name of the RAM block.
        block: String,
        /// The kernel's error; `None` if the kernel was not called.
        #[source]
        source: Option<io::Error>,
    },
    /// The kernel rejected a call on the RAM block's memory.
    #[error("cannot {action} RAM block {block} ({len:#x} bytes)")]
    Kernel {
        /// The action, as a verb phrase ("map").
        action: &'static str,
        /// Name of the RAM block.
        block: String,
        /// Length of the affected range in bytes.
        len: usize,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}
