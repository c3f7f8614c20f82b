//! Decompression by libdeflate of a packet that needs no earlier packet.
//!
//! libdeflate decodes a complete stream in one call and finds its history in the output. This is a fifth faster than decoders
//! that can stop anywhere. A packet is not a complete stream, but one more block completes it: the flush left it at a byte
//! boundary between two blocks.

use super::NAME;
use crate::MethodError;
use crate::libdeflate::{self, Decompressor, Wrapper};
use crate::target::Extent;

/// An empty stored block with the final bit, at a byte's boundary.
const END: [u8; 5] = [0x01, 0x00, 0x00, 0xff, 0xff];

pub(super) struct Whole {
    decompressor: Decompressor,
    /// Copy of the packet with the final block appended. The copy takes a hundredth of the decode time.
    stream: Vec<u8>,
}

/// Result of decoding a packet without history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Decoded completely, to this number of bytes.
    Decoded(usize),
    /// The packet decodes to more bytes than the extent has.
    TooLong,
    /// The packet contains a final block, which ends the channel's stream.
    Ended,
    /// The packet is damaged, or needs earlier packets.
    Invalid,
}

impl Whole {
    pub(super) fn new() -> Result<Self, MethodError> {
        Ok(Self {
            decompressor: Decompressor::new(NAME)?,
            stream: Vec::new(),
        })
    }

    /// Decodes `deflate`, which ends with a flush, into `extent`: guest runs or the decoder's scratch. A failed call may also
    /// have written to `extent`.
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
