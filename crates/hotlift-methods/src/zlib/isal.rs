//! Compression by ISA-L's igzip.

use std::sync::OnceLock;

use super::{Compress, NAME, trial};
use crate::MethodError;
use crate::isal::{
    COMP_OK, FULL_FLUSH, Isal, LEVEL_2_BUFFER, LIBRARY, Stream, unavailable, zeroed_stream,
};

/// Returns the library if it is present and passes its test, which runs once per process.
///
/// # Errors
///
/// [`MethodError::Unavailable`] with the message of the loader or the test.
pub(super) fn isal() -> Result<&'static Isal, MethodError> {
    static TRIED: OnceLock<Result<(), String>> = OnceLock::new();
    let isal = Isal::for_method(NAME)?;
    TRIED
        .get_or_init(|| trial(&mut Deflate::with(isal)))
        .as_ref()
        .map_err(|reason| unavailable(NAME, reason))?;
    Ok(isal)
}

/// Compressor of a channel's raw deflate stream. Each packet ends with a full flush.
pub(super) struct Deflate {
    isal: &'static Isal,
    stream: Box<Stream>,
    /// Buffer for a block's literals and matches ("tokens"). `stream` contains a pointer to it.
    _level_buffer: Box<[u8]>,
}

// SAFETY: the pointers inside the stream lead to its own level buffer (each call sets next_in and next_out), and the library
// keeps nothing per thread.
unsafe impl Send for Deflate {}

impl Deflate {
    /// Returns a stream of igzip's level 2.
    ///
    /// # Errors
    ///
    /// [`MethodError::Unavailable`] if the library is missing.
    pub(super) fn new() -> Result<Self, MethodError> {
        Ok(Self::with(isal()?))
    }

    fn with(isal: &'static Isal) -> Self {
        let mut level_buffer = vec![0u8; LEVEL_2_BUFFER].into_boxed_slice();
        let mut stream = zeroed_stream();
        // SAFETY: the stream is zeroed memory of the library's layout with room to spare.
        unsafe { (isal.isal_deflate_init)(&raw mut *stream) };
        stream.level = 2;
        stream.level_buf = level_buffer.as_mut_ptr();
        stream.level_buf_size = u32::try_from(level_buffer.len()).unwrap_or(u32::MAX);
        // Raw deflate: zlib's wrapper is two bytes, which `mod` writes, and an Adler-32 trailer that no migration reaches.
        stream.gzip_flag = 0;
        stream.end_of_stream = 0;
        stream.flush = FULL_FLUSH;
        Self {
            isal,
            stream,
            _level_buffer: level_buffer,
        }
    }
}

impl Compress for Deflate {
    fn packet(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        let failed = |reason: String| MethodError::Library {
            method: NAME,
            library: LIBRARY,
            operation: "compress a packet",
            reason,
        };
        let avail_in = u32::try_from(pages.len())
            .map_err(|_| failed(format!("packet of {} bytes is too large", pages.len())))?;
        // The call copies the history that it needs, so `pages` may be freed afterwards.
        self.stream.next_in = pages.as_ptr();
        self.stream.avail_in = avail_in;
        // Pages that do not shrink are stored, at 5 bytes per 64 KiB; the rest is for small packets.
        out.reserve(pages.len() + pages.len() / 64 + 1024);
        loop {
            let free = u32::try_from(out.spare_capacity_mut().len()).unwrap_or(u32::MAX);
            self.stream.next_out = out.spare_capacity_mut().as_mut_ptr().cast();
            self.stream.avail_out = free;
            // SAFETY: the stream was initialised by the library and is exclusive (`&mut self`); next_in and next_out are valid
            // for avail_in and avail_out bytes.
            let code = unsafe { (self.isal.isal_deflate)(&raw mut *self.stream) };
            let written = free.saturating_sub(self.stream.avail_out);
            // SAFETY: the library wrote this number of bytes of the spare capacity.
            unsafe { out.set_len(out.len() + written as usize) };
            if code != COMP_OK {
                return Err(failed(format!("code {code}")));
            }
            // Unused output space means that the flush is complete.
            if self.stream.avail_out > 0 {
                break;
            }
            out.reserve(pages.len() / 4 + 1024);
        }
        if self.stream.avail_in > 0 {
            return Err(failed(format!("{} bytes not read", self.stream.avail_in)));
        }
        Ok(())
    }
}
