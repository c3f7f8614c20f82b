//! The live migration engine: moves a [`Guest`](guest::Guest)'s memory and device state between two
//! processes, in QEMU's stream format, while the guest runs.
//!
//! | module | what it is |
//! |---|---|
//! | [`guest`] | what the engine needs of a virtual machine |
//! | [`options`] | the one table of options, with QEMU's names |
//! | [`transport`] | addresses and sockets |
//! | [`source`] | sends: rounds, channels, switchover |
//! | [`destination`] | receives: channels, barrier, hand-over |
//! | [`relay`] | passes a QEMU's stream on, and its pages over channels |
//! | [`control`] | state and cancel |
//! | [`progress`], [`figures`] | what a migration tells while it runs, and what it cost |
//! | [`error`] | why it ended before its time |
//!
//! # Who has the guest
//!
//! At every moment exactly one side may run the guest, whatever fails just then: the state machine of
//! `handover` decides it for every kind of migration, and draws how.

#![forbid(unsafe_code)]

mod accelerator_stats;
mod barrier;
mod codec;
pub mod control;
pub mod destination;
mod door;
pub mod error;
mod failure;
pub mod figures;
mod flow;
pub mod guest;
mod handover;
mod hello;
pub mod options;
mod pacing;
pub mod progress;
pub mod relay;
pub mod source;
mod stream;
mod threads;
pub mod transport;

pub use control::{Control, MigrationEvent, Status};
pub use error::MigrationError;
pub use options::Options;
pub use transport::{Address, Listener};
