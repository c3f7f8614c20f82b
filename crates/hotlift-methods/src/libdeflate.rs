//! libdeflate: compresses or decompresses a complete stream in one call.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use libdeflate_sys::{
    libdeflate_adler32, libdeflate_alloc_compressor, libdeflate_alloc_decompressor,
    libdeflate_compressor, libdeflate_crc32, libdeflate_decompressor, libdeflate_deflate_compress,
    libdeflate_deflate_decompress_ex, libdeflate_free_compressor, libdeflate_free_decompressor,
    libdeflate_result, libdeflate_result_LIBDEFLATE_INSUFFICIENT_SPACE as TOO_LONG,
    libdeflate_result_LIBDEFLATE_SUCCESS as SUCCESS, libdeflate_zlib_decompress_ex,
};

use crate::MethodError;
use crate::target::Extent;

/// The library's name in messages.
pub(crate) const LIBRARY: &str = "libdeflate";

/// Format around the deflate blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrapper {
    /// No header or trailer: raw deflate (RFC 1951).
    Raw,
    /// A zlib header, and an Adler-32 that the decoder checks (RFC 1950).
    Zlib,
}

/// Result of decoding a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The stream is complete.
    Done {
        /// Bytes of input used.
        read: usize,
        /// Bytes of output written.
        written: usize,
    },
    /// The stream decodes to more bytes than the output has room for.
    TooLong,
    /// The stream is damaged or incomplete.
    Invalid,
}

pub(crate) struct Decompressor(NonNull<libdeflate_decompressor>);

// SAFETY: the decompressor is owned by this value alone and is not tied to a thread.
unsafe impl Send for Decompressor {}

impl Decompressor {
    /// Returns a decompressor. `method` is the method's name for errors.
    pub(crate) fn new(method: &'static str) -> Result<Self, MethodError> {
        // SAFETY: no preconditions; null is checked.
        let decompressor = NonNull::new(unsafe { libdeflate_alloc_decompressor() });
        decompressor.map(Self).ok_or_else(|| MethodError::Library {
            method,
            library: LIBRARY,
            operation: "make a decompressor",
            reason: "out of memory".to_owned(),
        })
    }

    /// Decodes the compressed stream at the start of `stream` into `extent`. A failed call may also have written to `extent`.
    ///
    /// # Safety
    ///
    /// The whole extent must be writable during the call.
    pub(crate) unsafe fn decompress(
        &mut self,
        wrapper: Wrapper,
        stream: &[u8],
        extent: Extent,
    ) -> Outcome {
        let call: unsafe extern "C" fn(_, _, _, _, _, _, _) -> libdeflate_result = match wrapper {
            Wrapper::Raw => libdeflate_deflate_decompress_ex,
            Wrapper::Zlib => libdeflate_zlib_decompress_ex,
        };
        let (mut read, mut written) = (0, 0);
        // SAFETY: the decompressor is live and exclusive (`&mut self`), the stream is a slice, and the caller permits writes to
        // the extent.
        let result = unsafe {
            call(
                self.0.as_ptr(),
                stream.as_ptr().cast(),
                stream.len(),
                extent.ptr.cast(),
                extent.len,
                &raw mut read,
                &raw mut written,
            )
        };
        match result {
            SUCCESS => Outcome::Done { read, written },
            TOO_LONG => Outcome::TooLong,
            _ => Outcome::Invalid,
        }
    }
}

impl Drop for Decompressor {
    fn drop(&mut self) {
        // SAFETY: the decompressor is live, and freed only here.
        unsafe { libdeflate_free_decompressor(self.0.as_ptr()) };
    }
}

/// Compressor to raw deflate streams.
pub(crate) struct Compressor(NonNull<libdeflate_compressor>);

// SAFETY: the compressor is owned by this value alone and is not tied to a thread.
unsafe impl Send for Compressor {}

impl Compressor {
    /// Returns a compressor of that level, 1 to 12. `method` is the method's name for errors.
    pub(crate) fn new(method: &'static str, level: u8) -> Result<Self, MethodError> {
        // SAFETY: no preconditions; null is checked.
        let compressor = NonNull::new(unsafe { libdeflate_alloc_compressor(c_int::from(level)) });
        compressor.map(Self).ok_or_else(|| MethodError::Library {
            method,
            library: LIBRARY,
            operation: "make a compressor",
            reason: "out of memory".to_owned(),
        })
    }

    /// Compresses `input` to one complete stream at the start of `room`. Returns the stream's length; `None` if the stream does
    /// not fit.
    pub(crate) fn compress(&mut self, input: &[u8], room: &mut [MaybeUninit<u8>]) -> Option<usize> {
        // SAFETY: the compressor is live and exclusive (`&mut self`); input and output are slices.
        let written = unsafe {
            libdeflate_deflate_compress(
                self.0.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                room.as_mut_ptr().cast(),
                room.len(),
            )
        };
        (written > 0).then_some(written)
    }
}

impl Drop for Compressor {
    fn drop(&mut self) {
        // SAFETY: the compressor is live, and freed only here.
        unsafe { libdeflate_free_compressor(self.0.as_ptr()) };
    }
}

/// Returns the Adler-32 of `bytes` (RFC 1950).
pub(crate) fn adler32(bytes: &[u8]) -> u32 {
    // SAFETY: reads the slice; 1 is the checksum of nothing.
    unsafe { libdeflate_adler32(1, bytes.as_ptr().cast(), bytes.len()) }
}

/// Returns the CRC-32 of `bytes` (RFC 1952).
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    // SAFETY: reads the slice; 0 is the checksum of nothing.
    unsafe { libdeflate_crc32(0, bytes.as_ptr().cast(), bytes.len()) }
}
