//! Where pages come from and where they go, a folder an end.
//!
//! | folder | the end is |
//! |---|---|
//! | `guest_source` | the guest of this process, which runs: its channels' threads read its memory |
//! | `guest_sink` | the guest of this process, which is to run: its channels' threads write its memory |
//! | `stream_source` | a stream that somebody else sends, taken apart into batches |
//! | `stream_sink` | a stream to somebody else, out of batches |
//! | `file` | save files, and QEMU's `mapped-ram` files |
//!
//! `request` chooses among those of a relay; `page_set` is what two of them keep of pages.

pub mod file;
pub(crate) mod guest_sink;
pub(crate) mod guest_source;
pub(crate) mod page_set;
pub(crate) mod request;
pub(crate) mod stream_sink;
pub(crate) mod stream_source;
