//! One final raw deflate stream a call, with no memory of earlier ones.

use std::mem::MaybeUninit;

use super::sys::{
    COMP_OK, HUFFTABLE_CUSTOM, Histogram, Hufftables, NO_FLUSH, STATELESS_OVERFLOW, Stream,
};
use super::{Isal, zeroed, zeroed_stream};

/// igzip's level 0 with Huffman codes made from samples.
///
/// Level 0 writes tokens as it finds them, by codes that stand before it starts. Its own codes are
/// made for no data in particular; those of a packet's sample cost next to nothing more and shrink
/// the output by a fifth.
pub(crate) struct Stateless {
    isal: &'static Isal,
    stream: Box<Stream>,
    codes: Box<Hufftables>,
    histogram: Box<Histogram>,
}

// SAFETY: the pointers inside the stream lead to `codes` and to the arguments of a call, and are set
// anew at each; the library keeps nothing per thread.
unsafe impl Send for Stateless {}

impl Stateless {
    /// A compressor, which must [learn](Self::learn) before it compresses.
    pub(crate) fn new(isal: &'static Isal) -> Self {
        // SAFETY: all-zero bytes are valid for both: arrays of bytes.
        let (codes, histogram) = unsafe { (zeroed(), zeroed()) };
        Self {
            isal,
            stream: zeroed_stream(),
            codes,
            histogram,
        }
    }

    /// Makes the codes of the next calls from samples of what they will compress. Every symbol gets a
    /// code, so that anything can be compressed by them.
    pub(crate) fn learn<'a>(
        &mut self,
        samples: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), String> {
        self.histogram.clear();
        for sample in samples {
            let len = i32::try_from(sample.len()).map_err(|error| error.to_string())?;
            // SAFETY: reads the slice, counts in the histogram, which is ours.
            unsafe {
                (self.isal.update_histogram)(sample.as_ptr(), len, &raw mut *self.histogram);
            }
        }
        // SAFETY: both are memory of the library's layout with room to spare.
        let code = unsafe {
            (self.isal.create_hufftables)(&raw mut *self.codes, &raw mut *self.histogram)
        };
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
        unsafe { (self.isal.stateless_init)(&raw mut *stream) };
        // SAFETY: the stream is initialised; the codes were made by the library and outlive the call.
        let code = unsafe {
            (self.isal.set_hufftables)(&raw mut *stream, &raw mut *self.codes, HUFFTABLE_CUSTOM)
        };
        if code != COMP_OK {
            return Err(format!("codes not taken: {code}"));
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
        match unsafe { (self.isal.deflate_stateless)(&raw mut *stream) } {
            COMP_OK => Ok(Some(room.len().saturating_sub(stream.avail_out as usize))),
            STATELESS_OVERFLOW => Ok(None),
            code => Err(format!("code {code}")),
        }
    }
}
