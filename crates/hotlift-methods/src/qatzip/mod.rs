//! `qatzip`: gzip members with QAT's extra field, as Intel's QATzip writes them ("gzip-ext").
//!
//! ```text
//!  0 1f 8b 08 04  4 time 0  8 XFL  9 OS ff  10 extra field of 12 (le16)  12 "QZ"  14 8 (le16)
//! 16 uncompressed bytes (le32)  20 bytes of deflate (le32)
//! 24 raw deflate | CRC-32 (le32) | uncompressed bytes (le32)
//! ```
//!
//! A packet is as many members as it takes; none is longer than the 64 KiB that the hardware works on
//! at once. QEMU's reader gunzips them by the hardware if their sizes allow, else in software. It has no
//! raw pages: a packet may grow, by 32 bytes a member and 5 a stored block.

mod decode;
mod encode;

use std::ops::RangeInclusive;

use crate::software;
use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError};

pub(crate) use crate::libdeflate::crc32;

const NAME: &str = "qatzip";

/// Levels as `multifd-qatzip-level` has them.
pub(crate) const LEVELS: RangeInclusive<u8> = 1..=9;

/// What every gzip member begins with.
const MAGIC: [u8; 2] = [0x1f, 0x8b];
/// Bytes of a header without its optional parts.
const HEADER: usize = 10;
/// Name of QAT's subfield.
const SUBFIELD: [u8; 2] = *b"QZ";
/// Bytes of that subfield: two sizes.
const EXTRA: usize = 8;
/// Bytes of a trailer: checksum and size.
const TRAILER: usize = 8;

pub(crate) fn encoder(settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    Ok(Box::new(encode::Encoder::new(settings.level)?))
}

pub(crate) fn decoder(_accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    Ok(Box::new(decode::Decoder::new()?))
}

pub(crate) fn library() -> String {
    software::library(NAME)
}
