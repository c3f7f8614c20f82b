//! TLS 1.3 records (RFC 8446, section 5) as bytes.
//!
//! ```text
//! 17 03 03 length │ plaintext │ type │ tag (16)
//! └── header, 5 ──┘└──────── sealed ──────────┘
//! ```

use crate::error::RecordError;

/// Length of a record's header, in bytes.
pub(crate) const HEADER: usize = 5;

/// Length of the tag of all TLS 1.3 ciphers, in bytes.
pub(crate) const TAG: usize = 16;

/// Overhead of a record: header, type, tag.
pub(crate) const OVERHEAD: usize = HEADER + 1 + TAG;

/// Plaintext in a record of Hotlift: 14.5 KiB when sealed. Three such records and one of 16 KiB for the other direction fit
/// into the 64 KiB of a connection.
pub const RECORD_PLAINTEXT: usize = (29 << 9) - OVERHEAD;

/// Limit of plaintext, type and padding of a record (`2^14 + 1`).
pub(crate) const MAX_INNER: usize = (1 << 14) + 1;

/// Longest record of a peer without its header (`2^14 + 256`).
pub const MAX_CIPHERTEXT: usize = (1 << 14) + 256;

/// Longest record of a peer.
pub(crate) const MAX_RECORD: usize = HEADER + MAX_CIPHERTEXT;

/// Number of records sealed with one key, including the KeyUpdate at the end. RFC 8446, section 5.5, allows 2^24.5 records of
/// full length for AES-GCM; all ciphers use the same limit.
pub const RECORDS_PER_KEY: u64 = 1 << 24;

/// Content types of records.
pub(crate) const ALERT: u8 = 21;
pub(crate) const HANDSHAKE: u8 = 22;
pub(crate) const APPLICATION_DATA: u8 = 23;

/// Handshake messages that may follow a handshake.
pub(crate) const NEW_SESSION_TICKET: u8 = 4;
pub(crate) const KEY_UPDATE: u8 = 24;

/// Length of a handshake message's header: type, and 24 bits of length.
pub(crate) const MESSAGE_HEADER: usize = 4;

/// Longest message after a handshake. Tickets of OpenSSL contain the client's certificate.
pub(crate) const MAX_MESSAGE: usize = 64 << 10;

/// KeyUpdate message that does not request a KeyUpdate from the peer.
pub(crate) const KEY_UPDATE_MESSAGE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];

/// Returns the header of a sealed record whose body has `length` bytes.
pub(crate) fn header(length: u16) -> [u8; HEADER] {
    let [high, low] = length.to_be_bytes();
    [APPLICATION_DATA, 3, 3, high, low]
}

/// Returns the length of the body of a sealed record with this header.
///
/// # Errors
/// If it is not a sealed record, is too short for type and tag, or is too long.
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
