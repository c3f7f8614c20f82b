//! A table of lengths and each page compressed for itself: payloads of qpl and uadk.
//!
//! ```text
//! length (be32) of each page | pages, one behind the other
//! ```
//!
//! A length of the page size says that the page is as it is; a smaller one, that it is one complete
//! deflate stream. No page needs another, so packets have no state. No distance inside a page can be
//! larger than the 4 KiB that the accelerators look back.
//!
//! A device does the pages where there is one ([`device`]), and the CPU those that it leaves. Only the
//! CPU's verdict makes a peer's page a bad one.

mod decode;
mod device;
mod encode;

use crate::libdeflate::adler32;
use crate::{MethodError, zlib};

pub(crate) use decode::Decoder;
pub(crate) use device::{Collected, Direction, Failure, PageDevice, Service, Submitted, trial};
pub(crate) use encode::Encoder;

/// Bytes of a table's entry.
const ENTRY: usize = 4;

/// What surrounds a page's deflate stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrapper {
    /// Nothing (RFC 1951).
    Raw,
    /// Two bytes before, an Adler-32 behind (RFC 1950).
    Zlib,
}

/// The zlib header that HiSilicon's driver writes.
const ZLIB_HEADER: [u8; 2] = [0x78, 0x9c];
/// Bytes of an Adler-32.
const ADLER: usize = 4;

impl Wrapper {
    /// What comes before the stream.
    fn header(self) -> &'static [u8] {
        match self {
            Self::Raw => &[],
            Self::Zlib => &ZLIB_HEADER,
        }
    }

    /// What follows the header of a page's stream; `None` if it ends before.
    ///
    /// # Errors
    ///
    /// [`MethodError::Header`] of `method`, if it has another header.
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

    /// Bytes behind the stream.
    fn trailer_len(self) -> usize {
        match self {
            Self::Raw => 0,
            Self::Zlib => ADLER,
        }
    }

    /// Appends what comes behind the stream of `page`.
    fn put_trailer(self, page: &[u8], out: &mut Vec<u8>) {
        if self == Self::Zlib {
            out.extend_from_slice(&adler32(page).to_be_bytes());
        }
    }
}
