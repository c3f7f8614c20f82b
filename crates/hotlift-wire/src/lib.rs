//! QEMU's migration stream as values: bytes in, values out, and back. No I/O, no threads, no clock.
//!
//! A migration speaks over several connections at once, and each has a module here:
//!
//! ```text
//! source                                                      destination
//!   main channel      ── header, RAM blocks, sync, devices  ──▶   main_channel
//!   multifd channels  ── initial packet, page packets ────────▶   multifd
//!   return path       ◀─ PONG, SHUT (main's other direction) ──   return_path
//!   PING and HELLO    ── which Hotlift is this? ──────────────▶   handshake
//!   a question        ◀─ what became of the guest? ───────────▶   settle
//!   a save file       ◀─ ranges of its bytes ─────────────────▶   file_ranges
//! ```
//!
//! Integers are big-endian and unsigned. Everything that comes from a peer goes through one
//! [`Reader`], which cannot index out of range, and every number that sizes an allocation is first
//! held against a name in [`limits`].

#![forbid(unsafe_code)]

mod block;
mod error;
pub mod file_ranges;
pub mod handshake;
pub mod limits;
pub mod main_channel;
pub mod multifd;
mod reader;
pub mod return_path;
pub mod settle;

pub use block::RamBlockEntry;
pub use error::WireError;
pub use reader::Reader;

/// Bytes in a guest page: x86's `TARGET_PAGE_SIZE`, the only one that the main channel speaks here.
pub const PAGE_SIZE: usize = 4096;
