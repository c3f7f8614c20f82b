//! `uadk`: zlib pages, as HiSilicon's accelerator writes and reads them through libwd.
//!
//! The payload is a table of lengths and the pages' streams wrapped as zlib's (RFC 1950).
//!
//! A QEMU without the device sends uncompressed pages only, and rejects compressed ones. It does not report the device. So for
//! a QEMU, pages are compressed only if this host has the device: hosts of a cluster are alike, and operators choose `uadk` for
//! the device. Without it pages are sent uncompressed, which every QEMU reads. If the device fails later, the CPU compresses,
//! since the peer's device reads that too. A Hotlift always gets compressed pages, and reads them without a device.

mod session;
mod sys;

use crate::pagewise::{self, Direction, Service, Wrapper};
use crate::{
    Accelerator, Decode, Encode, EncoderSettings, Hardware, MethodError, RunsOn, software,
};

use session::{Session, ready};

const NAME: &str = "uadk";

/// Accelerator of `uadk`.
pub(crate) static HARDWARE: Hardware =
    Hardware::new("HiSilicon ZIP", sys::SONAME, sys::VARIABLE, trial);

/// Passes a page through a session and back.
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
