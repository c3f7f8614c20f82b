//! Both ends of a connection with fixed, published keys, for tests and the fuzz target only. Tests need records that no peer
//! would send, and thousands of connections a second. Nothing sent over such a connection is secret.

use std::sync::Arc;

use aws_lc_rs::aead;

use crate::cipher::Cipher;
use crate::error::RecordError;
use crate::link::{Keys, Link};
use crate::record::RECORD_PLAINTEXT;
use crate::record_opener::RecordOpener;
use crate::record_sealer::RecordSealer;

/// One end of a connection with fixed keys.
#[derive(Debug)]
pub struct End {
    /// Opens the other end's records.
    pub opener: RecordOpener,
    /// Seals this end's records.
    pub sealer: RecordSealer,
}

/// TLS 1.3's ciphers.
static ALGORITHMS: [&aead::Algorithm; 3] = [
    &aead::AES_128_GCM,
    &aead::AES_256_GCM,
    &aead::CHACHA20_POLY1305,
];

/// Returns client and server with cipher 0, 1 or 2, and new keys after `records_per_key` records.
///
/// # Panics
/// If there is no such cipher.
#[must_use]
pub fn ends(cipher: usize, records_per_key: u64) -> [End; 2] {
    let algorithm = ALGORITHMS[cipher];
    [true, false].map(|is_client| {
        let keys = FixedKeys {
            algorithm,
            is_client,
            sent: 0,
            received: 0,
        };
        let (sending, receiving) = (keys.make(is_client, 0), keys.make(!is_client, 0));
        let link = Arc::new(Link::new(keys));
        End {
            opener: RecordOpener::new(receiving.expect("a key"), Arc::clone(&link), is_client),
            sealer: RecordSealer::new(sending.expect("a key"), link, records_per_key),
        }
    })
}

/// Returns a sealed record of any type with any content, preceded by a KeyUpdate if one is due.
///
/// # Panics
/// If `content` is longer than a record of Hotlift.
#[must_use]
pub fn record(sealer: &mut RecordSealer, kind: u8, content: &[u8]) -> Vec<u8> {
    assert!(content.len() <= RECORD_PLAINTEXT, "more than a record");
    let mut record = Vec::new();
    sealer
        .send_record(&mut record, kind, content)
        .expect("a Vec takes all");
    record
}

/// Switches `sealer` to the next key, as after a KeyUpdate that the test made itself.
///
/// # Panics
/// Never.
pub fn next_key(sealer: &mut RecordSealer) {
    sealer.next_key().expect("a key");
}

struct FixedKeys {
    algorithm: &'static aead::Algorithm,
    is_client: bool,
    sent: u8,
    received: u8,
}

impl FixedKeys {
    /// Makes the key with this `number` for the client's or the server's records.
    fn make(&self, of_client: bool, number: u8) -> Result<Cipher, RecordError> {
        let key = [number.wrapping_mul(2) | u8::from(of_client); 32];
        let key = &key[..self.algorithm.key_len()];
        Cipher::of(self.algorithm, key, [number; aead::NONCE_LEN], 0)
    }
}

impl Keys for FixedKeys {
    fn next_to_send(&mut self) -> Result<Cipher, RecordError> {
        self.sent = self.sent.wrapping_add(1);
        self.make(self.is_client, self.sent)
    }

    fn next_to_receive(&mut self) -> Result<Cipher, RecordError> {
        self.received = self.received.wrapping_add(1);
        self.make(!self.is_client, self.received)
    }
}
