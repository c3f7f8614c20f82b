//! Handshakes and records with every kind of fault, and OpenSSL and QEMU as the other side.

mod certificate_check;
mod handshake;
mod hostile_peers;
mod memory;
mod openssl;
mod qemu;
mod records;
mod reload;
mod support;
mod tampered;
