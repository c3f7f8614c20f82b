//! The agent of a host: carries any number of migrations concurrently, in both directions, through one TLS port.
//!
//! ```text
//! QEMU -> nft -> redirect -> outgoing ==== TLS ====> peer_port -> incoming -> QEMU
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `run`, `critical_threads`, `drain` | start and end; threads whose loss ends the agent; the wait for running migrations |
//! | `agent` | state that the threads share; reload |
//! | `config`, `values` | the configuration file: every key is a field |
//! | `rules`, `table`, `table_watch` | the nftables rules; the installed table; its repair after another program changes it |
//! | `dial` | connections that the table does not redirect; the original destination of a redirected connection |
//! | `missed_packets`, `bypass`, `redirect_check` | packets that missed the redirect; foreign rules as cause; a test |
//! | `redirect`, `source_socket` | classification of this host's connections; detection of a close by the source's QEMU |
//! | `outgoing` | an outgoing migration, to the other agent |
//! | `peer_port`, `incoming` | the agent's port; migrations that other agents announce |
//! | `messages`, `supervise` | messages between two agents about a migration; supervision of its running relay |
//! | `tunnel` | byte streams other than migrations, copied unchanged |
//! | `snapshot` | lifecycle of one migration, from events and their times: states, downtime |
//! | `session`, `sessions` | one migration; all migrations, concurrency limits and totals |
//! | `budget` | shares of bandwidth and cores |
//! | `commands`, `log`, `notify` | the control socket, the journal, systemd |
//! | `totals`, `downtimes` | counters of all sessions; percentiles of the latest downtimes |
//! | `metrics`, `http` | the metrics; the HTTP server for Prometheus |
//!
//! Each migration is a relay ([`hotlift::relay`]) with its own threads, as in `hotlift relay`. The relay decides which host
//! owns the guest; the agent never does. If the agent is killed, its migrations fail.

#![forbid(unsafe_code)]

mod agent;
mod budget;
mod bypass;
pub mod commands;
pub mod config;
mod critical_threads;
mod dial;
pub mod downtimes;
mod drain;
pub mod error;
#[cfg(test)]
mod fixture;
mod http;
mod incoming;
mod log;
pub mod messages;
mod metrics;
pub mod missed_packets;
mod names;
mod notify;
mod outgoing;
mod peer_port;
mod redirect;
pub mod redirect_check;
pub mod rules;
mod run;
pub mod session;
mod sessions;
pub mod snapshot;
mod source_socket;
mod supervise;
pub mod table;
mod table_watch;
mod totals;
mod tunnel;
pub mod values;

pub use agent::Agent;
pub use run::{Checked, check, run};
