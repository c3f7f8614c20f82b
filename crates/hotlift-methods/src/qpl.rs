//! `qpl`: raw deflate pages, as Intel's IAA writes and reads them through libqpl.
//!
//! The payload is a table of lengths and the pages' streams without header or trailer (RFC 1951). QEMU's encoder limits output
//! to one byte less than a page. A page that does not shrink is sent uncompressed. QEMU's decoders reject distances beyond 4
//! KiB, which a page cannot have, and accept every kind of block.
//!
//! A device also reports success for a truncated stream, so the output's length is checked. The CPU does not use libqpl, whose
//! software is slower than libdeflate and ISA-L.

use crate::device::{Direction, Hardware};
use crate::pagewise::{self, Service, Wrapper};
use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError, software};

const NAME: &str = "qpl";

/// Name of the device for this method.
pub(crate) const DEVICE: &str = "Intel IAA";

/// Tests an accelerator before use: one device compresses a page, another decompresses the result.
///
/// # Errors
///
/// The reason, if a device cannot be opened, fails, or returns a wrong result.
pub fn trial(hardware: &Hardware) -> Result<(), String> {
    pagewise::trial(Wrapper::Raw, hardware)
}

pub(crate) fn encoder(settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    let service = Service::open(NAME, DEVICE, settings.accelerator, Direction::Compress)?;
    let encoder = pagewise::Encoder::new(NAME, Wrapper::Raw, service)?;
    Ok(Box::new(encoder))
}

pub(crate) fn decoder(accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    let service = Service::open(NAME, DEVICE, accelerator, Direction::Decompress)?;
    let decoder = pagewise::Decoder::new(NAME, Wrapper::Raw, service)?;
    Ok(Box::new(decoder))
}

pub(crate) fn library() -> String {
    software::library(NAME)
}
