//! Tests complete migrations between two guests in one process. They check the engine's guarantees for any guest,
//! method and number of channels, and the state of the guest after a failure.
//!
//! | file | subject |
//! |---|---|
//! | `matrix` | every guest, method, number of channels and zero page mode arrives whole |
//! | `lost_page` | the proof detects a single page that was not sent |
//! | `faults` | a flipped byte or a cut connection anywhere: exactly one side runs the guest |
//! | `auto_converge` | a guest that is throttled until it can be migrated |
//! | `events` | events for a monitor, in QEMU's order, on every path of a migration |
//! | `tls` | migrations over TLS, and rejected clients |
//! | `steering` | changes, continuation and cancel during a migration |
//! | `switchover` | time of the guest's stop |
//! | `ways_out` | cancel, a guest that fails, noise before the migration |
//! | `xbzrle` | pages as deltas |
//! | `postcopy` | a guest that runs before its pages arrive, and errors of its source |
//! | `postcopy_pair` | the same with both ends: second connection, lost messages, admission at a recovery |
//! | `refusals` | incompatible ends |
//! | `postcopy_source` | a guest that leaves before its pages do |
//! | `packets` | sizes of packets, and zero pages sent as normal ones |
//! | `probe`, `rig`, `census` | a watched guest, both ends, leaks |

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test prints its progress"
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
