//! The live migration engine: moves a [`Guest`](guest::Guest)'s memory and device state between two
//! processes, in QEMU's stream format, while the guest runs.
//!
//! | module | contents |
//! |---|---|
//! | [`guest`] | interface between the engine and a virtual machine |
//! | [`options`] | the table of options, with QEMU's names |
//! | [`transport`] | addresses and sockets |
//! | [`migrate()`], [`receive()`] | sends the guest of this process to a peer; receives a guest into this process |
//! | [`relay`] | forwards a QEMU's stream to another QEMU or to a file, or from a file to a QEMU |
//! | [`mod@file`] | save files |
//! | [`lazy`] | restores a save file into a QEMU that runs the guest at once |
//! | [`control`] | status, events and cancel |
//! | [`progress`], [`figures`] | progress reports of a running migration, and the cost of a finished one |
//! | [`error`] | errors that end a migration |
//!
//! Internally, an operation (`ops`) connects a page source to a sink (`ends`). Pages pass through a limited number of batches
//! (`pipe`), in QEMU's format (`stream`). `postcopy` sends pages on request. `precopy` tracks dirty pages, estimates the time
//! to send them, and throttles the guest if it dirties too many.
//!
//! # Ownership of the guest
//!
//! At any time at most one side may run the guest, even after a failure. The state machine in `handover` decides which side.
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
//! `examples/vmm` is a complete VMM with this code.
//!
//! # Features
//!
//! - `accel`, off by default: accelerators of methods, and zero page detection by DSA. Without this feature the CPU does this
//!   work, and a required accelerator is an error.
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
