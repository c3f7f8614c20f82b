//! Distinguishes a TLS connection from a plain one by its first bytes.

/// Number of bytes that [`is_tls`] needs.
pub const SNIFFED: usize = 3;

/// First bytes of a handshake: type and major version of the record.
pub const HANDSHAKE_BEGINS: [u8; 2] = [0x16, 3];

/// First bytes of an alert.
pub const ALERT_BEGINS: [u8; 2] = [0x15, 3];

/// Returns true if a connection that begins with `first` uses TLS: a handshake record, or an alert of a peer that expected TLS.
/// Connections without TLS never match: QEMU's stream begins with `QEVM`, its channels with `11 22 33 44`, and a conversation
/// between two Hotlifts with `{`.
#[must_use]
pub fn is_tls(first: [u8; SNIFFED]) -> bool {
    let [kind, major, minor] = first;
    [HANDSHAKE_BEGINS, ALERT_BEGINS].contains(&[kind, major]) && minor <= 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_distinguish_tls_from_every_other_protocol() {
        assert!(is_tls([0x16, 3, 1]));
        assert!(is_tls([0x15, 3, 3]));
        for plain in [b"QEV", b"\x11\x22\x33", b"{\"v", b"\x08\x00\x0a", b"GET"] {
            assert!(!is_tls(*plain), "{plain:?}");
        }
    }
}
