//! Compression and decompression for the simulated devices, by libdeflate.

use libdeflate_sys::{
    libdeflate_alloc_compressor, libdeflate_alloc_decompressor, libdeflate_deflate_compress,
    libdeflate_deflate_decompress, libdeflate_free_compressor, libdeflate_free_decompressor,
    libdeflate_result_LIBDEFLATE_INSUFFICIENT_SPACE as TOO_LONG,
    libdeflate_result_LIBDEFLATE_SUCCESS as SUCCESS,
};

/// Reason why there is no output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The output is larger than its buffer.
    DoesNotFit,
    /// The input is not a valid stream.
    Damaged,
}

/// Compresses `input` to one raw deflate stream at the start of `room`; returns its length.
pub(crate) fn compress(input: &[u8], room: &mut [u8]) -> Result<usize, Failed> {
    // SAFETY: input and output are slices; the compressor lives for the call and is null-checked.
    let written = unsafe {
        let compressor = libdeflate_alloc_compressor(1);
        if compressor.is_null() {
            return Err(Failed::DoesNotFit);
        }
        let written = libdeflate_deflate_compress(
            compressor,
            input.as_ptr().cast(),
            input.len(),
            room.as_mut_ptr().cast(),
            room.len(),
        );
        libdeflate_free_compressor(compressor);
        written
    };
    if written == 0 {
        return Err(Failed::DoesNotFit);
    }
    Ok(written)
}

/// Decompresses the raw deflate stream at the start of `stream` to the start of `room`; returns the output's length.
pub(crate) fn decompress(stream: &[u8], room: &mut [u8]) -> Result<usize, Failed> {
    let mut written = 0;
    // SAFETY: input and output are slices; the decompressor lives for the call and is null-checked.
    let result = unsafe {
        let decompressor = libdeflate_alloc_decompressor();
        if decompressor.is_null() {
            return Err(Failed::Damaged);
        }
        let result = libdeflate_deflate_decompress(
            decompressor,
            stream.as_ptr().cast(),
            stream.len(),
            room.as_mut_ptr().cast(),
            room.len(),
            &raw mut written,
        );
        libdeflate_free_decompressor(decompressor);
        result
    };
    match result {
        SUCCESS => Ok(written),
        TOO_LONG => Err(Failed::DoesNotFit),
        _ => Err(Failed::Damaged),
    }
}
