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
//! At every moment exactly one side may run the guest, even if a socket is cut, a byte is flipped or
//! a process is killed just then:
//!
//! ```text
//! source                                destination
//! stops the guest, sends the rest
//! PING(crc of main)            ---->    loads everything
//!                              <----    PONG: loaded
//! commits: EOF on main, SYNC
//! on every channel             ---->    the first of them makes it run the guest
//!                              <----    SHUT(0) on every socket
//! ends the guest here
//! ```
//!
//! Before the commit any failure gives the guest back to the source, and the destination, which has
//! not heard of a commit, never runs it. After the commit the source takes it back only if every
//! connection was closed without SHUT(0), which a destination that runs it never does. That is what a
//! killed destination looks like. It is also what a middlebox looks like that resets *all* connections
//! between commit and answer, and the two cannot be told apart from here; connections that time out
//! are told apart, and leave the source paused ([`MigrationError::InDoubt`]).

#![forbid(unsafe_code)]

mod barrier;
mod codec;
pub mod control;
pub mod destination;
pub mod error;
pub mod figures;
mod flow;
pub mod guest;
mod hello;
pub mod options;
mod pacing;
pub mod progress;
mod ran;
pub mod relay;
pub mod source;
mod threads;
pub mod transport;

pub use control::{Control, MigrationEvent, Status};
pub use error::MigrationError;
pub use options::Options;
pub use transport::{Address, Listener};
