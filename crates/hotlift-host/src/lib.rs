//! What a host can do, for the commands that choose by it or compare it.
//!
//! | file | subject |
//! |---|---|
//! | `accel` | accelerators, and what is missing to use them |
//! | `memory`, `sample` | memory of a process, an image, a folder; pages drawn from it at random |
//! | `measure`, `loopback`, `cost` | methods, zero pages and sockets on this host; the units of what they take |
//! | `survey` | the same of another host, and the link to it |
//! | `bandwidth` | a link's rate as it is typed |

#![forbid(unsafe_code)]

pub mod accel;
pub mod bandwidth;
pub mod cost;
pub mod error;
pub mod loopback;
pub mod measure;
pub mod memory;
pub mod sample;
pub mod survey;
