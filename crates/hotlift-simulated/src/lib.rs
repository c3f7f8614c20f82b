//! Simulated accelerators for tests: one library with the C interfaces of libqpl, libqatzip and libwd,
//! whose devices can be told to be slow, busy, wrong or dead.
//!
//! Tests build it, name its file in `HOTLIFT_LIBQPL`, `HOTLIFT_LIBQATZIP` or `HOTLIFT_LIBWD`, and tell
//! it how to behave in `HOTLIFT_SIMULATED` or through [`hotlift_simulate`]. What it does says nothing
//! about the speed of any device.
//!
//! | file | subject |
//! |---|---|
//! | `behaviour` | what the device was told to do, and what it was asked to do |
//! | `deflate` | the work itself, by libdeflate |
//! | `qpl` | libqpl: Intel's IAA |
//! | `qatzip` | libqatzip: Intel's QAT |
//! | `wd` | libwd_comp: HiSilicon's zip engine |

#![cfg(target_os = "linux")]
#![cfg(target_pointer_width = "64")]

pub mod behaviour;
mod deflate;
pub mod qatzip;
pub mod qpl;
pub mod wd;

pub use behaviour::hotlift_simulate;
