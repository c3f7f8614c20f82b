//! Launches QEMUs for incoming guests, and controls them over QMP while their guests migrate through a relay of this process.
//!
//! | file | subject |
//! |---|---|
//! | `source` | the source's QEMU |
//! | `outgoing` | migration of the source's QEMU into a relay |
//! | `progress` | displayed progress of that migration |
//! | `downtime_ramp` | downtime limit of that migration: starts low, and is raised if rounds stop getting shorter |
//! | `downtime_limit` | sets that limit over QMP or through libvirt, and shows it |
//! | `destination` | the destination's QEMU |
//! | `incoming` | settings of that QEMU and of its relay |
//! | `process`, `stderr` | a QEMU that this process started, and its output |
//! | `log_file` | finds the lines of one QEMU in a shared log file |
//! | `connect` | connects to a QEMU that another process started |
//! | `first_answer` | waits for the first answer on the QMP socket of a QEMU that this process started |
//! | `guard` | ends a QEMU if the command that started it is killed |
//! | `capabilities` | tables of capabilities and parameters: set, kept, or refused |
//! | `settings` | capabilities and parameters: changed for one migration, and restored |
//! | `record` | record of the changed settings, stored inside QEMU |
//! | `shared_memory` | RAM in files that both QEMUs map |
//! | `unused_ram` | RAM that QEMU does not migrate because a device reports it as unused |
//! | `run_state` | checks the run state of a guest at its destination |
//! | `vm` | properties of a QEMU's VM, sent to the other host |
//! | `compare` | differences between two VMs, and which of them QEMU refuses |
//! | `error` | errors of QEMU control, and the guest's location after a failure |

#![forbid(unsafe_code)]

pub mod capabilities;
pub mod compare;
pub mod connect;
pub mod destination;
pub mod downtime_limit;
pub mod downtime_ramp;
pub mod error;
pub mod first_answer;
pub mod guard;
pub mod incoming;
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
pub mod unused_ram;
pub mod vm;

pub use error::QemuError;
