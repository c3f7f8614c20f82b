//! Accelerators of the methods that this program has.

pub(crate) use hotlift_accel::HARDWARE;
