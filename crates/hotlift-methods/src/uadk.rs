//! `uadk`: zlib pages, as HiSilicon's accelerator writes and reads them through libwd.
//!
//! The payload is a table of lengths, and a zlib stream (RFC 1950) for each page.
//!
//! A QEMU without the device sends only uncompressed pages and rejects compressed ones. It does not report if it has the
//! device. So the encoder compresses for a QEMU only if this host has the device: operators choose `uadk` for the device, and
//! hosts of a cluster are alike. Without the device, pages are sent uncompressed, which every QEMU reads. If the device fails
//! later, the CPU compresses: the QEMU's device reads these pages too. A Hotlift always gets compressed pages, and reads them
//! without a device.

use crate::device::{Direction, Hardware};
use crate::pagewise::{self, Service, Wrapper};
use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError, RunsOn, software};

const NAME: &str = "uadk";

/// Name of the device for this method.
pub(crate) const DEVICE: &str = "HiSilicon ZIP";

/// Tests an accelerator before use: one device compresses a page, another decompresses the result.
///
/// # Errors
///
/// The reason, if a device cannot be opened, fails, or returns a wrong result.
pub fn trial(hardware: &Hardware) -> Result<(), String> {
    pagewise::trial(Wrapper::Zlib, hardware)
}

pub(crate) fn encoder(settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    let service = Service::open(NAME, DEVICE, settings.accelerator, Direction::Compress)?;
    let has_device = matches!(service.runs_on(), RunsOn::Hardware(_));
    let encoder = if has_device || settings.to_hotlift {
        pagewise::Encoder::new(NAME, Wrapper::Zlib, service)?
    } else {
        pagewise::Encoder::without_software(NAME, Wrapper::Zlib, service)
    };
    Ok(Box::new(encoder))
}

pub(crate) fn decoder(accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    let service = Service::open(NAME, DEVICE, accelerator, Direction::Decompress)?;
    let decoder = pagewise::Decoder::new(NAME, Wrapper::Zlib, service)?;
    Ok(Box::new(decoder))
}

pub(crate) fn library() -> String {
    software::library(NAME)
}
