//! Compresses each input to one complete raw deflate stream, without history from earlier inputs.

use std::mem::MaybeUninit;

use super::sys::{
    COMP_OK, HUFFTABLE_CUSTOM, Histogram, Hufftables, LEVEL_2_BUFFER, NO_FLUSH, STATELESS_OVERFLOW,
    Stream,
};
use super::{Isal, zeroed, zeroed_stream};

/// Minimum frequency of each Huffman symbol: one in 1024 literals and lengths, one in 128 distances. This limits codes to about
/// 10 and 7 bits. A decoder then needs no second-level tables (libdeflate's first-level tables have 11 and 8 bits). Tables take
/// a quarter of a page's decode time. With these limits, `qpl` decodes in 0.88 of the time and loses 0.8 % of the ratio (nine
/// Silesia files, Xeon of 2.5 GHz).
const RAREST_LITERAL: u64 = 1024;
const RAREST_DISTANCE: u64 = 128;

/// A compressor of complete streams.
pub(crate) struct Stateless {
    isal: &'static Isal,
    stream: Box<Stream>,
    codes: Codes,
}

/// Origin of the Huffman codes.
enum Codes {
    /// Made before compression from samples of the input, for igzip's level 0. These codes cost almost no time. Compared with
    /// the library's default codes, they shrink the output by a fifth.
    Sampled {
        codes: Box<Hufftables>,
        histogram: Box<Histogram>,
    },
    /// Made from each input by igzip's level 2, which buffers the literals and matches ("tokens") of a block.
    Own { tokens: Box<[u8]> },
}

// SAFETY: the pointers inside the stream lead to `codes` and to the arguments of a call, and each call sets them; the library
// keeps nothing per thread.
unsafe impl Send for Stateless {}

impl Stateless {
    /// Returns a compressor of level 0, which must [learn](Self::learn) before it compresses.
    pub(crate) fn with_sampled_codes(isal: &'static Isal) -> Self {
        // SAFETY: all-zero bytes are valid for both: arrays of bytes.
        let (codes, histogram) = unsafe { (zeroed(), zeroed()) };
        Self {
            isal,
            stream: zeroed_stream(),
            codes: Codes::Sampled { codes, histogram },
        }
    }

    /// Returns a compressor of level 2.
    pub(crate) fn with_own_codes(isal: &'static Isal) -> Self {
        Self {
            isal,
            stream: zeroed_stream(),
            codes: Codes::Own {
                tokens: vec![0; LEVEL_2_BUFFER].into_boxed_slice(),
            },
        }
    }

    /// Makes the Huffman codes for the next calls of [`compress`](Self::compress) from samples of their input. Every symbol
    /// gets a code, so any input can be compressed. A compressor of level 2 ignores the samples.
    pub(crate) fn learn<'a>(
        &mut self,
        samples: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), String> {
        let Codes::Sampled { codes, histogram } = &mut self.codes else {
            return Ok(());
        };
        histogram.clear();
        for sample in samples {
            let len = i32::try_from(sample.len()).map_err(|error| error.to_string())?;
            // SAFETY: reads the slice and counts in our histogram.
            unsafe {
                (self.isal.isal_update_histogram)(sample.as_ptr(), len, &raw mut **histogram);
            }
        }
        histogram.raise(RAREST_LITERAL, RAREST_DISTANCE);
        // SAFETY: both are memory of the library's layout with room to spare.
        let code =
            unsafe { (self.isal.isal_create_hufftables)(&raw mut **codes, &raw mut **histogram) };
        if code != COMP_OK {
            return Err(format!("no Huffman codes: {code}"));
        }
        Ok(())
    }

    /// Compresses `input` to one complete stream at the start of `room`. Returns the stream's length; `None` if the stream does
    /// not fit.
    pub(crate) fn compress(
        &mut self,
        input: &[u8],
        room: &mut [MaybeUninit<u8>],
    ) -> Result<Option<usize>, String> {
        let stream = &mut *self.stream;
        // SAFETY: the stream is zeroed or used memory of the library's layout with room to spare.
        unsafe { (self.isal.isal_deflate_stateless_init)(&raw mut *stream) };
        match &mut self.codes {
            Codes::Sampled { codes, .. } => {
                // SAFETY: the stream is initialised; the codes were made by the library and outlive
                // the call.
                let code = unsafe {
                    (self.isal.isal_deflate_set_hufftables)(
                        &raw mut *stream,
                        &raw mut **codes,
                        HUFFTABLE_CUSTOM,
                    )
                };
                if code != COMP_OK {
                    return Err(format!("codes not taken: {code}"));
                }
            }
            Codes::Own { tokens } => {
                stream.level = 2;
                stream.level_buf = tokens.as_mut_ptr();
                stream.level_buf_size = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            }
        }
        let count = |len: usize| u32::try_from(len).map_err(|error| error.to_string());
        stream.end_of_stream = 1;
        stream.flush = NO_FLUSH;
        stream.next_in = input.as_ptr();
        stream.avail_in = count(input.len())?;
        stream.next_out = room.as_mut_ptr().cast();
        stream.avail_out = count(room.len())?;
        // SAFETY: the stream is initialised and exclusive (`&mut self`); next_in and next_out are valid for avail_in and
        // avail_out bytes.
        match unsafe { (self.isal.isal_deflate_stateless)(&raw mut *stream) } {
            COMP_OK => Ok(Some(room.len().saturating_sub(stream.avail_out as usize))),
            STATELESS_OVERFLOW => Ok(None),
            code => Err(format!("code {code}")),
        }
    }
}
