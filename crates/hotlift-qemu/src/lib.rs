//! QEMUs: launched for a guest that is to come, and steered over QMP while their guests migrate through a relay of this
//! process.
//!
//! | file | subject |
//! |---|---|
//! | `source` | the QEMU whose guest is to leave |
//! | `outgoing` | its migration into a relay |
//! | `progress` | how that migration gets on |
//! | `destination` | the QEMU that is to get a guest |
//! | `incoming` | what it is told, and what the relay beside it must know |
//! | `process`, `stderr` | a QEMU that was started here, and what it says |
//! | `log_file` | a log file that it shares with others: which part is its own |
//! | `connect` | the QMP socket of one that others have started |
//! | `first_answer` | the QMP socket of one that was started here, and the wait for its first answer |
//! | `guard` | ends a QEMU whose starter was killed |
//! | `capabilities` | tables of capabilities and parameters: which are set, kept, or refused |
//! | `settings` | capabilities and parameters: changed for one migration, and restored |
//! | `record` | the record of changed settings, inside QEMU |
//! | `shared_memory` | RAM in files that both QEMUs map |
//! | `left_out` | RAM that QEMU leaves out, as devices report it |
//! | `run_state` | whether a guest does at its destination what it is to do |
//! | `vm` | the VM of a QEMU, described for the other end |
//! | `compare` | differences of two VMs, and which of them QEMU refuses |
//! | `error` | why a QEMU could not be steered, or where its guest is |

#![forbid(unsafe_code)]

pub mod capabilities;
pub mod compare;
pub mod connect;
pub mod destination;
pub mod error;
pub mod first_answer;
pub mod guard;
pub mod incoming;
pub mod left_out;
mod log_file;
pub mod outgoing;
pub mod process;
mod progress;
mod record;
pub mod run_state;
pub mod settings;
pub mod shared_memory;
pub mod source;
mod stderr;
pub mod vm;

pub use error::QemuError;
