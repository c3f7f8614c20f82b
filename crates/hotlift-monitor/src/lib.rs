//! Monitors of a migrating process, which clients control and query like a QEMU: programs over QMP, operators over HMP.
//!
//! | file | subject |
//! |---|---|
//! | `sockets` | sockets of the clients, and their access control |
//! | `command_table`, `schema` | all QMP commands, their arguments and answers |
//! | `guest` | commands for a guest of this process |
//! | `run_control` | stops and continues this guest, for the operator and for the migration |
//! | `relay` | commands for a relay |
//! | `introspection` | commands that are the same for all monitors |
//! | `settings` | capabilities and parameters |
//! | `address` | `uri` and `channels` of a migration |
//! | `query_migrate` | the answer of `query-migrate` |
//! | `events` | events sent to clients |
//! | `refusal` | errors sent to clients |
//! | `shutdown` | a request to end the process |
//! | `hmp` | the human monitor |
//! | `error` | errors of a monitor |

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
