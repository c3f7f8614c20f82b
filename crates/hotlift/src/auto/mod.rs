//! Method `auto`: what each packet is sent as, by what the link and the cores can do now.
//!
//! ```text
//! packet -> look (class of content) -> choose (price) -> encode -> write
//!             ^                          ^                          |
//!             sample by lz4              who waits for whom, what each candidate costs
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `candidates` | what a packet can be sent as |
//! | `costs` | what each candidate costs, by kind of content, as measured |
//! | `controller` | the price of a byte, and the choice |
//! | `encoder` | a channel's thread: looks, asks, encodes, and books its time |
//! | `channels` | what the channels share |
//! | `link` | what the sockets say of the wire |
//! | `timeline` | what went by which method, by time |

mod candidates;
mod channels;
mod controller;
mod costs;
mod encoder;
mod link;
#[cfg(test)]
mod simulation;
mod timeline;

pub(crate) use candidates::Reader;
pub(crate) use channels::Auto;
pub(crate) use encoder::AutoEncoder;
pub use timeline::MethodsNow;
pub(crate) use timeline::Timeline;
