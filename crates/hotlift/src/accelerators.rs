//! Accelerators for the compression methods: those of `hotlift-accel` with feature `accel`, none without this feature.

#[cfg(feature = "accel")]
pub(crate) use hotlift_accel::HARDWARE;

#[cfg(not(feature = "accel"))]
pub(crate) static HARDWARE: [hotlift_methods::device::Hardware; 0] = [];
