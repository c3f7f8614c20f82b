//! Accelerators of the host, each behind a small trait of `hotlift-methods` or of the engine.
//!
//! | folder | subject |
//! |---|---|
//! | `qpl/` | Intel's IAA, for the pages of `qpl` |
//! | `uadk/` | HiSilicon's accelerator, for the pages of `uadk` |
//! | `qatzip/` | Intel's QAT, for the members of `qatzip` |
//! | `idxd/` | work queues of Intel's DSA and IAA; zero page detection by DSA |
//!
//! Libraries of the vendors are opened at run time: a program starts without them. The formats, and the same work on the CPU,
//! are in `hotlift-methods`, which passes pages to a device, checks its results, and abandons a device that fails.
//!
//! # Example
//!
//! ```
//! use hotlift_accel::HARDWARE;
//! use hotlift_methods::{Accelerator, EncoderSettings, MethodError, RunsOn, method};
//!
//! let qpl = method("qpl").expect("a row of the table");
//! let settings = EncoderSettings {
//!     accelerator: Accelerator::Auto(&HARDWARE),
//!     ..EncoderSettings::software(qpl.default_level)
//! };
//! let mut payload = Vec::new();
//! let mut encoder = (qpl.encoder)(&settings)?;
//! encoder.encode(&[42; 4096], &mut payload)?;
//! match encoder.runs_on() {
//!     RunsOn::Hardware(device) => println!("compressed by {device}"),
//!     RunsOn::Fallback(reason) => println!("compressed by the CPU: {reason}"),
//!     RunsOn::Software => unreachable!("it is not off"),
//! }
//! # Ok::<_, MethodError>(())
//! ```

pub mod idxd;
mod qatzip;
mod qpl;
mod uadk;

use hotlift_methods::device::Hardware;

/// Accelerators of the methods.
pub static HARDWARE: [Hardware; 3] = [qpl::hardware(), uadk::hardware(), qatzip::hardware()];

/// The vendors' own software in place of their devices, for tests and comparisons only. It checks our use of the libraries on
/// hosts without a device. It is slower than our software, and each call of libqatzip without a device uses up one of the
/// process's 1024 thread keys.
pub static VENDOR_SOFTWARE: [Hardware; 2] = [qpl::software(), qatzip::software()];
