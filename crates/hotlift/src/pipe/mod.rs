//! The path between a source of pages and a sink: a limited number of batches, barriers, and the threads that use them.
//!
//! | file | content |
//! |---|---|
//! | `source`, `sink` | interfaces of all sources and sinks |
//! | `batch`, `flow` | pages in transit, and the fixed number of batches in circulation: backpressure without growth |
//! | `barrier` | pauses channels at a sync point until main reaches it |
//! | `stream_in`, `stream_out` | the connections of a source that is a stream, and of a sink |
//! | `session`, `run`, `watch` | shared state of the threads; the threads; the watch that ends them when all are blocked |
//! | `settings` | settings of a relay |
//! | `hooks` | callbacks of the relay's caller |

pub(crate) mod barrier;
pub(crate) mod batch;
pub(crate) mod flow;
pub(crate) mod hooks;
pub(crate) mod run;
pub(crate) mod session;
pub(crate) mod settings;
pub(crate) mod sink;
pub(crate) mod source;
pub(crate) mod stream_in;
pub(crate) mod stream_out;
pub(crate) mod watch;
