//! The live migration engine: moves a [`Guest`](guest::Guest)'s memory and device state between two
//! processes, in QEMU's stream format, while the guest runs.
//!
//! | module | contents |
//! |---|---|
//! | [`guest`] | interface between the engine and a virtual machine |
//! | [`options`] | the one table of options, with QEMU's names |
//! | [`transport`] | addresses and sockets |
//! | [`migrate()`], [`receive()`] | sends the guest of this process to a stream, and receives it |
//! | [`relay`] | passes a QEMU's stream to another QEMU, to a file, or from a file |
//! | [`mod@file`] | save files |
//! | [`lazy`] | restores a save file into a QEMU that runs its guest at once |
//! | [`control`] | state, events and cancel |
//! | [`progress`], [`figures`] | progress reports of a running migration, and its cost |
//! | [`error`] | errors that end a migration |
//!
//! Inside, an operation (`ops`) connects a page source to a sink (`ends`) over a bounded number of batches (`pipe`), in QEMU's
//! format (`stream`). `postcopy` sends pages on request. `precopy` tracks dirty pages, estimates the time to send them, and
//! throttles the guest if there are too many.
//!
//! # Ownership of the guest
//!
//! Exactly one side may run the guest at every moment, whatever fails: the state machine in `handover` decides.
//!
//! # Example
//!
//! ```no_run
//! use hotlift::guest::Guest;
//! use hotlift::{Control, MigrationError, Options};
//!
//! fn send(guest: &dyn Guest) -> Result<(), Box<dyn std::error::Error>> {
//!     let mut options = Options::default();
//!     options.set("multifd-compression", "zstd")?;
//!     let destination = "tcp:192.0.2.2:4444".parse()?;
//!     let control = Control::new(); // a clone of it cancels, from any thread
//!     match hotlift::migrate(guest, &destination, &options, &control, &|_progress| ()) {
//!         Ok(report) => println!("moved in {:.0} ms", report.total_ms),
//!         Err(MigrationError::InDoubt) => println!("the guest may run there: it must not run here"),
//!         Err(error) => println!("it runs here: {error}"),
//!     }
//!     Ok(())
//! }
//!
//! fn receive(guest: &dyn Guest) -> Result<(), Box<dyn std::error::Error>> {
//!     let listener = "tcp::4444".parse::<hotlift::Address>()?.listen()?;
//!     hotlift::receive(guest, listener, &Options::default(), &Control::new())?;
//!     Ok(())
//! }
//! ```
//!
//! `examples/vmm` is a complete VMM that does this.
//!
//! # Features
//!
//! - `accel`, off by default: accelerators of methods, and zero-page detection by DSA. Without it the CPU does that work, and
//!   an accelerator that is required is an error.
//! - `simulated`, for tests: a simulated DSA queue.

#![forbid(unsafe_code)]

mod accelerator_stats;
mod accelerators;
mod auto;
pub mod control;
mod cpu_limit;
mod ends;
pub mod error;
pub mod figures;
pub mod guest;
mod handover;
mod life;
mod liveness;
mod lock;
mod ops;
pub mod options;
mod pacing;
mod pipe;
mod postcopy;
mod precopy;
pub mod progress;
mod remote;
mod schedule;
mod status;
mod steering;
mod stream;
pub mod tls;

pub use hotlift_net::admission::Listener;
pub use hotlift_net::transport::Address;
pub use hotlift_net::{admission, conversation, transport};

pub use ends::file;
pub use ops::lazy;
pub use ops::migrate::migrate;
pub use ops::receive::{prepare, receive};
pub use ops::relay;

pub use control::Control;
pub use error::MigrationError;
pub use liveness::Liveness;
pub use options::Options;
pub use status::{MigrationEvent, Status};
