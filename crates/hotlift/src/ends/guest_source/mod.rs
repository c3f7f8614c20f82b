//! The guest of this process as the source of pages.
//!
//! | file | purpose |
//! |---|---|
//! | `source` | state that the threads of the migration share |
//! | `readers` | the threads: their work, and the handling of answers and losses |
//! | `rounds` | synchronises the begin and end of a round over all channels |
//! | `channel` | thread of a multifd channel: chunks, zero pages, packets |
//! | `zero_devices` | zero-page detection by devices instead of the channel's thread |
//! | `normal_share` | zero pages that are sent with their content (a test option of QEMU) |
//! | `main_pages` | pages as records of main: without multifd, and of `legacy` zero-page detection |
//! | `xbzrle` | encodes pages that were sent before as deltas |
//! | `postcopy_pages` | missing pages of a guest that runs at the destination |
//! | `reporter` | progress reports, from the state of the rounds and the counters of the channels |

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
