//! Accelerators of the methods that this program has: those of `hotlift-accel` with the feature `accel`, none without it.

#[cfg(feature = "accel")]
pub(crate) use hotlift_accel::HARDWARE;

#[cfg(not(feature = "accel"))]
pub(crate) static HARDWARE: [hotlift_methods::device::Hardware; 0] = [];
