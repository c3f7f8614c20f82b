//! Tests monitors as clients use them: QMP of a built-in guest and of a relay, and a comparison with QEMU 10.0.

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
