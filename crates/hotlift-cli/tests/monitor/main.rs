//! Monitors as their clients see them: QMP of a built-in guest, of a relay, and beside QEMU 10.0's.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test says what it skips"
)]

mod compared;
mod hmp;
#[path = "../command/hotlift.rs"]
#[allow(dead_code, reason = "its other users need the rest")]
mod hotlift;
#[path = "../command/lost_word.rs"]
mod lost_word;
mod machine;
mod parameters;
mod python;
mod relay;
mod sockets;
mod whereabouts;
