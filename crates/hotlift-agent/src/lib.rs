//! The agent of a host: carries any number of migrations at once, in both directions, through one TLS port.
//!
//! ```text
//! QEMU -> nft -> redirect -> outgoing ==== TLS ====> door -> incoming -> QEMU
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `run`, `parts`, `drain` | start and end; the threads; what is waited for before the end |
//! | `agent` | what the threads share; reload |
//! | `config`, `values` | the configuration file: every key is a field |
//! | `rules`, `table`, `table_watch` | the nftables rules; their table in force; put back when something changes it |
//! | `dial` | connections that pass the table, and where a redirected one was to go |
//! | `past`, `bypass`, `proof` | what has gone past the redirect; rules of others that cause it; a connection that proves the redirect |
//! | `redirect`, `source_socket` | this host's connections, told apart, and which of them their QEMU has closed |
//! | `outgoing` | each migration to the other agent |
//! | `door`, `incoming` | the agent's port, and what other agents announce there |
//! | `messages`, `attend` | what two agents say of a migration, and while its relay is at work |
//! | `tunnel` | what is no migration: bytes as they are |
//! | `moment` | the life of one migration by what happens to it and when: states, downtime |
//! | `session`, `sessions` | one migration; all of them, places and totals |
//! | `budget` | bandwidth and cores, shared |
//! | `commands`, `log`, `notify` | the control socket, the journal, systemd |
//! | `totals`, `metrics`, `http` | counts of all sessions; the metrics made of them; Prometheus's requests |
//!
//! Each migration is a relay ([`hotlift::relay`]) with threads of its own, as `hotlift relay` runs it: who has the guest is
//! its matter alone, and an agent that is killed is a failed migration.

#![forbid(unsafe_code)]

mod agent;
mod attend;
mod budget;
mod bypass;
pub mod commands;
pub mod config;
mod dial;
mod door;
mod drain;
pub mod error;
#[cfg(test)]
mod fixture;
mod http;
mod incoming;
mod log;
pub mod messages;
mod metrics;
pub mod moment;
mod names;
mod notify;
mod outgoing;
mod parts;
pub mod past;
pub mod proof;
mod redirect;
pub mod rules;
mod run;
pub mod session;
mod sessions;
mod source_socket;
pub mod table;
mod table_watch;
mod totals;
mod tunnel;
pub mod values;

pub use agent::Agent;
pub use run::{Checked, check, run};
