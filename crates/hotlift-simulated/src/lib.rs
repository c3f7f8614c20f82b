//! Simulated accelerators for tests: one library with the C interfaces of libqpl, libqatzip and libwd, whose devices can be
//! configured to be slow, busy, wrong or dead.
//!
//! Tests build the library and name its file in `HOTLIFT_LIBQPL`, `HOTLIFT_LIBQATZIP` or `HOTLIFT_LIBWD`. Tests set the
//! behaviour of the devices in `HOTLIFT_SIMULATED` or through [`hotlift_simulate`]. The simulation's speed is unrelated to that
//! of any device.
//!
//! | file | subject |
//! |---|---|
//! | `behaviour` | configured behaviour, and counts of jobs |
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
