//! Handshakes with each thing that can be wrong, records with each thing that can happen to them, and OpenSSL
//! and QEMU at the other end.

mod handshake;
mod judged;
mod memory;
mod openssl;
mod qemu;
mod records;
mod reload;
mod strangers;
mod support;
mod tampered;
