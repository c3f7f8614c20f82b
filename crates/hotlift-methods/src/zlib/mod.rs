//! `zlib`: one zlib stream per channel, never ended (RFC 1950 and 1951).
//!
//! ```text
//! first packet of a channel:   78 xx | deflate blocks | 00 00 ff ff
//! every further packet:                deflate blocks | 00 00 ff ff
//! ```
//!
//! The two-byte header comes only in the first packet. No block is final, so there is no Adler-32. A packet ends with a flush:
//! an empty stored block that aligns the stream to a byte boundary. QEMU's reader drops unread bytes of a payload, so nothing
//! may follow the flush.
//!
//! QEMU's writer flushes with `Z_SYNC_FLUSH`, which keeps the window for the next packet. Ours uses full flushes. QEMU's reader
//! sees no difference, but each packet can be decoded alone. On nine Silesia files this costs 0.3 % of the ratio and saves a
//! fifth of the receiver's time (see `decode`).
//!
//! # Choice of the library
//!
//! Each level uses the fastest library whose ratio is at most 3 % below that of zlib at the same level. `benches/codecs.rs`
//! prints the figures.

mod decode;
mod isal;
mod portable;
mod whole;

use std::ops::RangeInclusive;

use hotlift_mem::PAGE_SIZE;

use crate::{Accelerator, Decode, Encode, EncoderSettings, MethodError, check};

const NAME: &str = "zlib";

/// Levels of QEMU's `multifd-zlib-level`; level 0 does not compress.
pub const LEVELS: RangeInclusive<u8> = 0..=9;

/// Compression library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// ISA-L's igzip from `libisal.so.2`, for levels 1 and 2.
    Isal,
    /// zlib-rs, linked statically, for all levels.
    ZlibRs,
}

/// Compressor of successive packets to a raw deflate stream.
trait Compress: Send {
    /// Compresses a packet and appends it to `out`, with a full flush at the end.
    fn packet(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError>;
}

/// Returns the library for `level` on this machine.
pub fn library_for(level: u8) -> Library {
    // igzip's level 2 has 1.01 times the ratio of zlib 1 and 0.98 times that of zlib 2, in a fifth of
    // their time. Its level 1 is no faster and gives 2 % less, its level 3 gives 3.3 % less than zlib 3.
    if (1..=2).contains(&level) && isal::isal().is_ok() {
        Library::Isal
    } else {
        Library::ZlibRs
    }
}

/// Returns an encoder that uses `library` instead of the best one.
///
/// # Errors
///
/// [`MethodError::Level`] for a level outside of [`LEVELS`] or unsupported by the library; [`MethodError::Unavailable`] if the
/// library is missing.
pub fn encoder_by(library: Library, level: u8) -> Result<Box<dyn Encode>, MethodError> {
    check::level(NAME, &LEVELS, level)?;
    if library == Library::Isal {
        check::level(NAME, &(1..=2), level)?;
    }
    Ok(Box::new(Encoder {
        by_level: vec![(level, compressor(library, level)?)],
        current: 0,
        header: Some(header(level)),
    }))
}

fn compressor(library: Library, level: u8) -> Result<Box<dyn Compress>, MethodError> {
    match library {
        Library::Isal => Ok(Box::new(isal::Deflate::new()?)),
        // zlib-rs' level 1, which is zlib-ng's, gives 20 % less than zlib's; level 2 gives 3 % more.
        Library::ZlibRs if level == 1 => Ok(Box::new(portable::Portable::new(2))),
        Library::ZlibRs => Ok(Box::new(portable::Portable::new(level))),
    }
}

pub(crate) fn encoder(settings: &EncoderSettings) -> Result<Box<dyn Encode>, MethodError> {
    encoder_by(library_for(settings.level), settings.level)
}

pub(crate) fn decoder(_accelerator: Accelerator) -> Result<Box<dyn Decode>, MethodError> {
    Ok(Box::new(decode::Decoder::new()?))
}

pub(crate) fn library() -> String {
    let compress = match isal::isal() {
        Ok(isal) => isal.name(),
        Err(error) => format!("{} ({error})", portable::LIBRARY),
    };
    format!("{compress}, receiving {}", crate::libdeflate::LIBRARY)
}

/// A channel's compressor: the header once, then the packets.
struct Encoder {
    /// Compressors of the requested levels. No packet refers to an earlier one, so all levels can write to one stream.
    by_level: Vec<(u8, Box<dyn Compress>)>,
    /// Index of the current compressor in `by_level`.
    current: usize,
    /// The header, until it is written.
    header: Option<[u8; 2]>,
}

impl Encode for Encoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        check::whole_pages(NAME, pages)?;
        out.clear();
        if let Some(header) = self.header.take() {
            out.extend_from_slice(&header);
        }
        self.by_level[self.current].1.packet(pages, out)
    }

    fn set_level(&mut self, level: i8) -> Result<(), MethodError> {
        // Levels below 0 do not exist.
        let level = u8::try_from(level).unwrap_or(u8::MAX);
        if let Some(made) = self.by_level.iter().position(|(one, _)| *one == level) {
            self.current = made;
            return Ok(());
        }
        check::level(NAME, &LEVELS, level)?;
        let made = compressor(library_for(level), level)?;
        self.by_level.push((level, made));
        self.current = self.by_level.len() - 1;
        Ok(())
    }
}

/// Returns the header of a stream of that level: deflate with a 32 KiB window. The level is a hint that no decoder reads.
pub(crate) fn header(level: u8) -> [u8; 2] {
    match level {
        0 | 1 => [0x78, 0x01],
        2..=5 => [0x78, 0x5e],
        6 => [0x78, 0x9c],
        _ => [0x78, 0xda],
    }
}

/// Returns the input after a zlib header (RFC 1950, 2.2); `None` if `stream` has less than two bytes.
///
/// # Errors
///
/// [`MethodError::Header`] if the first two bytes are not a zlib header. `method` is the method's name for the error.
pub(crate) fn skip_header<'a>(
    method: &'static str,
    stream: &'a [u8],
) -> Result<Option<&'a [u8]>, MethodError> {
    let Some((&[format, flags], deflate)) = stream.split_first_chunk::<2>() else {
        return Ok(None);
    };
    // Deflate with a window of at most 32 KiB, a multiple of 31, no preset dictionary.
    let deflated = format & 0x0f == 8 && format >> 4 <= 7;
    let checked = u16::from_be_bytes([format, flags]).is_multiple_of(31);
    if !deflated || !checked || flags & 0x20 != 0 {
        return Err(MethodError::Header {
            method,
            got: [format, flags],
        });
    }
    Ok(Some(deflate))
}

/// Tests a library that was found at run time: compresses two packets with `compress` and decodes them by zlib-rs.
fn trial(compress: &mut dyn Compress) -> Result<(), String> {
    let mut noise = 0x9e37_79b9_u32;
    let pages: Vec<u8> = (0..16 * PAGE_SIZE)
        .map(|i| {
            noise ^= noise << 13;
            noise ^= noise >> 17;
            noise ^= noise << 5;
            // A third repeats, a third is text-like, a third is noise.
            match i / PAGE_SIZE % 3 {
                0 => b"hotlift"[i % 7],
                1 => b'a' + noise.to_le_bytes()[1] % 8,
                _ => noise.to_le_bytes()[0],
            }
        })
        .collect();
    let mut inflate = zlib_rs::Inflate::new(false, 15);
    let mut payload = Vec::new();
    let mut back = vec![0; pages.len() + 1];
    for packet in 1..=2u64 {
        payload.clear();
        compress
            .packet(&pages, &mut payload)
            .map_err(|error| error.to_string())?;
        inflate
            .decompress(&payload, &mut back, zlib_rs::InflateFlush::SyncFlush)
            .map_err(|error| error.as_str().to_owned())?;
        let total = u64::try_from(pages.len()).unwrap_or(u64::MAX);
        if inflate.total_out() != packet * total || back[..pages.len()] != pages[..] {
            return Err(format!("packet {packet} does not decode to its input"));
        }
    }
    Ok(())
}
