//! The guest of this process as where pages come from.
//!
//! | file | what it does |
//! |---|---|
//! | `source` | state that the threads of the migration share |
//! | `readers` | the threads: what each does, and how an answer or a loss is taken |
//! | `rounds` | channels start and end a round together |
//! | `channel` | a multifd channel's thread: chunks, zero pages, packets |
//! | `zero_devices` | devices look for zero pages, in place of that thread |
//! | `normal_share` | pages that are sent with their content though they are zero (a test option of QEMU) |
//! | `main_pages` | pages as records of main: without multifd, and of `legacy` zero-page detection |
//! | `xbzrle` | what such records are made of, of pages that were sent before |
//! | `postcopy_pages` | pages that a guest lacks which runs at the destination |
//! | `reporter` | progress, put together of what the rounds know and what the channels count |

mod channel;
pub(crate) mod main_pages;
mod normal_share;
pub(crate) mod postcopy_pages;
mod readers;
pub(crate) mod reporter;
mod rounds;
pub(crate) mod source;
pub(crate) mod xbzrle;
pub(crate) mod zero_devices;
