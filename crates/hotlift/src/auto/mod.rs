//! Method `auto`: selects the encoding of each packet for the current state of the link and the CPUs.
//!
//! ```text
//! packet -> sample (class of content) -> choose (price) -> encode -> write
//!             ^                            ^                          |
//!             lz4                          waits, cost of each candidate
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `candidates` | encodings that a packet can be sent in |
//! | `costs` | measured cost of each candidate, by class of content |
//! | `controller` | the price of a byte, and the selection |
//! | `channels` | shared state of the channels |
//! | `link` | measurements of the wire from the sockets |
//! | `timeline` | shares of the methods over time |

mod candidates;
pub(crate) mod channels;
pub(crate) mod controller;
pub(crate) mod costs;
mod link;
#[cfg(test)]
mod tests;
mod timeline;

pub(crate) use candidates::Reader;
pub(crate) use channels::Auto;
pub use timeline::MethodsNow;
pub(crate) use timeline::Timeline;
