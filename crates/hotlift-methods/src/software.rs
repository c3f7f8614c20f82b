//! Deflate of pages and gzip members on the CPU, for hosts without accelerators.
//!
//! Pages are compressed by igzip's level 0 with Huffman codes for each packet. On nine Silesia files this has 1.30 times the
//! ratio of libqpl (fixed codes, level 1) in 0.8 of its time, in both directions. libdeflate's level 1 gave another 5 % of
//! ratio on seven of the files, in three times the time.
//!
//! Gzip members of 64 KiB are compressed by igzip's level 2. It has 1.03 times the ratio of zlib's level 1 in a fifth of the
//! time. Its ratio is 3 % below that of libdeflate's level 1, in half the time.
//!
//! libdeflate compresses at the other levels, and at all levels if ISA-L is missing.

use std::mem::MaybeUninit;
use std::sync::OnceLock;

use hotlift_mem::PAGE_SIZE;

use crate::MethodError;
use crate::isal::{self, Isal, Stateless};
use crate::libdeflate::{self, Compressor, Decompressor, Outcome};
use crate::target::Extent;

/// Number of pages per sample page, from which Huffman codes are made. Codes from one page in 16 give 0.4 % less ratio than
/// codes from all pages, in half the time. Packets with fewer pages use the first page.
const SAMPLE: usize = 16;

/// Compresses pages or members, each to one final raw deflate stream.
pub(crate) enum Software {
    Isal(Stateless),
    Libdeflate(Compressor),
}

impl Software {
    /// Returns a compressor of pages by the best library of this machine. `method` is the method's name for errors.
    pub(crate) fn pages(method: &'static str) -> Result<Self, MethodError> {
        match usable(method) {
            Ok(isal) => Ok(Self::Isal(Stateless::with_sampled_codes(isal))),
            Err(_) => Compressor::new(method, 1).map(Self::Libdeflate),
        }
    }

    /// Returns a compressor of gzip members at that level, 1 to 9, by the best library of this machine.
    pub(crate) fn members(method: &'static str, level: u8) -> Result<Self, MethodError> {
        match usable(method) {
            Ok(isal) if level <= 2 => Ok(Self::Isal(Stateless::with_own_codes(isal))),
            _ => Compressor::new(method, level).map(Self::Libdeflate),
        }
    }

    /// Returns the name of the library.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Isal(_) => isal::LIBRARY,
            Self::Libdeflate(_) => libdeflate::LIBRARY,
        }
    }

    /// Makes the Huffman codes for the pages of a packet. Must be called before the packet's pages are compressed.
    pub(crate) fn begin(&mut self, method: &'static str, pages: &[u8]) -> Result<(), MethodError> {
        match self {
            Self::Isal(stateless) => stateless
                .learn(pages.chunks(PAGE_SIZE).step_by(SAMPLE))
                .map_err(|reason| failed(method, reason)),
            Self::Libdeflate(_) => Ok(()),
        }
    }

    /// Compresses `input` to one complete stream at the start of `room`. Returns the stream's length; `None` if the stream does
    /// not fit.
    pub(crate) fn compress(
        &mut self,
        method: &'static str,
        input: &[u8],
        room: &mut [MaybeUninit<u8>],
    ) -> Result<Option<usize>, MethodError> {
        match self {
            Self::Isal(stateless) => stateless
                .compress(input, room)
                .map_err(|reason| failed(method, reason)),
            Self::Libdeflate(compressor) => Ok(compressor.compress(input, room)),
        }
    }
}

fn failed(method: &'static str, reason: String) -> MethodError {
    MethodError::Library {
        method,
        library: isal::LIBRARY,
        operation: "compress",
        reason,
    }
}

/// Returns the names of the libraries that compress at the default level and that decompress.
pub(crate) fn library(method: &'static str) -> String {
    let compress = match usable(method) {
        Ok(isal) => isal.name(),
        Err(error) => format!("{} ({error})", libdeflate::LIBRARY),
    };
    format!("{compress}, receiving {}", libdeflate::LIBRARY)
}

/// Returns ISA-L if it is present and passes its test, which runs once per process.
fn usable(method: &'static str) -> Result<&'static Isal, MethodError> {
    static TRIED: OnceLock<Result<(), String>> = OnceLock::new();
    let isal = Isal::for_method(method)?;
    TRIED
        .get_or_init(|| {
            trial(Stateless::with_sampled_codes(isal))?;
            trial(Stateless::with_own_codes(isal))
        })
        .as_ref()
        .map_err(|reason| isal::unavailable(method, reason))?;
    Ok(isal)
}

/// Tests a compressor: compresses three kinds of pages and decodes them by libdeflate. The codes are sampled from one kind.
fn trial(mut stateless: Stateless) -> Result<(), String> {
    let mut noise = 0x9e37_79b9_u32;
    let mut page = |kind: usize| -> Vec<u8> {
        let bytes = (0..PAGE_SIZE).map(|i| {
            noise ^= noise << 13;
            noise ^= noise >> 17;
            noise ^= noise << 5;
            match kind {
                0 => b'a' + noise.to_le_bytes()[1] % 8,
                1 => b"hotlift"[i % 7],
                _ => noise.to_le_bytes()[0],
            }
        });
        bytes.collect()
    };
    let pages: Vec<Vec<u8>> = (0..3).map(&mut page).collect();
    let mut decompressor = Decompressor::new("trial").map_err(|error| error.to_string())?;
    stateless.learn(pages.iter().map(Vec::as_slice).take(1))?;
    for (kind, page) in pages.iter().enumerate() {
        let mut stream: Vec<u8> = Vec::with_capacity(2 * PAGE_SIZE);
        let written = stateless.compress(page, stream.spare_capacity_mut())?;
        let written = written.ok_or_else(|| format!("page {kind} does not fit into two"))?;
        if written > stream.capacity() {
            return Err(format!("page {kind}: more written than there was room for"));
        }
        // SAFETY: the library wrote this number of bytes of the capacity.
        unsafe { stream.set_len(written) };
        let mut back = vec![0; PAGE_SIZE];
        let extent = Extent {
            ptr: back.as_mut_ptr(),
            len: back.len(),
        };
        // SAFETY: the extent is all of `back`.
        let outcome = unsafe { decompressor.decompress(libdeflate::Wrapper::Raw, &stream, extent) };
        let whole = Outcome::Done {
            read: written,
            written: PAGE_SIZE,
        };
        if outcome != whole || back != *page {
            return Err(format!("page {kind} does not decode to its input"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_library_writes_streams_of_exactly_the_page_or_none() {
        let mut libraries = vec![Software::Libdeflate(
            Compressor::new("test", 1).expect("libdeflate"),
        )];
        match usable("test") {
            Ok(isal) => {
                libraries.push(Software::Isal(Stateless::with_sampled_codes(isal)));
                libraries.push(Software::Isal(Stateless::with_own_codes(isal)));
            }
            Err(error) => hotlift_testkit::skip!("isal", "{error}"),
        }
        let text = b"a guest's page of text ".repeat(200)[..PAGE_SIZE].to_vec();
        let noise: Vec<u8> = (0..PAGE_SIZE as u64)
            .map(|i| (i * i).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[1])
            .collect();
        let mut decompressor = Decompressor::new("test").expect("libdeflate");
        for library in &mut libraries {
            // The codes are made from the text only. The other pages use these codes too.
            library.begin("test", &text).expect("begin");
            for (page, fits) in [(&text, true), (&vec![0; PAGE_SIZE], true), (&noise, false)] {
                let mut stream = [MaybeUninit::uninit(); PAGE_SIZE - 1];
                let written = library.compress("test", page, &mut stream).expect("a page");
                assert_eq!(written.is_some(), fits);
                let Some(written) = written else { continue };
                // SAFETY: this number of bytes is written.
                let stream = unsafe { stream[..written].assume_init_ref() };
                let mut back = vec![0; PAGE_SIZE];
                let extent = Extent {
                    ptr: back.as_mut_ptr(),
                    len: back.len(),
                };
                // SAFETY: the extent is all of `back`.
                unsafe { decompressor.decompress(libdeflate::Wrapper::Raw, stream, extent) };
                assert_eq!(&back, page);
            }
        }
    }
}
