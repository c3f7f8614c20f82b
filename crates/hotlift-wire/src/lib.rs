//! QEMU's migration stream as values: decodes bytes to values and encodes them. No I/O, no threads, no clock.
//!
//! A migration uses several connections. Each kind has a module here:
//!
//! ```text
//! source                                                      destination
//!   main channel      ── header, RAM blocks, sync, devices  ──▶   main_channel
//!   multifd channels  ── initial packet, page packets ────────▶   multifd
//!   return path       ◀─ PONG, SHUT (main's other direction) ──   return_path
//!   PING and HELLO    ── version, features ───────────────────▶   handshake
//!   a question        ◀─ where is the guest? ─────────────────▶   settle
//!   a save file       ◀─ ranges of its bytes ─────────────────▶   file_ranges
//! ```
//!
//! Integers are big-endian and unsigned. [`Reader`] reads all input from a peer, and never indexes out of range. Every number
//! that determines the size of an allocation is first compared with a limit in [`limits`].
//!
//! # Example
//!
//! A decoder takes bytes as they arrive. If a record is incomplete, the decoder returns the number of missing bytes:
//!
//! ```
//! use hotlift_wire::main_channel::{
//!     Command, Configuration, DeviceLengths, MainDecoder, MainEncoder, MainEvent, Step,
//! };
//!
//! let configuration = Configuration { machine: "pc-q35-10.0".to_owned(), ..Configuration::default() };
//! let mut stream = Vec::new();
//! let mut encoder = MainEncoder::new(&configuration, &mut stream)?;
//! encoder.command(Command::Ping(7), &mut stream)?;
//!
//! let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
//! let mut pings = Vec::new();
//! while !stream.is_empty() {
//!     match decoder.next(&stream)? {
//!         Step::Event { event, consumed } => {
//!             if let MainEvent::Command(Command::Ping(value)) = event {
//!                 pings.push(value);
//!             }
//!             stream.drain(..consumed);
//!         }
//!         Step::Need(bytes) => panic!("{bytes} bytes are missing"),
//!     }
//! }
//! assert_eq!(pings, [7]);
//! # Ok::<_, hotlift_wire::WireError>(())
//! ```

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

/// Size of a guest page in bytes: x86's `TARGET_PAGE_SIZE`. No other page size is supported on the main channel.
pub const PAGE_SIZE: usize = 4096;
