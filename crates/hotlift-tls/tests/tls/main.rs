//! Handshakes and records with every kind of fault, and OpenSSL and QEMU as the other side.

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
