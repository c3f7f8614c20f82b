//! The monitors of a process that migrates: what drives and watches it, as QEMU's do. Tools speak QMP, people HMP.
//!
//! | file | subject |
//! |---|---|
//! | `sockets` | where clients connect, and who may |
//! | `command_table`, `schema` | all QMP commands, their arguments and answers |
//! | `guest` | the commands over a guest of this process |
//! | `run_control` | who keeps that guest from running: its operator, its migration |
//! | `relay` | the commands over a relay |
//! | `introspection` | the commands that need no more than the tables |
//! | `settings` | capabilities and parameters |
//! | `address` | `uri` and `channels` of a migration |
//! | `query_migrate` | what `query-migrate` answers |
//! | `events` | what clients are told unasked |
//! | `refusal` | what clients are refused with |
//! | `shutdown` | the request that the process ends |
//! | `hmp` | the human monitor |
//! | `error` | why a monitor failed |

#![forbid(unsafe_code)]

mod address;
mod command_table;
pub mod error;
mod events;
mod guest;
mod hmp;
mod introspection;
mod query_migrate;
mod refusal;
mod relay;
mod run_control;
mod schema;
mod settings;
mod shutdown;
mod sockets;

pub use error::MonitorError;
pub use guest::GuestMonitor;
pub use introspection::version;
pub use relay::RelayMonitor;
pub use shutdown::ShutdownRequest;
pub use sockets::{HmpAddress, Monitors, Sockets};
