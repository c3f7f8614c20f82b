//! Whole migrations between two guests of this process: what the engine promises whatever the guest,
//! the method and the number of channels, and what becomes of the guest when something breaks.
//!
//! | file | what |
//! |---|---|
//! | `matrix` | every guest, method, number of channels and zero page mode arrives whole |
//! | `lost_page` | the proof would notice a single page that was not sent |
//! | `faults` | a flipped byte or a cut connection anywhere: exactly one side runs the guest |
//! | `auto_converge` | a guest that is slowed down until it can be migrated |
//! | `events` | what a monitor hears, in QEMU's order, on every way a migration may go |
//! | `tls` | over TLS, and who is not let in |
//! | `steering` | what is changed, continued or cancelled while it runs |
//! | `switchover` | when the guest is stopped |
//! | `ways_out` | cancel, a guest that fails, noise before the migration |
//! | `xbzrle` | pages as what has changed of them |
//! | `postcopy` | a guest that runs before its pages are there, and what its source may do wrong |
//! | `postcopy_pair` | the same of both ends: its second connection, lost words, who is let in when it goes on |
//! | `refusals` | two ends that do not agree |
//! | `postcopy_source` | a guest that leaves before its pages do |
//! | `packets` | sizes of packets, and zero pages that are sent as normal ones |
//! | `probe`, `rig`, `census` | a guest that is watched, both ends, leaks |

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test says what it does"
)]

mod auto;
mod auto_converge;
mod census;
mod events;
mod faults;
mod lost_page;
mod matrix;
mod packets;
mod postcopy;
mod postcopy_pair;
mod postcopy_source;
mod probe;
mod refusals;
mod rig;
mod steering;
mod switchover;
mod tls;
mod ways_out;
mod xbzrle;
