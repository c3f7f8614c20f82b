//! `lz4`: an LZ4 block per packet, for links too fast for zstd. QEMU has no such method, so both sides must be Hotlifts.
//!
//! ```text
//! bytes of the pages (be32) | one LZ4 block
//! ```
//!
//! A block does not contain its decoded size, so the size comes before it. A wrong size is detected before any page is written.
//! Pages are never sent uncompressed: noise grows by 1/255.
//!
//! The C library is linked through lz4-sys. lz4_flex, in safe Rust, takes 1.25 times its time to decode and at least as much to
//! encode.

mod decode;
mod encode;

pub use encode::compressed_ratio;

use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError};

const NAME: &str = "lz4";
const LIBRARY: &str = "liblz4";

/// Bytes of the head before the block: the size of the pages.
const HEAD: usize = 4;

pub(crate) fn encoder(_settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    Ok(Box::new(encode::Encoder))
}

pub(crate) fn decoder(_accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    Ok(Box::new(decode::Decoder::new()))
}

pub(crate) fn library() -> String {
    // SAFETY: no preconditions.
    let version = unsafe { lz4_sys::LZ4_versionNumber() };
    let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
    format!("{LIBRARY} {major}.{minor}.{patch}")
}
