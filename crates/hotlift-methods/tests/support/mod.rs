//! Helpers for tests of methods: packets, zlib and zstd as QEMU uses them, and QEMU itself.
#![allow(dead_code)]

pub mod machine;
mod packets;
pub mod qemu;
pub mod stream;

pub use packets::*;
