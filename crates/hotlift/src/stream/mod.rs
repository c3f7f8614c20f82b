//! QEMU's stream, one implementation of each direction, for every operation.
//!
//! | file | what it does |
//! |---|---|
//! | `door` | tells connections apart: channels, questions, strangers |
//! | `strangers` | connections that were turned away, counted |
//! | `attend` | answers for a migration while it runs, and until its source knows the outcome |
//! | `arrivals` | the connections of one migration, in any order |
//! | `handshake` | what two Hotlifts say to each other first |
//! | `multifd_recv` | a multifd channel that is read: packets, into a [`PageSink`](multifd_recv::PageSink) |
//! | `packet_reader` | its bytes: headers ahead, payloads straight to their place |
//! | `multifd_send` | the multifd channels that are written: packets and sync points |
//! | `pages` | the content of a packet's pages: guest memory, or private |
//! | `main_channel` | the main channel that is read, as a machine without I/O: order, state and refusals |
//! | `main_recv` | its bytes, read for that machine |
//! | `main_send` | the main channel that is written: stream setup, sections of RAM, device state, end |
//! | `preempt` | the connection of pages that are waited for, in both directions |
//! | `return_path` | the destination's messages |
//! | `channel_out` | bytes of a channel to its socket |
//! | `graceful_close` | the destination's reason, and the end of its connections |
//! | `codec` | a multifd channel's half of its method |
//! | `auto_encoder` | the same with method auto: looks, asks, encodes, and books its time |
//! | `counted_buffer` | buffers whose size the peer chooses |
//! | `load` | what a receiver's threads have done, for a source with method auto |

pub(crate) mod arrivals;
pub(crate) mod attend;
pub(crate) mod auto_encoder;
mod channel_out;
pub(crate) mod codec;
pub(crate) mod counted_buffer;
pub(crate) mod door;
pub(crate) mod graceful_close;
pub(crate) mod handshake;
pub(crate) mod load;
pub(crate) mod main_channel;
pub(crate) mod main_recv;
pub(crate) mod main_send;
pub(crate) mod multifd_recv;
pub(crate) mod multifd_send;
mod packet_reader;
pub(crate) mod pages;
pub(crate) mod preempt;
pub(crate) mod return_path;
pub(crate) mod strangers;
