//! `qatzip`: gzip members with QAT's extra field, as Intel's QATzip writes them ("gzip-ext").
//!
//! ```text
//!  0 1f 8b 08 04  4 time 0  8 XFL  9 OS ff  10 extra field of 12 (le16)  12 "QZ"  14 8 (le16)
//! 16 uncompressed bytes (le32)  20 bytes of deflate (le32)
//! 24 raw deflate | CRC-32 (le32) | uncompressed bytes (le32)
//! ```
//!
//! A packet has any number of members, each of at most 64 KiB: the hardware processes that much at once. QEMU's reader decodes
//! members by hardware if their sizes permit it, and otherwise in software. Pages are never sent uncompressed: a packet may
//! grow by 32 bytes per member and 5 bytes per stored block.
//!
//! | file | subject |
//! |---|---|
//! | `encode`, `decode` | conversion of packets to members and back, on the CPU or by the hardware |
//! | `members` | parser of headers and trailers |
//! | `device` | use of the hardware by a channel, until it fails permanently |

mod decode;
mod device;
mod encode;
mod members;

use std::ops::RangeInclusive;

use crate::device::Direction;
use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError, check, software};
use device::Device;

pub(crate) use crate::libdeflate::crc32;
pub use device::trial;
pub use members::{LARGEST as LARGEST_MEMBER, SMALLEST as SMALLEST_MEMBER};

const NAME: &str = "qatzip";

/// Name of the device for this method.
pub(crate) const DEVICE: &str = "Intel QAT";

/// Levels of QEMU's `multifd-qatzip-level`.
pub(crate) const LEVELS: RangeInclusive<u8> = 1..=9;

/// Magic bytes of gzip members.
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

pub(crate) fn library() -> String {
    software::library(NAME)
}
