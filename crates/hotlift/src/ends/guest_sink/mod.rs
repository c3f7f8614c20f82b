//! The guest of this process as where pages go.
//!
//! | file | what it does |
//! |---|---|
//! | `accept` | waits for the connections, and compares their settings |
//! | `sink` | the guest, with what has come of it |
//! | `source` | the connections of its source |
//! | `channel` | a multifd channel's thread: packets into guest RAM |
//! | `main_channel` | the main channel: records of RAM, device state, the end |
//! | `decompress_threads` | pages of `compress` into guest RAM |
//! | `postcopy` | the guest runs before all its pages are there |
//! | `announce` | the guest has a new place in the network |

pub(crate) mod accept;
mod announce;
pub(crate) mod channel;
pub(crate) mod decompress_threads;
pub(crate) mod main_channel;
mod postcopy;
pub(crate) mod sink;
pub(crate) mod source;
