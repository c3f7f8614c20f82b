//! Sources and sinks of pages, one folder each.
//!
//! | folder | content |
//! |---|---|
//! | `guest_source` | the running guest of this process: the channel threads read its memory |
//! | `guest_sink` | the arriving guest of this process: the channel threads write its memory |
//! | `stream_source` | a stream from a peer, decoded into batches |
//! | `stream_sink` | a stream to a peer, encoded from batches |
//! | `file` | save files, and QEMU's `mapped-ram` files |
//!
//! `request` selects the source and the sink of a relay; `page_set` is the set of pages that two of the folders use.

pub mod file;
pub(crate) mod guest_sink;
pub(crate) mod guest_source;
pub(crate) mod page_set;
pub(crate) mod request;
pub(crate) mod stream_sink;
pub(crate) mod stream_source;
