//! What can go wrong with a packet's payload.

use crate::memory::OverMemoryLimit;

/// Why a packet could not be compressed or decompressed, or a method not be set up.
///
/// `method` is always the name of the method as in [`METHODS`](crate::METHODS).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MethodError {
    /// The level is outside of the method's range.
    #[error("{method} level {level} is out of range {min}..={max}")]
    Level {
        /// Name of the method.
        method: &'static str,
        /// The level asked for.
        level: u8,
        /// Lowest level.
        min: u8,
        /// Highest level.
        max: u8,
    },
    /// A library is missing or does not do what it should.
    #[error("{method}: {library} cannot be used: {reason}")]
    Unavailable {
        /// Name of the method.
        method: &'static str,
        /// Name of the library.
        library: &'static str,
        /// What the loader or the trial said.
        reason: String,
    },
    /// The library failed on its own account: out of memory, or a call it does not accept.
    #[error("{method}: {library} failed to {operation}: {reason}")]
    Library {
        /// Name of the method.
        method: &'static str,
        /// Name of the library.
        library: &'static str,
        /// What was asked of it.
        operation: &'static str,
        /// Its error text or code.
        reason: String,
    },
    /// The packet to send holds no page, or a part of a page.
    #[error("{method}: {bytes} bytes to compress are not whole pages")]
    UnevenInput {
        /// Name of the method.
        method: &'static str,
        /// Bytes given.
        bytes: usize,
    },
    /// The payload does not begin as a stream of this method must.
    #[error("{method}: payload begins with {got:02x?}, which no {method} stream does")]
    Header {
        /// Name of the method.
        method: &'static str,
        /// The bytes read.
        got: [u8; 2],
    },
    /// The payload ended before the pages were full.
    #[error("{method}: payload of {payload} bytes fills {got} of {expected} bytes of pages")]
    Short {
        /// Name of the method.
        method: &'static str,
        /// Bytes of the payload.
        payload: usize,
        /// Bytes of the packet's pages.
        expected: usize,
        /// Bytes that the payload gave.
        got: usize,
    },
    /// The payload gives more bytes than the pages hold.
    #[error("{method}: payload of {payload} bytes gives more than {expected} bytes of pages")]
    Long {
        /// Name of the method.
        method: &'static str,
        /// Bytes of the payload.
        payload: usize,
        /// Bytes of the packet's pages.
        expected: usize,
    },
    /// The pages are full, and bytes of the payload were not needed.
    #[error("{method}: {left} of {payload} payload bytes are left over")]
    Leftover {
        /// Name of the method.
        method: &'static str,
        /// Bytes of the payload.
        payload: usize,
        /// Bytes not read.
        left: usize,
    },
    /// The payload does not end with a flush, so the packet's pages cannot be known to be complete.
    #[error("{method}: payload of {payload} bytes does not end with a flush")]
    NotFlushed {
        /// Name of the method.
        method: &'static str,
        /// Bytes of the payload.
        payload: usize,
    },
    /// The stream was ended, which no sender does before the migration is over.
    #[error("{method}: the stream ends inside the migration")]
    StreamEnd {
        /// Name of the method.
        method: &'static str,
    },
    /// The payload is no valid stream.
    #[error("{method}: payload is damaged: {reason}")]
    Damaged {
        /// Name of the method.
        method: &'static str,
        /// The library's words.
        reason: &'static str,
    },
    /// The payload asks for more memory than there is for it.
    #[error("{method}: the stream's window is too large")]
    Memory {
        /// Name of the method.
        method: &'static str,
        /// What it asks for, and what there is.
        #[source]
        source: OverMemoryLimit,
    },
    /// An earlier packet of the channel failed, so the state that this one needs is lost.
    #[error("{method}: an earlier packet of this channel could not be decoded")]
    Failed {
        /// Name of the method.
        method: &'static str,
    },
}

impl MethodError {
    /// A payload that ended after `got` of `expected` bytes.
    pub(crate) fn short(method: &'static str, payload: &[u8], expected: usize, got: usize) -> Self {
        Self::Short {
            method,
            payload: payload.len(),
            expected,
            got,
        }
    }

    /// A payload that goes on after `expected` bytes.
    pub(crate) fn long(method: &'static str, payload: &[u8], expected: usize) -> Self {
        Self::Long {
            method,
            payload: payload.len(),
            expected,
        }
    }
}
