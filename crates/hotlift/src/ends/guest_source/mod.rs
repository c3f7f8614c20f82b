//! The guest of this process as where pages come from.
//!
//! | file | what it does |
//! |---|---|
//! | `session` | what the threads of the migration share |
//! | `channel` | a multifd channel's thread: chunks, zero pages, packets |
//! | `zero_devices` | devices look for zero pages, in place of that thread |
//! | `normal_share` | pages that are sent with their content though they are zero (a test option of QEMU) |
//! | `main_channel` | the main channel: opening, flushes, device state, PINGs |
//! | `main_pages` | pages as records of main: without multifd, and of `legacy` zero-page detection |
//! | `compress_threads`, `xbzrle` | what such records are made of |
//! | `postcopy_pages` | pages that a guest lacks which runs at the destination |
//! | `return_path` | the thread that listens to the destination |
//! | `reporter` | progress, put together of what the rounds know and what the channels count |

pub(crate) mod channel;
pub(crate) mod compress_threads;
pub(crate) mod main_channel;
pub(crate) mod main_pages;
mod normal_share;
pub(crate) mod postcopy_pages;
pub(crate) mod reporter;
pub(crate) mod return_path;
pub(crate) mod session;
pub(crate) mod xbzrle;
pub(crate) mod zero_devices;
