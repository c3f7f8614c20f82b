//! A stream as the source of pages: from a QEMU, from a relay, or from a file of a relay.
//!
//! | file | purpose |
//! |---|---|
//! | `accept` | accepts the connections, and finds out the number of channels |
//! | `channel_wait` | decides when all channels of a source are there |
//! | `upstream` | the source: its connections, and the answers to it |
//! | `read_setup` | reads the stream up to its first page, and answers its source |
//! | `receive` | packets of a multifd channel: into batches, or forwarded without decoding |
//! | `main_reader`, `main_pages` | executes the actions of the main channel: sync points, devices, end; pages into batches |
//! | `pending_requests` | pages that a guest waits for that already runs at the destination |
//! | `candidates`, `preempt` | finds and reads a QEMU's preempt channel, which has requested pages |
//! | `device_state` | the end of the migration, and the owner of the guest |
//! | `pass_through` | copies a stream that cannot be decoded, byte for byte |

pub(crate) mod accept;
pub(crate) mod candidates;
mod channel_wait;
pub(crate) mod device_state;
mod main_pages;
pub(crate) mod main_reader;
pub(crate) mod pass_through;
pub(crate) mod pending_requests;
pub(crate) mod preempt;
pub(crate) mod read_setup;
pub(crate) mod receive;
pub(crate) mod upstream;
