//! Advice on a migration that has not begun: which method, level and channels for this memory, on this host, over this
//! link, and what the migration will take.
//!
//! | file | subject |
//! |---|---|
//! | `request` | what is asked |
//! | `advice` | samples, measures, predicts and chooses |
//! | `qemu` | the process behind a QMP socket, its dirty rate |
//! | `model` | the arithmetic of a migration |
//! | `rules` | published advice on accelerators |
//! | `zero_pages` | who looks for zero pages |
//! | `choose` | the best candidate for a goal |
//! | `text` | the advice for people, and what to type |
//! | `error` | why there is no advice |

#![forbid(unsafe_code)]

mod advice;
mod choose;
mod error;
mod model;
mod qemu;
mod request;
mod rules;
mod text;
mod zero_pages;

pub use advice::{Advice, advise};
pub use choose::Goal;
pub use error::AdviseError;
pub use request::{Origin, Request};
