//! Decodes blocks to pages.

use std::ffi::c_int;

use hotlift_mem::GuestRun;
use lz4_sys::LZ4_decompress_safe;

use super::{HEAD, NAME};
use crate::target::{Extent, Target};
use crate::{Decode, MethodError};

/// A channel's decompressor.
pub(super) struct Decoder {
    /// Buffer for a packet whose pages are not contiguous. Grows to the largest packet.
    scratch: Vec<u8>,
    failed: bool,
}

impl Decoder {
    pub(super) fn new() -> Self {
        Self {
            scratch: Vec::new(),
            failed: false,
        }
    }

    fn packet(&mut self, payload: &[u8], target: Target<'_>) -> Result<(), MethodError> {
        let expected = target.bytes();
        let Some((head, block)) = payload.split_first_chunk::<HEAD>() else {
            return Err(MethodError::short(NAME, payload, expected, 0));
        };
        let told = usize::try_from(u32::from_be_bytes(*head)).unwrap_or(usize::MAX);
        if told < expected {
            return Err(MethodError::short(NAME, payload, expected, told));
        }
        if told > expected {
            return Err(MethodError::long(NAME, payload, expected));
        }
        if let Some(extent) = target.contiguous() {
            return block_into(payload, block, extent);
        }
        if self.scratch.len() < expected {
            self.scratch.resize(expected, 0);
        }
        let extent = Extent {
            ptr: self.scratch.as_mut_ptr(),
            len: expected,
        };
        block_into(payload, block, extent)?;
        target.scatter(&self.scratch[..expected]);
        Ok(())
    }
}

/// Decodes `block` into all of `extent`: guest memory or the decoder's scratch. `payload` is the block with its 4-byte head.
fn block_into(payload: &[u8], block: &[u8], extent: Extent) -> Result<(), MethodError> {
    let damaged = MethodError::Damaged {
        method: NAME,
        reason: "no block of the pages",
    };
    let (Ok(len), Ok(room)) = (c_int::try_from(block.len()), c_int::try_from(extent.len)) else {
        return Err(damaged);
    };
    // SAFETY: the source is a slice; the extent may be written for its whole length. The call stays within both for any block.
    let written =
        unsafe { LZ4_decompress_safe(block.as_ptr().cast(), extent.ptr.cast(), len, room) };
    // Also negative if the block has too much output, or if input follows its end.
    let written = usize::try_from(written).map_err(|_| damaged)?;
    if written < extent.len {
        return Err(MethodError::short(NAME, payload, extent.len, written));
    }
    Ok(())
}

impl Decode for Decoder {
    fn decode(&mut self, payload: &[u8], pages: &[GuestRun<'_>]) -> Result<(), MethodError> {
        if self.failed {
            return Err(MethodError::Failed { method: NAME });
        }
        let result = self.packet(payload, Target::new(pages));
        self.failed = result.is_err();
        result
    }
}
