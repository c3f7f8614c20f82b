//! Decompression of a packet that needs no earlier one, by libdeflate.
//!
//! libdeflate decodes a complete stream in one call, into memory where it finds its own history: a
//! fifth faster than the decoders that may stop anywhere. A packet is not a complete stream, but one
//! more block makes it one: the flush has left it at a byte's boundary between two blocks.

use std::ptr::NonNull;

use libdeflate_sys::{
    libdeflate_alloc_decompressor, libdeflate_decompressor, libdeflate_deflate_decompress_ex,
    libdeflate_free_decompressor, libdeflate_result_LIBDEFLATE_INSUFFICIENT_SPACE as TOO_LONG,
    libdeflate_result_LIBDEFLATE_SUCCESS as SUCCESS,
};

use super::NAME;
use crate::MethodError;
use crate::target::Extent;

/// The library's name in messages.
pub(super) const LIBRARY: &str = "libdeflate";

/// An empty stored block with the final bit, at a byte's boundary.
const END: [u8; 5] = [0x01, 0x00, 0x00, 0xff, 0xff];

pub(super) struct Whole {
    decompressor: NonNull<libdeflate_decompressor>,
    /// The packet with its end: payloads come from elsewhere and cannot be appended to. This copy is
    /// of compressed bytes, a hundredth of the time of decoding them.
    stream: Vec<u8>,
}

/// How a packet decoded without history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All of it, to that many bytes.
    Decoded(usize),
    /// It has more bytes than there was room for.
    TooLong,
    /// It ends the stream, at its own end or before.
    Ended,
    /// It is damaged, or needs earlier packets.
    Invalid,
}

// SAFETY: the decompressor is owned by this value alone and is not tied to a thread.
unsafe impl Send for Whole {}

impl Whole {
    pub(super) fn new() -> Result<Self, MethodError> {
        // SAFETY: no preconditions; null is checked.
        let decompressor = NonNull::new(unsafe { libdeflate_alloc_decompressor() });
        Ok(Self {
            decompressor: decompressor.ok_or_else(|| MethodError::Library {
                method: NAME,
                library: LIBRARY,
                operation: "make a decompressor",
                reason: "out of memory".to_owned(),
            })?,
            stream: Vec::new(),
        })
    }

    /// Decodes `deflate`, which ends with a flush, into `extent`. Whatever the outcome, the extent may
    /// have been written.
    pub(super) fn decode(&mut self, deflate: &[u8], extent: Extent) -> Outcome {
        self.stream.clear();
        self.stream.extend_from_slice(deflate);
        self.stream.extend_from_slice(&END);
        let (mut read, mut written) = (0, 0);
        // SAFETY: the decompressor is live and used by nobody else (`&mut self`), the stream is a
        // slice, and the extent is memory that this call may write for its whole length: guest runs
        // or the decoder's scratch.
        let result = unsafe {
            libdeflate_deflate_decompress_ex(
                self.decompressor.as_ptr(),
                self.stream.as_ptr().cast(),
                self.stream.len(),
                extent.ptr.cast(),
                extent.len,
                &raw mut read,
                &raw mut written,
            )
        };
        match result {
            SUCCESS if read == self.stream.len() => Outcome::Decoded(written),
            SUCCESS => Outcome::Ended,
            TOO_LONG => Outcome::TooLong,
            _ => Outcome::Invalid,
        }
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        // SAFETY: the decompressor is live, and freed only here.
        unsafe { libdeflate_free_decompressor(self.decompressor.as_ptr()) };
    }
}
