//! A stream as where pages come from: a QEMU's, a relay's, or what a relay has saved.
//!
//! | file | what it does |
//! |---|---|
//! | `accept` | waits for the connections, and finds out how many channels there are |
//! | `upstream` | the channels, as what answers go to |
//! | `setup` | what the stream says before its first page, and whether it can be taken apart |
//! | `receive` | a multifd channel's packets into batches, or to the other side unread |
//! | `main_reader`, `main_pages` | the main channel: sync points; pages into batches |
//! | `postcopy` | what a guest waits for that runs on the other side already |
//! | `candidates`, `preempt` | the connection that a QEMU may send such pages on: found, and read |
//! | `damage` | what is wrong with the bytes of main |
//! | `device_state` | what is behind RAM, and who has the guest |
//! | `pass_through` | a stream that cannot be taken apart, byte for byte |

pub(crate) mod accept;
pub(crate) mod candidates;
mod damage;
pub(crate) mod device_state;
mod main_pages;
pub(crate) mod main_reader;
pub(crate) mod pass_through;
pub(crate) mod postcopy;
pub(crate) mod preempt;
pub(crate) mod receive;
pub(crate) mod setup;
pub(crate) mod upstream;
