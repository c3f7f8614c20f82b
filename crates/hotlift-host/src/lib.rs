//! Detects the properties of a host, and measures compression methods on it, for commands that recommend or compare settings.
//!
//! | file | subject |
//! |---|---|
//! | `accel` | accelerators, and the missing parts of their setup |
//! | `rules` | published rules that choose settings by the accelerators |
//! | `page_faults` | permission to load a guest's pages on access; the settings that are missing for it |
//! | `memory`, `qemu` | memory to sample: of a process, of the QEMU behind a QMP socket, of an image |
//! | `sample` | random pages of that memory |
//! | `measure` | measurement of every method with the sampled pages |

#![forbid(unsafe_code)]

pub mod accel;
pub mod error;
pub mod measure;
pub mod memory;
pub mod page_faults;
pub mod qemu;
pub mod rules;
pub mod sample;
