//! The guest of this process as the destination of pages.
//!
//! | file | purpose |
//! |---|---|
//! | `accept` | accepts the connections, and compares their settings |
//! | `sink` | the guest, with its received pages and devices |
//! | `source` | the connections of its source |
//! | `channel` | thread of a multifd channel: packets into guest RAM |
//! | `main_channel` | the main channel: records of RAM, device state, the end |
//! | `decompress_threads` | decompresses pages of `compress` into guest RAM |
//! | `postcopy` | runs the guest before all its pages have arrived |
//! | `announce` | announces the guest's new host to the network |

pub(crate) mod accept;
mod announce;
pub(crate) mod channel;
pub(crate) mod decompress_threads;
pub(crate) mod main_channel;
mod postcopy;
pub(crate) mod sink;
pub(crate) mod source;
