//! Decompression of a packet that needs no earlier one, by libdeflate.
//!
//! libdeflate decodes a complete stream in one call, into memory where it finds its own history: a
//! fifth faster than the decoders that may stop anywhere. A packet is not a complete stream, but one
//! more block makes it one: the flush has left it at a byte's boundary between two blocks.

use super::NAME;
use crate::MethodError;
use crate::libdeflate::{self, Decompressor, Wrapper};
use crate::target::Extent;

/// An empty stored block with the final bit, at a byte's boundary.
const END: [u8; 5] = [0x01, 0x00, 0x00, 0xff, 0xff];

pub(super) struct Whole {
    decompressor: Decompressor,
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

impl Whole {
    pub(super) fn new() -> Result<Self, MethodError> {
        Ok(Self {
            decompressor: Decompressor::new(NAME)?,
            stream: Vec::new(),
        })
    }

    /// Decodes `deflate`, which ends with a flush, into `extent`: guest runs or the decoder's
    /// scratch. Whatever the outcome, the extent may have been written.
    pub(super) fn decode(&mut self, deflate: &[u8], extent: Extent) -> Outcome {
        self.stream.clear();
        self.stream.extend_from_slice(deflate);
        self.stream.extend_from_slice(&END);
        let stream = &self.stream;
        // SAFETY: the extent is guest runs of the packet or the decoder's scratch.
        let outcome = unsafe { self.decompressor.decompress(Wrapper::Raw, stream, extent) };
        match outcome {
            libdeflate::Outcome::Done { read, written } if read == stream.len() => {
                Outcome::Decoded(written)
            }
            libdeflate::Outcome::Done { .. } => Outcome::Ended,
            libdeflate::Outcome::TooLong => Outcome::TooLong,
            libdeflate::Outcome::Invalid => Outcome::Invalid,
        }
    }
}
