//! The page compression methods of the multifd stream: QEMU's `multifd-compression`, and `lz4`.
//!
//! One packet of up to 128 pages is the unit: an [`Encode`] turns the packet's normal pages into the
//! payload that follows its header, a [`Decode`] puts a payload back into guest memory. Each channel
//! has one of either for the whole migration, since `zlib` and QEMU's `zstd` carry state from packet
//! to packet: packets of a channel must be decoded all, in order, and by the channel's own decoder.
//!
//! | file | subject |
//! |---|---|
//! | `table` | [`METHODS`], the one list of what there is |
//! | `none` | pages as they are |
//! | `zlib/` | one endless zlib stream a channel; by ISA-L, or zlib-rs where that is missing |
//! | `zstd/` | a closed frame a packet, or from level 4 on a channel's open frame, as QEMU sends it; either when receiving |
//! | `pagewise/` | a table of lengths and each page deflated for itself: what qpl and uadk share |
//! | `qpl/` | raw deflate pages, as Intel's IAA reads and writes them |
//! | `uadk/` | zlib pages, as HiSilicon's accelerator reads and writes them |
//! | `qatzip/` | gzip members with QAT's extra field |
//! | `lz4/` | an LZ4 block a packet, between two Hotlifts |
//! | `accelerator` | whether one may run, and what has run |
//! | `check` | what encoders refuse: parts of pages, levels that do not exist |
//! | `environment` | whether this process may take settings from its environment |
//! | `library` | libraries that are opened at run time, each by a table of its functions |
//! | `memory` | how much memory a peer may make its receiver take |
//! | `software` | pages and members to deflate without an accelerator |
//! | `isal/` | ISA-L's igzip, opened at run time |
//! | `libdeflate` | whole streams, both ways |
//! | `legacy/` | page records of older sources: XBZRLE deltas, `compress` pages |
//! | `target` | where a payload goes: the packet's pages, adjacent ones joined |
//!
//! # What a decoder promises
//!
//! A payload comes from a peer and may hold anything. A decoder writes no byte outside the runs it was
//! given, fills them exactly or returns an error, and allocates nothing that the peer can choose the
//! size of beyond the window of [`ZSTD_WINDOW_LOG_MAX`], and of that no more than
//! [`Decode::limit_memory`] allows. After an error the runs hold anything, and
//! the channel's state is lost: every later call fails with [`MethodError::Failed`].
//!
//! Buffers grow to the largest packet that needs them and stay; nothing is allocated for each packet.
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
pub mod environment;
mod error;
mod isal;
pub mod legacy;
mod libdeflate;
mod library;
mod lz4;
mod memory;
mod none;
mod pagewise;
pub mod qatzip;
pub mod qpl;
mod software;
mod table;
mod target;
mod uadk;
pub mod zlib;
mod zstd;

pub use accelerator::{Accelerator, EncoderSettings, Hardware, Jobs, RunsOn};
pub use error::MethodError;
pub use lz4::left_of;
pub use memory::{MemoryLimit, OverMemoryLimit};
pub use table::{AUTO, METHODS, MethodInfo, Unit, method, selection, selections};
pub use zstd::WINDOW_LOG_MAX as ZSTD_WINDOW_LOG_MAX;

use hotlift_mem::GuestRun;

/// The sending half of a channel's method.
pub trait Encode: Send {
    /// Compresses one packet.
    ///
    /// `pages` are its normal pages one after the other: a private copy, since a compressor that sees
    /// a page change under it may write a stream that no decoder reads. `out` is cleared and then
    /// holds the payload; its capacity is kept, so the same vector should be passed each time.
    ///
    /// # Errors
    ///
    /// [`MethodError::UnevenInput`] if `pages` is empty or no multiple of the page size,
    /// [`MethodError::Library`] if the library fails. The channel cannot go on after an error.
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError>;

    /// Compresses the next packets at another level, which may be below those of
    /// [`MethodInfo::levels`]. A method whose packets cannot differ in it takes no notice.
    ///
    /// # Errors
    ///
    /// [`MethodError::Library`] if the library has no such level.
    fn set_level(&mut self, level: i8) -> Result<(), MethodError> {
        let _ = level;
        Ok(())
    }

    /// What was done so far, and by what.
    fn jobs(&self) -> Jobs {
        Jobs::default()
    }

    /// What does it at present.
    fn runs_on(&self) -> RunsOn {
        RunsOn::Software
    }
}

/// The receiving half of a channel's method.
pub trait Decode: Send {
    /// Decompresses one packet's payload into `pages`, in their order.
    ///
    /// Runs may have any length and lie anywhere; those that follow each other in memory are filled
    /// as one, which is faster. Decoders read back what they have written, so nobody else may write
    /// the pages meanwhile: the result would be damaged (though no memory outside the runs).
    ///
    /// # Errors
    ///
    /// Whatever is wrong with the payload, see [`MethodError`]; a payload with fewer or more bytes
    /// than the runs hold, and one with input left over, are errors too.
    fn decode(&mut self, payload: &[u8], pages: &[GuestRun<'_>]) -> Result<(), MethodError>;

    /// Counts what the payloads make this decoder allocate in `limit`, from now on. What does not fit is
    /// [`MethodError::Memory`].
    fn limit_memory(&mut self, _limit: &MemoryLimit) {
        // Only zstd's streams choose it.
    }

    /// What was done so far, and by what.
    fn jobs(&self) -> Jobs {
        Jobs::default()
    }

    /// What does it at present.
    fn runs_on(&self) -> RunsOn {
        RunsOn::Software
    }
}
