//! The rounds of a live migration: dirty pages, the estimate of the rest, and throttling if it stays large.
//!
//! | file | content |
//! |---|---|
//! | `ram` | dirty pages, and the cursor over chunks |
//! | `estimate` | estimated time for the rest |
//! | `auto_converge` | throttling of the guest |
//!
//! [`migrate`](crate::ops::migrate) runs the rounds; this module knows neither sockets nor QEMU.

pub(crate) mod auto_converge;
pub(crate) mod estimate;
pub(crate) mod ram;
