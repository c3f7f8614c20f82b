//! Code that several commands share: flags, connections, and pairs of `guest run` processes.
//!
//! | file | subject |
//! |---|---|
//! | `args`, `migration_args` | flags of a built-in guest; flags of a migration, from the engine's table of options |
//! | `program`, `manual` | a program's command line; its manual pages and completions |
//! | `security`, `connect` | TLS from a command's flags; a connection to an address from a flag |
//! | `pair`, `events`, `held_memory` | two `guest run` processes; their events; memory touched for the destination |
//! | `error` | errors that these commands share |

#![forbid(unsafe_code)]

pub mod args;
pub mod connect;
pub mod error;
pub mod events;
pub mod held_memory;
pub mod manual;
pub mod migration_args;
pub mod pair;
pub mod program;
pub mod security;
