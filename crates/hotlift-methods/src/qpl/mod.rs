//! `qpl`: raw deflate pages, as Intel's IAA writes and reads them through libqpl.
//!
//! The payload is a table of lengths and the pages' streams without header or trailer (RFC 1951). QEMU's encoder limits output
//! to one byte less than a page, so that a page that does not shrink is sent uncompressed. Its decoders reject distances beyond
//! 4 KiB, which a page cannot have, and accept every kind of block.
//!
//! A device's job also reports success for a truncated stream, so the output's length is checked. The CPU does not use libqpl:
//! its software is slower than libdeflate and ISA-L.

mod jobs;
mod sys;

use crate::pagewise::{self, Direction, Service, Wrapper};
use crate::{Accelerator, Decode, Encode, EncoderSettings, Hardware, MethodError, software};

use jobs::Pool;
use sys::Library;

const NAME: &str = "qpl";

/// Accelerator of `qpl`.
pub(crate) static HARDWARE: Hardware =
    Hardware::new("Intel IAA", sys::SONAME, sys::VARIABLE, trial);

/// Passes a page through a hardware job and back.
fn trial() -> Result<String, String> {
    let name = Library::get()?.name();
    let trial = pagewise::trial(Wrapper::Raw, |direction| {
        Pool::open(Path::Hardware, direction)
    });
    trial.map_err(|reason| format!("{name}: {reason}"))?;
    Ok(name)
}

/// Executor of libqpl's jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// An IAA device.
    Hardware,
    /// libqpl itself, on the CPU.
    Software,
}

/// Returns an encoder that gives every page to libqpl on that path, for comparisons with ours.
///
/// # Errors
///
/// [`MethodError::Unavailable`] if the library is missing or has no jobs of that path.
pub fn encoder_by(path: Path) -> Result<Box<dyn Encode>, MethodError> {
    let service = service_by(path, Direction::Compress)?;
    let encoder = pagewise::Encoder::new(NAME, Wrapper::Raw, service)?;
    Ok(Box::new(encoder))
}

/// Returns a decoder that gives every page to libqpl, see [`encoder_by`].
///
/// # Errors
///
/// As for [`encoder_by`].
pub fn decoder_by(path: Path) -> Result<Box<dyn Decode>, MethodError> {
    let service = service_by(path, Direction::Decompress)?;
    let decoder = pagewise::Decoder::new(NAME, Wrapper::Raw, service)?;
    Ok(Box::new(decoder))
}

fn service_by(path: Path, direction: Direction) -> Result<Service, MethodError> {
    let pool = Library::get().and_then(|library| {
        let pool = Pool::open(path, direction)?;
        Ok((pool, format!("{}, {path:?} path", library.name())))
    });
    let (pool, what) = pool.map_err(|reason| MethodError::Unavailable {
        method: NAME,
        library: sys::SONAME,
        reason,
    })?;
    Ok(Service::on(pool, direction, &what))
}

fn service(accelerator: Accelerator, direction: Direction) -> Result<Service, MethodError> {
    Service::open(NAME, &HARDWARE, accelerator, direction, |direction| {
        Pool::open(Path::Hardware, direction)
    })
}

pub(crate) fn encoder(settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    let service = service(settings.accelerator, Direction::Compress)?;
    let encoder = pagewise::Encoder::new(NAME, Wrapper::Raw, service)?;
    Ok(Box::new(encoder))
}

pub(crate) fn decoder(accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    let service = service(accelerator, Direction::Decompress)?;
    let decoder = pagewise::Decoder::new(NAME, Wrapper::Raw, service)?;
    Ok(Box::new(decoder))
}

pub(crate) fn library() -> String {
    software::library(NAME)
}
