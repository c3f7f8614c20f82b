//! What the commands of `hotlift` share, below all of them.
//!
//! | file | subject |
//! |---|---|
//! | `args`, `migration_args`, `output_args` | flags: of a guest, of a migration by the engine's table, of the output |
//! | `output`, `output_file` | standard output and standard error; files for results |
//! | `progress`, `table`, `width` | the progress display; tables; what fits a terminal |
//! | `signals` | Ctrl-C and its like |
//! | `pair`, `events`, `held_memory` | two `guest run` processes, their events, memory for the destination |
//! | `connect` | a conversation with another host, at an address that a flag gave |
//! | `security` | TLS as a command's flags ask for it |
//! | `error` | why a command failed, where several can fail so |

#![forbid(unsafe_code)]

pub mod args;
pub mod connect;
pub mod error;
pub mod events;
pub mod flush_args;
pub mod held_memory;
pub mod migration_args;
pub mod output;
pub mod output_args;
pub mod output_file;
pub mod pair;
pub mod progress;
pub mod security;
pub mod signals;
pub mod table;
pub mod width;
