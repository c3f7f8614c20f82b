//! The live migration engine: moves a [`Guest`](guest::Guest)'s memory and device state between two
//! processes, in QEMU's stream format, while the guest runs.
//!
//! | module | what it is |
//! |---|---|
//! | [`guest`] | what the engine needs of a virtual machine |
//! | [`options`] | the one table of options, with QEMU's names |
//! | [`transport`] | addresses and sockets |
//! | [`migrate()`], [`receive()`] | the guest of this process to a stream, and back |
//! | [`relay`] | a QEMU's stream to another, or to a file, or out of one |
//! | [`mod@file`] | save files |
//! | [`lazy`] | a save file to a QEMU that runs its guest at once |
//! | [`control`] | state and cancel |
//! | [`progress`], [`figures`] | what a migration tells while it runs, and what it cost |
//! | [`error`] | why it ended before its time |
//!
//! Inside, an operation (`ops`) joins a source of pages to a sink (`ends`); between them is a bounded number of batches
//! (`pipe`), and both speak QEMU's stream (`stream`). `postcopy` gives a guest that runs already the pages that it asks for. `precopy` knows what is dirty and when the rest is small enough.
//!
//! # Who has the guest
//!
//! At every moment exactly one side may run the guest, whatever fails just then: the state machine of
//! `handover` decides it for every kind of migration, and draws how.
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
//! `examples/vmm` is a whole VMM that does this.

#![forbid(unsafe_code)]

mod accelerator_stats;
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
