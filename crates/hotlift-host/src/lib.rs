//! What a host can do, for the commands that choose by it or compare it.
//!
//! | file | subject |
//! |---|---|
//! | `accel` | accelerators, and what is missing to use them |
//! | `rules` | published rules for choosing among them |
//! | `page_faults` | whether a user can bring a guest its pages as they are touched, and what to set if not |
//! | `memory`, `qemu` | memory of a process, of the QEMU behind a QMP socket, of an image |
//! | `sample` | pages drawn from it at random |
//! | `measure` | every method on such pages |

#![forbid(unsafe_code)]

pub mod accel;
pub mod error;
pub mod measure;
pub mod memory;
pub mod page_faults;
pub mod qemu;
pub mod rules;
pub mod sample;
