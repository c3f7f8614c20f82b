//! Properties of a host, for the commands that choose by them or compare them.
//!
//! | file | subject |
//! |---|---|
//! | `accel` | accelerators, and the missing parts of their setup |
//! | `rules` | published rules for choosing among them |
//! | `page_faults` | permission to load a guest's pages on access, and the missing settings |
//! | `memory`, `qemu` | memory of a process, of the QEMU behind a QMP socket, of an image |
//! | `sample` | random pages from it |
//! | `measure` | every method with these pages |

#![forbid(unsafe_code)]

pub mod accel;
pub mod error;
pub mod measure;
pub mod memory;
pub mod page_faults;
pub mod qemu;
pub mod rules;
pub mod sample;
