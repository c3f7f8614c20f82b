//! The page compression methods of the multifd stream: QEMU's `multifd-compression`, and `lz4`.
//!
//! The unit of compression is one packet of up to 128 pages. An [`Encode`] compresses the packet's normal pages (not its zero
//! pages) into the payload after the packet header. A [`Decode`] decompresses a payload into guest memory. Each channel has its
//! own encoder or decoder for the whole migration, because `zlib` and QEMU's `zstd` keep state from packet to packet. The
//! channel's decoder must decode all packets of the channel, in order.
//!
//! | file | subject |
//! |---|---|
//! | `table` | [`METHODS`], the list of all methods |
//! | `none` | uncompressed pages |
//! | `zlib/` | one zlib stream per channel, never ended; by ISA-L, or by zlib-rs if ISA-L is missing |
//! | `zstd/` | a closed frame per packet, or from level 4 on one open frame per channel, as in QEMU; reads both |
//! | `pagewise/` | a table of lengths, and each page deflated separately: shared by qpl and uadk |
//! | `qpl` | raw deflate pages, as Intel's IAA reads and writes them |
//! | `uadk` | zlib pages, as HiSilicon's accelerator reads and writes them |
//! | `qatzip/` | gzip members with QAT's extra field |
//! | `lz4/` | an LZ4 block per packet; only between two Hotlifts |
//! | `accelerator` | use of accelerators: setting, job counts |
//! | `device` | interface of accelerators, which a program passes in: `hotlift-accel` has the vendors' |
//! | `check` | input that encoders reject: partial pages, levels out of range |
//! | `environment` | permission to read settings from the environment |
//! | `library` | libraries opened at run time, each with a table of its functions |
//! | `memory` | limit of the memory that a peer can make its receiver allocate |
//! | `software` | deflate of pages and members on the CPU |
//! | `isal/` | ISA-L's igzip, opened at run time |
//! | `libdeflate` | compression and decompression of complete streams |
//! | `legacy/` | page records of older sources: XBZRLE deltas, `compress` pages |
//! | `target` | destination of a payload: the packet's pages, adjacent pages joined |
//!
//! # Guarantees of a decoder
//!
//! A payload comes from a peer and can contain anything. A decoder writes no byte outside the given runs of guest memory. It
//! fills the runs exactly or returns an error. A peer chooses the size of only one allocation: the window of zstd. Its size is
//! limited by [`ZSTD_WINDOW_LOG_MAX`] and [`Decode::limit_memory`]. After an error the content of the runs is undefined and the
//! channel's state is lost: later calls fail with [`MethodError::Failed`].
//!
//! Buffers grow to the largest packet and are kept; there is no allocation per packet.
//!
//! # Example
//!
//! ```
//! use hotlift_mem::{Backing, PAGE_SIZE, RamBlock};
//! use hotlift_methods::{Accelerator, EncoderSettings, MethodError, method};
//!
//! let zstd = method("zstd").expect("a row of the table");
//! let pages = vec![42; 8 * PAGE_SIZE];
//! let mut payload = Vec::new();
//! (zstd.encoder)(&EncoderSettings::software(zstd.default_level))?.encode(&pages, &mut payload)?;
//! assert!(payload.len() < pages.len() / 100);
//!
//! let ram = RamBlock::new("pc.ram", 8 * PAGE_SIZE, Backing::Private).expect("a mapping of 32 KiB");
//! let run = ram.run(0, pages.len()).expect("within the block");
//! (zstd.decoder)(Accelerator::Off)?.decode(&payload, &[run])?;
//! let mut decoded = vec![0; pages.len()];
//! ram.read(0, &mut decoded).expect("within the block");
//! assert_eq!(decoded, pages);
//! # Ok::<_, MethodError>(())
//! ```

#![cfg(target_os = "linux")]
#![cfg(target_pointer_width = "64")]

mod accelerator;
mod check;
pub mod device;
pub mod environment;
mod error;
mod isal;
pub mod legacy;
mod libdeflate;
pub mod library;
mod lz4;
mod memory;
mod none;
mod pagewise;
pub mod qatzip;
pub mod qpl;
mod software;
mod table;
mod target;
pub mod uadk;
pub mod zlib;
mod zstd;

pub use accelerator::{Accelerator, EncoderSettings, Jobs, NOT_BUILT_IN, RunsOn};
pub use error::MethodError;
pub use lz4::compressed_ratio;
pub use memory::{MemoryLimit, OverMemoryLimit};
pub use table::{AUTO, METHODS, MethodInfo, Unit, method, selection, selections};
pub use zstd::WINDOW_LOG_MAX as ZSTD_WINDOW_LOG_MAX;

use hotlift_mem::GuestRun;

/// Encoder of one sending channel, by one compression method.
pub trait Encode: Send {
    /// Compresses one packet.
    ///
    /// `pages` are the packet's normal pages in sequence. They must be a private copy: if the input changes during the call,
    /// the stream may be undecodable. `out` is cleared and then filled with the payload. Its capacity is kept, so pass the same
    /// vector each time.
    ///
    /// # Errors
    ///
    /// [`MethodError::UnevenInput`] if `pages` is empty or no multiple of the page size, [`MethodError::Library`] if the
    /// library fails. The channel is unusable after an error.
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError>;

    /// Sets the level of the next packets. It may be below the levels of [`MethodInfo::levels`]. Methods without levels ignore
    /// it.
    ///
    /// # Errors
    ///
    /// [`MethodError::Level`] or [`MethodError::Library`] if the method or its library lacks the level.
    fn set_level(&mut self, level: i8) -> Result<(), MethodError> {
        let _ = level;
        Ok(())
    }

    /// Returns the counts of jobs, by CPU and by accelerator.
    fn jobs(&self) -> Jobs {
        Jobs::default()
    }

    /// Returns the device in use: CPU or accelerator.
    fn runs_on(&self) -> RunsOn {
        RunsOn::Software
    }
}

/// Decoder of one receiving channel, by one compression method.
pub trait Decode: Send {
    /// Decompresses one packet's payload into `pages`, in their order.
    ///
    /// `pages` are runs of guest memory, of any length and address. Runs adjacent in memory are filled as one, which is faster.
    /// Decoders read their output again, so no other thread may write the pages during the call. A concurrent write damages the
    /// pages, but no memory outside them.
    ///
    /// # Errors
    ///
    /// See [`MethodError`] for damaged payloads. Too few bytes, too many bytes and unused input are errors too.
    fn decode(&mut self, payload: &[u8], pages: &[GuestRun<'_>]) -> Result<(), MethodError>;

    /// Counts later allocations that payloads cause in `limit`. A packet that exceeds the limit fails with
    /// [`MethodError::Memory`].
    fn limit_memory(&mut self, _limit: &MemoryLimit) {
        // Only zstd streams choose the size of an allocation.
    }

    /// Returns the counts of jobs, by CPU and by accelerator.
    fn jobs(&self) -> Jobs {
        Jobs::default()
    }

    /// Returns the device in use: CPU or accelerator.
    fn runs_on(&self) -> RunsOn {
        RunsOn::Software
    }
}
