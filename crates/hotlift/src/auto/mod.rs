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
//! | `channels` | what the channels share |
//! | `link` | what the sockets say of the wire |
//! | `timeline` | what went by which method, by time |

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
