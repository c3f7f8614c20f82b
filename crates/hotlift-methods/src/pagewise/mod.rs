//! A table of lengths, and each page compressed separately: payloads of qpl and uadk.
//!
//! ```text
//! length (be32) of each page | pages in sequence
//! ```
//!
//! A length of the page size means an uncompressed page; a smaller one means one complete deflate stream. Pages are
//! independent, so packets have no state. Distances inside a page are below the 4 KiB window of the accelerators.
//!
//! A device, if present, processes the pages ([`device`]). The CPU processes the pages that the device refuses or fails. Only
//! the CPU decides if a peer's page is damaged.

mod decode;
mod device;
mod encode;

use crate::libdeflate::adler32;
use crate::{MethodError, zlib};

pub(crate) use decode::Decoder;
pub(crate) use device::{Service, trial};
pub(crate) use encode::Encoder;

/// Bytes of one length in the table.
const ENTRY: usize = 4;

/// Format around a page's deflate stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrapper {
    /// No header or trailer: raw deflate (RFC 1951).
    Raw,
    /// zlib: a header of two bytes, and an Adler-32 as trailer (RFC 1950).
    Zlib,
}

/// The zlib header that HiSilicon's driver writes.
const ZLIB_HEADER: [u8; 2] = [0x78, 0x9c];
/// Bytes of an Adler-32.
const ADLER: usize = 4;

impl Wrapper {
    /// Returns the header before the deflate stream.
    fn header(self) -> &'static [u8] {
        match self {
            Self::Raw => &[],
            Self::Zlib => &ZLIB_HEADER,
        }
    }

    /// Returns the deflate stream after the header; `None` if `page` is shorter than the header.
    ///
    /// # Errors
    ///
    /// [`MethodError::Header`] if the header is invalid. `method` is the method's name for the error.
    fn skip_header<'a>(
        self,
        method: &'static str,
        page: &'a [u8],
    ) -> Result<Option<&'a [u8]>, MethodError> {
        match self {
            Self::Raw => Ok(Some(page)),
            Self::Zlib => zlib::skip_header(method, page),
        }
    }

    /// Returns the number of bytes of the trailer, after the deflate stream.
    fn trailer_len(self) -> usize {
        match self {
            Self::Raw => 0,
            Self::Zlib => ADLER,
        }
    }

    /// Appends the trailer to a stream. `page` is the uncompressed page.
    fn put_trailer(self, page: &[u8], out: &mut Vec<u8>) {
        if self == Self::Zlib {
            out.extend_from_slice(&adler32(page).to_be_bytes());
        }
    }
}
