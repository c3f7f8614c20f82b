//! Compression by zlib-rs: levels 0 and 3 to 9, and all levels if ISA-L is missing.

use zlib_rs::{Deflate, DeflateFlush, Status};

use super::{Compress, NAME};
use crate::MethodError;

/// The library's name in messages.
pub(super) const LIBRARY: &str = "zlib-rs";

/// Compressor of a channel's raw deflate stream. Each packet ends with a full flush.
pub(super) struct Portable {
    deflate: Deflate,
    /// Output buffer: zlib-rs writes only to initialised memory. Its content is then copied to the caller's vector.
    /// Initialising that vector for each packet would take longer.
    piece: Box<[u8]>,
}

/// Bytes compressed before they are copied out.
const PIECE: usize = 64 * 1024;

impl Portable {
    /// Returns a stream of that level of zlib-rs, 0 to 9.
    pub(super) fn new(level: u8) -> Self {
        Self {
            deflate: Deflate::new(i32::from(level), false, 15),
            piece: vec![0; PIECE].into_boxed_slice(),
        }
    }
}

impl Compress for Portable {
    fn packet(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        let failed = |reason: &str| MethodError::Library {
            method: NAME,
            library: LIBRARY,
            operation: "compress a packet",
            reason: reason.to_owned(),
        };
        let mut input = pages;
        loop {
            let (read, written) = (self.deflate.total_in(), self.deflate.total_out());
            let status = self
                .deflate
                .compress(input, &mut self.piece, DeflateFlush::FullFlush)
                .map_err(|error| failed(error.as_str()))?;
            let taken = |total: u64, before: u64, all: usize| {
                usize::try_from(total - before).map_or(all, |n| n.min(all))
            };
            input = &input[taken(self.deflate.total_in(), read, input.len())..];
            let made = taken(self.deflate.total_out(), written, self.piece.len());
            out.extend_from_slice(&self.piece[..made]);
            // A flush is complete when it leaves output space (zlib's rule). `BufError` means that the output is empty: the
            // flush ended exactly at the end of the piece.
            if made < self.piece.len() || status == Status::BufError {
                break;
            }
        }
        if !input.is_empty() {
            return Err(failed("input not read"));
        }
        Ok(())
    }
}
