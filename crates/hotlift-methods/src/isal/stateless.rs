//! One final raw deflate stream a call, with no memory of earlier ones.

use std::mem::MaybeUninit;

use super::sys::{
    COMP_OK, HUFFTABLE_CUSTOM, Histogram, Hufftables, LEVEL_2_BUFFER, NO_FLUSH, STATELESS_OVERFLOW,
    Stream,
};
use super::{Isal, zeroed, zeroed_stream};

/// What each symbol counts for at least, as a part of all: one of 1024 literals and lengths, one of 128
/// distances. No code is then much longer than 10 and 7 bits, so the tables of a decoder (libdeflate's
/// first ones have 11 and 8) are small and need no second ones. A page's tables are a quarter of the
/// time to decode it: qpl takes 0.88 of the time that it takes without, for 0.8 % of the ratio (nine
/// Silesia files, Xeon of 2.5 GHz).
const RAREST_LITERAL: u64 = 1024;
const RAREST_DISTANCE: u64 = 128;

/// A compressor of complete streams.
pub(crate) struct Stateless {
    isal: &'static Isal,
    stream: Box<Stream>,
    codes: Codes,
}

/// Where the Huffman codes come from.
enum Codes {
    /// From samples, by igzip's level 0: it writes tokens as it finds them, by codes that stand before
    /// it starts. Its own codes are made for no data in particular; those of a packet's sample cost
    /// next to nothing more and shrink the output by a fifth.
    Sampled {
        codes: Box<Hufftables>,
        histogram: Box<Histogram>,
    },
    /// From the input, by igzip's level 2, which keeps the tokens of a block until then.
    Own { tokens: Box<[u8]> },
}

// SAFETY: the pointers inside the stream lead to `codes` and to the arguments of a call, and are set
// anew at each; the library keeps nothing per thread.
unsafe impl Send for Stateless {}

impl Stateless {
    /// A compressor of level 0, which must [learn](Self::learn) before it compresses.
    pub(crate) fn with_sampled_codes(isal: &'static Isal) -> Self {
        // SAFETY: all-zero bytes are valid for both: arrays of bytes.
        let (codes, histogram) = unsafe { (zeroed(), zeroed()) };
        Self {
            isal,
            stream: zeroed_stream(),
            codes: Codes::Sampled { codes, histogram },
        }
    }

    /// A compressor of level 2.
    pub(crate) fn with_own_codes(isal: &'static Isal) -> Self {
        Self {
            isal,
            stream: zeroed_stream(),
            codes: Codes::Own {
                tokens: vec![0; LEVEL_2_BUFFER].into_boxed_slice(),
            },
        }
    }

    /// Makes the codes of the next calls from samples of what they will compress. Every symbol gets a
    /// code, so that anything can be compressed by them. A compressor with its own codes needs none.
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
            // SAFETY: reads the slice, counts in the histogram, which is ours.
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

    /// Compresses `input` to one final stream at the start of `room`; its length, or `None` if it
    /// does not fit.
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
        // SAFETY: the stream is initialised and ours alone (`&mut self`); next_in and next_out are
        // valid for avail_in and avail_out bytes.
        match unsafe { (self.isal.isal_deflate_stateless)(&raw mut *stream) } {
            COMP_OK => Ok(Some(room.len().saturating_sub(stream.avail_out as usize))),
            STATELESS_OVERFLOW => Ok(None),
            code => Err(format!("code {code}")),
        }
    }
}
