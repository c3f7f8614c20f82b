//! Accelerators of the host. Each implements a small trait of `hotlift-methods` or of the engine.
//!
//! | folder | subject |
//! |---|---|
//! | `qpl/` | Intel's IAA, for the pages of `qpl` |
//! | `uadk/` | HiSilicon's accelerator, for the pages of `uadk` |
//! | `qatzip/` | Intel's QAT, for the members of `qatzip` |
//! | `idxd/` | work queues of Intel's DSA and IAA; zero page detection by DSA |
//!
//! The vendors' libraries are opened at run time: a program also starts without them. `hotlift-methods` has the formats, and
//! does the same work on the CPU. It passes pages to a device, checks the results, and stops using a device that fails.
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

/// Accelerators for the methods `qpl`, `uadk` and `qatzip` of `hotlift-methods`.
pub static HARDWARE: [Hardware; 3] = [qpl::hardware(), uadk::hardware(), qatzip::hardware()];

/// The vendors' own software instead of their devices, for tests and comparisons only. It tests the calls of the libraries on
/// hosts without a device. It is slower than the software of `hotlift-methods`. Without a device, each call of libqatzip also
/// uses up one of the process's 1024 thread keys (`pthread_key_create`).
pub static VENDOR_SOFTWARE: [Hardware; 2] = [qpl::software(), qatzip::software()];
