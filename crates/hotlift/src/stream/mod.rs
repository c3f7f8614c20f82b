//! QEMU's migration stream: one implementation of each direction, for every operation.
//!
//! | file | what it does |
//! |---|---|
//! | `accept_loop` | classifies connections: channels, outcome queries, unknown clients |
//! | `rejections` | counts of rejected connections |
//! | `serve_queries` | serves a listener during a migration, and until the source knows the outcome |
//! | `arrivals` | collects the connections of one migration, which arrive in any order |
//! | `handshake` | handshake of a destination with a Hotlift source |
//! | `multifd_recv` | receiving end of a multifd channel: packets, into a [`PageSink`](multifd_recv::PageSink) |
//! | `packet_reader` | reads a multifd channel: headers ahead, payloads directly to their destination |
//! | `multifd_send` | sending end of the multifd channels: packets and sync points |
//! | `pages` | content of a packet's pages: guest memory, or a private copy |
//! | `main_channel` | receiving end of main, as a state machine without I/O: order, state and rejections |
//! | `main_recv` | reads main's bytes for that state machine |
//! | `main_send` | sending end of main: start of the stream, RAM sections, device state, EOF |
//! | `preempt` | the connection for requested pages, in both directions |
//! | `return_path` | receives the destination's messages |
//! | `channel_out` | writes a channel's bytes to its socket |
//! | `graceful_close` | sends the destination's reason, and closes its connections |
//! | `codec` | encoder and decoder of a multifd channel |
//! | `auto_encoder` | encoder of one channel with method auto: samples, selects, encodes, and records its CPU time |
//! | `counted_buffer` | buffers whose size depends on the peer's data |
//! | `load` | load of a destination's channel threads, reported to a source with method auto |

pub(crate) mod accept_loop;
pub(crate) mod arrivals;
pub(crate) mod auto_encoder;
mod channel_out;
pub(crate) mod codec;
pub(crate) mod counted_buffer;
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
pub(crate) mod rejections;
pub(crate) mod return_path;
pub(crate) mod serve_queries;
