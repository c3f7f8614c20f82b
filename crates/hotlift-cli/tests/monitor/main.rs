//! Monitors as their clients see them: QMP of a built-in guest, of a relay, and next to QEMU 10.0's.

mod compared;
mod guest_in_doubt;
mod hmp;
#[path = "../command/hotlift.rs"]
#[allow(dead_code, reason = "its other users need the rest")]
mod hotlift;
#[path = "../command/lost_message.rs"]
mod lost_message;
mod machine;
mod parameters;
mod python;
mod relay;
mod sockets;
