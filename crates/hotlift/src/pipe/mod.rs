//! Between a source of pages and a sink: a bounded number of batches, barriers, and the threads that share them.
//!
//! | file | what it is |
//! |---|---|
//! | `source`, `sink` | what every end does |
//! | `batch`, `flow` | pages on their way, and the fixed number of batches that go round: backpressure, no growth |
//! | `barrier` | channels stand still at a sync point until main has come to it |
//! | `stream_in`, `stream_out` | the connections of a source that is a stream, and of a sink |
//! | `session`, `run`, `watch` | what the threads share; the threads; what ends them when they all wait |
//! | `settings` | how a relay passes a stream on |
//! | `hooks` | what the caller wants to know, and knows better |

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
