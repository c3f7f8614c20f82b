//! The rounds of a live migration: what is dirty, whether the rest is small enough, and what to do if it stays large.
//!
//! | file | what it knows |
//! |---|---|
//! | `ram` | which pages are dirty, and which chunk is next |
//! | `estimate` | how long the rest would take |
//! | `auto_converge` | how much the guest is slowed down |
//!
//! [`migrate`](crate::ops::migrate) goes through the rounds; sockets and QEMU are not known here.

pub(crate) mod auto_converge;
pub(crate) mod estimate;
pub(crate) mod ram;
