//! Records of capability `compress` (`RAM_SAVE_FLAG_COMPRESS_PAGE`, QEMU up to 9.0): one complete zlib stream per page.
//!
//! # Choice of the library
//!
//! Each level uses the fastest library whose compression ratio is at most 3 % below zlib's at the same level. Ratio and time
//! relative to zlib, on nine Silesia files (Cascade Lake, 2.5 GHz):
//!
//! | level | library | ratio | time |
//! |---|---|---|---|
//! | 1, 2, 3 | ISA-L's level 2 | 1.002, 0.993, 0.986 | 0.35 to 0.37 |
//! | 4, 5 | libdeflate 1 | 0.983, 0.972 | 0.42, 0.37 |
//! | 6, 7, 8 | libdeflate 2 | 0.986, 0.982, 0.981 | 0.53, 0.50, 0.45 |
//! | 9 | libdeflate 5 | 0.999 | 0.50 |
//!
//! Without ISA-L, levels 1 to 3 use libdeflate 1: 1.02 times the ratio and 0.48 of the time of zlib 1. A faster alternative is
//! ISA-L's level 0 with Huffman codes for 32 pages. It takes 0.25 of the time, but loses 2 % of ratio if the pages are similar.
//! If the pages differ from the samples, it loses much more.

use std::mem::MaybeUninit;

use hotlift_mem::{GuestRun, PAGE_SIZE};

use crate::libdeflate::{self, Compressor, Decompressor, Outcome, Wrapper, adler32};
use crate::software::{self, Software};
use crate::target::Extent;
use crate::{MethodError, check, zlib};

/// Name of the capability, in messages and reports.
pub const NAME: &str = "compress";

/// Levels of QEMU's `compress-level`; level 0 does not compress.
pub const LEVELS: std::ops::RangeInclusive<u8> = 0..=9;

/// Maximum bytes of a stream. With the 4-byte length before the stream, a record is shorter than a page.
const LONGEST: usize = PAGE_SIZE - 5;

/// Bytes of a stream before and after the deflate blocks.
const HEADER: usize = 2;
const TRAILER: usize = 4;

/// Returns the names of the libraries that compress at that level and that decompress.
#[must_use]
pub fn library(level: u8) -> String {
    match level {
        1..=3 => software::library(NAME),
        _ => libdeflate::LIBRARY.to_owned(),
    }
}

/// Encoder of pages; one per thread.
pub struct Deflater {
    /// Compression library; `None` at level 0.
    software: Option<Software>,
    header: [u8; HEADER],
}

impl Deflater {
    /// Returns an encoder of that level.
    ///
    /// # Errors
    ///
    /// [`MethodError::Level`] for a level outside of [`LEVELS`]; [`MethodError::Library`] if memory runs out.
    pub fn new(level: u8) -> Result<Self, MethodError> {
        check::level(NAME, &LEVELS, level)?;
        let libdeflate = |level| Compressor::new(NAME, level).map(Software::Libdeflate);
        let software = match level {
            0 => None,
            1..=3 => Some(Software::members(NAME, 1)?),
            4 | 5 => Some(libdeflate(1)?),
            6..=8 => Some(libdeflate(2)?),
            _ => Some(libdeflate(5)?),
        };
        Ok(Self {
            software,
            header: zlib::header(level),
        })
    }

    /// Compresses `page`, appends the stream to `out` and returns true. Returns false, with `out` unchanged, if the page does
    /// not shrink or the level is 0.
    ///
    /// # Errors
    ///
    /// [`MethodError::Library`] if the library fails.
    pub fn deflate(
        &mut self,
        page: &[u8; PAGE_SIZE],
        out: &mut Vec<u8>,
    ) -> Result<bool, MethodError> {
        let Some(software) = &mut self.software else {
            return Ok(false);
        };
        out.reserve(LONGEST);
        let room = &mut out.spare_capacity_mut()[..LONGEST];
        let blocks = &mut room[HEADER..LONGEST - TRAILER];
        let Some(length) = software.compress(NAME, page, blocks)? else {
            return Ok(false);
        };
        let length = length.min(blocks.len());
        put(&mut room[..HEADER], self.header);
        let trailer = adler32(page).to_be_bytes();
        put(&mut room[HEADER + length..][..TRAILER], trailer);
        // SAFETY: this number of bytes of the room is written: the header, the library's output, and the trailer.
        unsafe { out.set_len(out.len() + HEADER + length + TRAILER) };
        Ok(true)
    }
}

fn put<const N: usize>(room: &mut [MaybeUninit<u8>], bytes: [u8; N]) {
    for (room, byte) in room.iter_mut().zip(bytes) {
        room.write(byte);
    }
}

/// Decoder of records; one per thread.
pub struct Inflater(Decompressor);

impl Inflater {
    /// Returns a decoder.
    ///
    /// # Errors
    ///
    /// [`MethodError::Library`] if memory runs out.
    pub fn new() -> Result<Self, MethodError> {
        Decompressor::new(NAME).map(Self)
    }

    /// Decodes the stream of a record into `page`, in a buffer or in guest memory. After an error the page's content is
    /// undefined.
    ///
    /// # Errors
    ///
    /// - [`MethodError::Damaged`] if the stream is invalid or its Adler-32 is wrong.
    /// - [`MethodError::Leftover`] if bytes follow the stream.
    /// - [`MethodError::Short`] or [`MethodError::Long`] if the output is not exactly a page. QEMU accepts a short output and
    ///   leaves the rest of the page unchanged.
    pub fn inflate(&mut self, stream: &[u8], page: GuestRun<'_>) -> Result<(), MethodError> {
        let extent = Extent {
            ptr: page.as_ptr(),
            len: page.len(),
        };
        // SAFETY: the extent is all of the run, which is writable while it is borrowed.
        let outcome = unsafe { self.0.decompress(Wrapper::Zlib, stream, extent) };
        match outcome {
            Outcome::Done { read, .. } if read < stream.len() => Err(MethodError::Leftover {
                method: NAME,
                payload: stream.len(),
                left: stream.len() - read,
            }),
            Outcome::Done { written, .. } if written < page.len() => {
                Err(MethodError::short(NAME, stream, page.len(), written))
            }
            Outcome::Done { .. } => Ok(()),
            Outcome::TooLong => Err(MethodError::long(NAME, stream, page.len())),
            Outcome::Invalid => Err(MethodError::Damaged {
                method: NAME,
                reason: "no complete zlib stream",
            }),
        }
    }
}
