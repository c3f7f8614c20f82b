//! TLS 1.3 records (RFC 8446, section 5) as bytes.
//!
//! ```text
//! 17 03 03 length │ plaintext │ type │ tag (16)
//! └── header, 5 ──┘└──────── sealed ──────────┘
//! ```

use crate::error::RecordError;

/// Bytes of a record's header.
pub(crate) const HEADER: usize = 5;

/// Bytes of the tag of each of TLS 1.3's ciphers.
pub(crate) const TAG: usize = 16;

/// What a record has besides its plaintext: header, type, tag.
pub(crate) const OVERHEAD: usize = HEADER + 1 + TAG;

/// Plaintext in a record of ours: 14.5 KiB when sealed, of which three fit beside a record of 16 KiB for the other direction
/// into the 64 KiB that a connection may take.
pub const RECORD_PLAINTEXT: usize = (29 << 9) - OVERHEAD;

/// Plaintext, type and padding of a record at most (`2^14 + 1`).
pub(crate) const MAX_INNER: usize = (1 << 14) + 1;

/// Longest record of a peer without its header (`2^14 + 256`).
pub const MAX_CIPHERTEXT: usize = (1 << 14) + 256;

/// Longest record of a peer.
pub(crate) const MAX_RECORD: usize = HEADER + MAX_CIPHERTEXT;

/// Records sealed with one key. RFC 8446, section 5.5, allows AES-GCM 2^24.5 of full length; all ciphers are treated alike.
/// A KeyUpdate is sent in the last of them.
pub const RECORDS_PER_KEY: u64 = 1 << 24;

/// Content types.
pub(crate) const ALERT: u8 = 21;
pub(crate) const HANDSHAKE: u8 = 22;
pub(crate) const APPLICATION_DATA: u8 = 23;

/// Handshake messages that may follow a handshake.
pub(crate) const NEW_SESSION_TICKET: u8 = 4;
pub(crate) const KEY_UPDATE: u8 = 24;

/// Length of a handshake message's header: type, and 24 bits of length.
pub(crate) const MESSAGE_HEADER: usize = 4;

/// Longest message after a handshake. Tickets of OpenSSL carry the client's certificate.
pub(crate) const MAX_MESSAGE: usize = 64 << 10;

/// A KeyUpdate that asks the other side for nothing.
pub(crate) const KEY_UPDATE_MESSAGE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];

/// The header of a sealed record whose body has `length` bytes.
pub(crate) fn header(length: u16) -> [u8; HEADER] {
    let [high, low] = length.to_be_bytes();
    [APPLICATION_DATA, 3, 3, high, low]
}

/// Length of the body of the sealed record that has this header.
///
/// # Errors
/// If it is no sealed record, or has no place for type and tag, or is longer than a record can be.
pub(crate) fn body_length(header: [u8; HEADER]) -> Result<usize, RecordError> {
    let [kind, _, _, high, low] = header;
    if kind != APPLICATION_DATA {
        return Err(RecordError::NotSealed { kind });
    }
    let length = usize::from(u16::from_be_bytes([high, low]));
    if (1 + TAG..=MAX_CIPHERTEXT).contains(&length) {
        Ok(length)
    } else {
        Err(RecordError::BadLength { length })
    }
}
