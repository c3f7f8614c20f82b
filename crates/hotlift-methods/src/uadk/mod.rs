//! `uadk`: zlib pages, as HiSilicon's accelerator writes and reads them through libwd.
//!
//! The payload is that of [`pagewise`], its streams wrapped as zlib's (RFC 1950). A QEMU without the
//! device sends every page as it is, and cannot read any other.

use crate::pagewise::{self, Wrapper};
use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError, software};

const NAME: &str = "uadk";

pub(crate) fn encoder(_settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    Ok(Box::new(pagewise::Encoder::new(NAME, Wrapper::Zlib)?))
}

pub(crate) fn decoder(_accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    Ok(Box::new(pagewise::Decoder::new(NAME, Wrapper::Zlib)?))
}

pub(crate) fn library() -> String {
    software::library(NAME)
}
