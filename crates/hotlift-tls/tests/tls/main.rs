//! Tests handshakes and records with every kind of fault, and with OpenSSL or QEMU as the peer.

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
