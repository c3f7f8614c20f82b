//! `qpl`: raw deflate pages, as Intel's IAA writes and reads them through libqpl.
//!
//! The payload is that of [`pagewise`], its streams without header or trailer
//! (RFC 1951). QEMU's encoder leaves its job with a full page's room less a byte, so that a page that
//! does not shrink is sent as it is; its decoders refuse distances beyond 4 KiB, which a page cannot
//! have, and take every kind of block.
//!
//! Reading is libdeflate's in any case: it checks the length of what comes out, which libqpl does not.

use crate::pagewise::{self, Wrapper};
use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError, software};

const NAME: &str = "qpl";

pub(crate) fn encoder(_settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    Ok(Box::new(pagewise::Encoder::new(NAME, Wrapper::Raw)?))
}

pub(crate) fn decoder(_accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    Ok(Box::new(pagewise::Decoder::new(NAME, Wrapper::Raw)?))
}

pub(crate) fn library() -> String {
    software::library(NAME)
}
