//! Errors of compression and decompression.

use crate::memory::OverMemoryLimit;

/// Failure to compress or decompress a packet, or to set a method up.
///
/// `method` is always the name of the method as in [`METHODS`](crate::METHODS).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MethodError {
    /// The level is out of the method's range.
    #[error("{method} level {level} is out of range {min}..={max}")]
    Level {
        /// Name of the method.
        method: &'static str,
        /// Requested level.
        level: u8,
        /// Lowest level.
        min: u8,
        /// Highest level.
        max: u8,
    },
    /// A library or a required accelerator is missing, or fails its test.
    #[error("{method}: {library} cannot be used: {reason}")]
    Unavailable {
        /// Name of the method.
        method: &'static str,
        /// Name of the library.
        library: &'static str,
        /// Message of the loader or the test.
        reason: String,
    },
    /// The library failed internally: out of memory, or an invalid call.
    #[error("{method}: {library} failed to {operation}: {reason}")]
    Library {
        /// Name of the method.
        method: &'static str,
        /// Name of the library.
        library: &'static str,
        /// Requested operation.
        operation: &'static str,
        /// Error text or code of the library.
        reason: String,
    },
    /// The packet to send has no page, or a partial page.
    #[error("{method}: {bytes} bytes to compress are not whole pages")]
    UnevenInput {
        /// Name of the method.
        method: &'static str,
        /// Size of the input in bytes.
        bytes: usize,
    },
    /// The payload does not begin with this method's header.
    #[error("{method}: payload begins with {got:02x?}, not as a {method} stream")]
    Header {
        /// Name of the method.
        method: &'static str,
        /// First two bytes of the payload.
        got: [u8; 2],
    },
    /// The payload ended before the pages were full.
    #[error("{method}: payload of {payload} bytes fills {got} of {expected} bytes of pages")]
    Short {
        /// Name of the method.
        method: &'static str,
        /// Size of the payload in bytes.
        payload: usize,
        /// Total size of the packet's pages in bytes.
        expected: usize,
        /// Bytes that the payload decodes to.
        got: usize,
    },
    /// The payload decodes to more bytes than the pages hold.
    #[error("{method}: payload of {payload} bytes gives more than {expected} bytes of pages")]
    Long {
        /// Name of the method.
        method: &'static str,
        /// Size of the payload in bytes.
        payload: usize,
        /// Total size of the packet's pages in bytes.
        expected: usize,
    },
    /// The pages are full, and input is left over.
    #[error("{method}: {left} of {payload} payload bytes are left over")]
    Leftover {
        /// Name of the method.
        method: &'static str,
        /// Size of the payload in bytes.
        payload: usize,
        /// Payload bytes that the decoder did not read.
        left: usize,
    },
    /// The payload does not end with a flush, so the pages may be incomplete.
    #[error("{method}: payload of {payload} bytes does not end with a flush")]
    NotFlushed {
        /// Name of the method.
        method: &'static str,
        /// Size of the payload in bytes.
        payload: usize,
    },
    /// The channel's compressed stream ended. Senders never end it before the migration completes.
    #[error("{method}: the stream ends inside the migration")]
    StreamEnd {
        /// Name of the method.
        method: &'static str,
    },
    /// The payload is not a valid stream.
    #[error("{method}: payload is damaged: {reason}")]
    Damaged {
        /// Name of the method.
        method: &'static str,
        /// The library's message.
        reason: &'static str,
    },
    /// The payload requires more memory than the limit allows.
    #[error("{method}: the stream's window is too large")]
    Memory {
        /// Name of the method.
        method: &'static str,
        /// The exceeded limit.
        #[source]
        source: OverMemoryLimit,
    },
    /// An earlier packet of the channel could not be decoded, so no later packet can be decoded either.
    #[error("{method}: an earlier packet of this channel could not be decoded")]
    Failed {
        /// Name of the method.
        method: &'static str,
    },
}

impl MethodError {
    /// Returns the error of a payload that ended after `got` of `expected` bytes.
    pub(crate) fn short(method: &'static str, payload: &[u8], expected: usize, got: usize) -> Self {
        Self::Short {
            method,
            payload: payload.len(),
            expected,
            got,
        }
    }

    /// Returns the error of a payload that continues after `expected` bytes.
    pub(crate) fn long(method: &'static str, payload: &[u8], expected: usize) -> Self {
        Self::Long {
            method,
            payload: payload.len(),
            expected,
        }
    }
}
