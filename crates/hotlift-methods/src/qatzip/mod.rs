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
//!
//! | file | subject |
//! |---|---|
//! | `encode`, `decode` | packets to members and back, on the CPU or by the hardware |
//! | `members` | what headers and trailers say |
//! | `device` | the hardware's part in a channel, until it fails for good |
//! | `session` | sessions of libqatzip, and memory that the hardware reads and writes |
//! | `sys` | libqatzip, opened at run time |

mod decode;
mod device;
mod encode;
mod members;
mod session;
mod sys;

use std::ops::RangeInclusive;

use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError, check, software};
use device::Device;
use session::Direction;

pub(crate) use crate::libdeflate::crc32;
pub(crate) use device::HARDWARE;

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
    check::level(NAME, &LEVELS, settings.level)?;
    let device = Device::open(settings.accelerator, Direction::Compress, settings.level)?;
    Ok(Box::new(encode::Encoder::new(device, settings.level)?))
}

pub(crate) fn decoder(accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    let device = Device::open(accelerator, Direction::Decompress, 1)?;
    Ok(Box::new(decode::Decoder::new(device)?))
}

/// An encoder by libqatzip's own software, which no channel uses: it is slower than ours, and without
/// a device each of its calls uses up one of the 1024 thread keys of a process. It shows that the
/// library is called rightly where there is no device, and what ours is compared with.
///
/// # Errors
///
/// [`MethodError::Level`] for a level outside of 1 to 9; [`MethodError::Unavailable`] without the
/// library.
pub fn library_encoder(level: u8) -> Result<Box<dyn Encode>, MethodError> {
    check::level(NAME, &LEVELS, level)?;
    let device = Device::software(Direction::Compress, level)?;
    Ok(Box::new(encode::Encoder::new(device, level)?))
}

/// A decoder by libqatzip's own software, see [`library_encoder`].
///
/// # Errors
///
/// [`MethodError::Unavailable`] without the library.
pub fn library_decoder() -> Result<Box<dyn Decode>, MethodError> {
    let device = Device::software(Direction::Decompress, 1)?;
    Ok(Box::new(decode::Decoder::new(device)?))
}

pub(crate) fn library() -> String {
    software::library(NAME)
}
