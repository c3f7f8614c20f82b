//! The rounds of a live migration: dirty pages, the estimated time for the remaining pages, and throttling of the guest.
//!
//! | file | content |
//! |---|---|
//! | `ram` | dirty pages, and the cursor over chunks |
//! | `estimate` | estimated time for the remaining pages |
//! | `auto_converge` | throttling of the guest while it dirties pages too fast |
//!
//! [`migrate`](crate::ops::migrate) runs the rounds. This module uses neither sockets nor QEMU's stream.

pub(crate) mod auto_converge;
pub(crate) mod estimate;
pub(crate) mod ram;
