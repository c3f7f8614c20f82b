//! `uadk`: zlib pages, as HiSilicon's accelerator writes and reads them through libwd.
//!
//! The payload is a table of lengths and the pages' streams wrapped as zlib's (RFC 1950).
//!
//! A QEMU without the device sends every page as it is, and refuses any other. It does not say which
//! it is. So for a QEMU, pages are compressed only if this host has the device: hosts of a cluster are
//! alike, and who chose `uadk` for QEMUs chose it for the device. Without it pages travel as they are,
//! which every QEMU reads. What a device then fails to do is compressed on the CPU, since its peer's
//! device reads that as well. A Hotlift always gets pages compressed, and reads them without a device.

mod session;
mod sys;

use crate::pagewise::{self, Direction, Service, Wrapper};
use crate::{
    Accelerator, Decode, Encode, EncoderSettings, Hardware, MethodError, RunsOn, software,
};

use session::{Session, ready};

const NAME: &str = "uadk";

/// What does `uadk` where there is one.
pub(crate) static HARDWARE: Hardware =
    Hardware::new("HiSilicon ZIP", sys::SONAME, sys::VARIABLE, trial);

/// A page through a session and back.
fn trial() -> Result<String, String> {
    ready()?;
    pagewise::trial(Wrapper::Zlib, Session::open)
        .map_err(|reason| format!("libwd_comp: {reason}"))?;
    Ok(HARDWARE.file())
}

fn service(accelerator: Accelerator, direction: Direction) -> Result<Service, MethodError> {
    Service::open(NAME, &HARDWARE, accelerator, direction, Session::open)
}

pub(crate) fn encoder(settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    let service = service(settings.accelerator, Direction::Compress)?;
    let has_device = matches!(service.runs_on(), RunsOn::Hardware(_));
    let encoder = if has_device || settings.to_hotlift {
        pagewise::Encoder::new(NAME, Wrapper::Zlib, service)?
    } else {
        pagewise::Encoder::without_software(NAME, Wrapper::Zlib, service)
    };
    Ok(Box::new(encoder))
}

pub(crate) fn decoder(accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    let service = service(accelerator, Direction::Decompress)?;
    let decoder = pagewise::Decoder::new(NAME, Wrapper::Zlib, service)?;
    Ok(Box::new(decoder))
}

pub(crate) fn library() -> String {
    software::library(NAME)
}
