//! `zstd`: frames of libzstd.
//!
//! QEMU writes one frame per channel and never closes it: each packet ends with a flush. QEMU's reader also accepts closed
//! frames, one per packet, and so does Hotlift's. The level decides which frames a Hotlift writes ([`encode`]). The frames that
//! it reads may change from packet to packet ([`decode`]).
//!
//! libzstd 1.5.7 is linked through zstd-sys. A distribution's library is often older, and each release since 2022 made level 1
//! slightly faster.

mod decode;
mod encode;
mod memory;

use std::ffi::CStr;
use std::ops::RangeInclusive;

use zstd_sys::{ZSTD_getErrorName, ZSTD_isError, ZSTD_versionString};

use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError, check};

const NAME: &str = "zstd";
const LIBRARY: &str = "libzstd";

/// Levels of QEMU's `multifd-zstd-level`; 0 is libzstd's default, level 3.
pub(crate) const LEVELS: RangeInclusive<u8> = 0..=20;

/// Maximum window of a received stream, as a power of two: 2^27 bytes are 128 MiB. This is the limit of libzstd's streaming
/// decoder (`ZSTD_WINDOWLOG_LIMIT_DEFAULT`), and therefore of every QEMU.
///
/// Only this memory has a size that a peer chooses. [`Decode::limit_memory`] limits the sum of all channels. QEMU's levels need
/// at most 2^25 bytes.
pub const WINDOW_LOG_MAX: u8 = 27;

pub(crate) fn encoder(settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    check::level(NAME, &LEVELS, settings.level)?;
    Ok(Box::new(encode::Encoder::new(settings)?))
}

pub(crate) fn decoder(_accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    Ok(Box::new(decode::Decoder::new()?))
}

pub(crate) fn library() -> String {
    // SAFETY: returns a static NUL-terminated string.
    let version = unsafe { CStr::from_ptr(ZSTD_versionString()) };
    format!("{LIBRARY} {}", version.to_string_lossy())
}

/// Returns the value of a libzstd call, or the text of its error.
fn check(code: usize) -> Result<usize, &'static str> {
    // SAFETY: pure functions of the code; the name is a static NUL-terminated ASCII string.
    unsafe {
        if ZSTD_isError(code) == 0 {
            return Ok(code);
        }
        Err(CStr::from_ptr(ZSTD_getErrorName(code))
            .to_str()
            .unwrap_or("unknown error"))
    }
}

fn failed(operation: &'static str, reason: &str) -> MethodError {
    MethodError::Library {
        method: NAME,
        library: LIBRARY,
        operation,
        reason: reason.to_owned(),
    }
}
