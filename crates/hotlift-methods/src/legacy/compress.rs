//! Records of capability `compress` (`RAM_SAVE_FLAG_COMPRESS_PAGE`, QEMU up to 9.0): one complete
//! zlib stream a page.

use hotlift_mem::PAGE_SIZE;

use crate::MethodError;
use crate::libdeflate::{Decompressor, LIBRARY, Outcome, Wrapper};
use crate::target::Extent;

/// Name of the capability, in messages and reports.
pub const NAME: &str = "compress";

/// The libraries that compress at that level, and decompress.
#[must_use]
pub fn library(_level: u8) -> String {
    LIBRARY.to_owned()
}

/// Decodes records; one a thread.
pub struct Inflater(Decompressor);

impl Inflater {
    /// A decoder.
    ///
    /// # Errors
    ///
    /// [`MethodError::Library`] if memory runs out.
    pub fn new() -> Result<Self, MethodError> {
        Decompressor::new(NAME).map(Self)
    }

    /// Decodes a record's bytes into `page`, which holds anything after an error.
    ///
    /// # Errors
    ///
    /// What is wrong with the stream: [`MethodError::Damaged`] (the Adler-32 is part of it),
    /// [`MethodError::Leftover`], and [`MethodError::Short`] or [`MethodError::Long`] if it does not
    /// give exactly a page. QEMU accepts a short one, and the rest of the page stays as it was.
    pub fn inflate(
        &mut self,
        stream: &[u8],
        page: &mut [u8; PAGE_SIZE],
    ) -> Result<(), MethodError> {
        let extent = Extent {
            ptr: page.as_mut_ptr(),
            len: PAGE_SIZE,
        };
        // SAFETY: the extent is all of `page`, which is borrowed for writing.
        let outcome = unsafe { self.0.decompress(Wrapper::Zlib, stream, extent) };
        match outcome {
            Outcome::Done { read, .. } if read < stream.len() => Err(MethodError::Leftover {
                method: NAME,
                payload: stream.len(),
                left: stream.len() - read,
            }),
            Outcome::Done { written, .. } if written < PAGE_SIZE => {
                Err(MethodError::short(NAME, stream, PAGE_SIZE, written))
            }
            Outcome::Done { .. } => Ok(()),
            Outcome::TooLong => Err(MethodError::long(NAME, stream, PAGE_SIZE)),
            Outcome::Invalid => Err(MethodError::Damaged {
                method: NAME,
                reason: "no complete zlib stream",
            }),
        }
    }
}
