//! A stream as where pages come from: a QEMU's, a relay's, or what a relay has saved.
//!
//! | file | what it does |
//! |---|---|
//! | `accept` | waits for the connections, and finds out how many channels there are |
//! | `gathering` | when all channels of a source are there |
//! | `upstream` | the source: its connections, as what answers go to |
//! | `read_setup` | reads what the stream has before its first page, and answers its source |
//! | `receive` | a multifd channel's packets into batches, or to the other side unread |
//! | `main_reader`, `main_pages` | does what the main channel asks for: sync points, devices, the end; pages into batches |
//! | `demand` | which pages a guest waits for that runs on the other side already |
//! | `candidates`, `preempt` | the connection that a QEMU may send such pages on: found, and read |
//! | `device_state` | who has the guest |
//! | `pass_through` | a stream that cannot be taken apart, byte for byte |

pub(crate) mod accept;
pub(crate) mod candidates;
pub(crate) mod demand;
pub(crate) mod device_state;
mod gathering;
mod main_pages;
pub(crate) mod main_reader;
pub(crate) mod pass_through;
pub(crate) mod preempt;
pub(crate) mod read_setup;
pub(crate) mod receive;
pub(crate) mod upstream;
