//! Driving and watching whatever moves memory, as QEMU is: by tools over QMP, by people at a monitor.
//!
//! | file | what |
//! |---|---|
//! | `commands` | what every monitor talks to |
//! | `table`, `schema` | all commands, their arguments and answers |
//! | `guest`, `stoppable` | the commands over a built-in guest |
//! | `passing` | the commands over a relay |
//! | `settings` | capabilities and parameters |
//! | `address`, `info`, `common` | URIs, `query-migrate`, what both have alike |
//! | `hmp` | the human monitor |
//! | `sockets`, `leaving` | where clients connect; when the process ends |

mod address;
mod commands;
mod common;
mod guest;
mod hmp;
mod info;
mod leaving;
mod passing;
mod schema;
mod settings;
mod sockets;
mod stoppable;
mod table;

pub use commands::Commands;
pub use guest::GuestMonitor;
pub use leaving::Leaving;
pub use passing::PassingMonitor;
pub use sockets::ControlArgs;
