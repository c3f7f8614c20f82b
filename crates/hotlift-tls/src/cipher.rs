//! The key of one direction and the number of its next record.

use aws_lc_rs::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use rustls::ConnectionTrafficSecrets;

use crate::error::RecordError;
use crate::record::{HEADER, MAX_INNER, OVERHEAD, TAG, header};

/// Seals or opens the records of one direction with one key. Each record has its own number (RFC 8446, section 5.3).
#[derive(Debug)]
pub(crate) struct Cipher {
    key: LessSafeKey,
    iv: [u8; aead::NONCE_LEN],
    /// Number of the next record.
    sequence: u64,
}

impl Cipher {
    /// Creates a cipher from `secrets`. `sequence` is the number of the next record.
    pub(crate) fn new(
        (sequence, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self, RecordError> {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&aead::AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&aead::AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
                (&aead::CHACHA20_POLY1305, key, iv)
            }
            _ => return Err(RecordError::Keys),
        };
        // The key's array has the length of the longest cipher's key.
        let key = key.as_ref().get(..algorithm.key_len());
        let iv = iv.as_ref().try_into().map_err(|_| RecordError::Keys)?;
        Self::of(algorithm, key.ok_or(RecordError::Keys)?, iv, sequence)
    }

    /// Creates a cipher from a key with the length that `algorithm` requires. `sequence` is the number of the next record.
    pub(crate) fn of(
        algorithm: &'static aead::Algorithm,
        key: &[u8],
        iv: [u8; aead::NONCE_LEN],
        sequence: u64,
    ) -> Result<Self, RecordError> {
        let key = UnboundKey::new(algorithm, key).map_err(|_| RecordError::Keys)?;
        Ok(Self {
            key: LessSafeKey::new(key),
            iv,
            sequence,
        })
    }

    /// Returns the number of records sealed or opened with this key.
    pub(crate) fn records(&self) -> u64 {
        self.sequence
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        // Overflow would take 2^64 records.
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Seals `record` in place, as a record of type `kind`. `record` must contain space for the header, the plaintext, and
    /// space for type and tag.
    pub(crate) fn seal(&mut self, kind: u8, record: &mut [u8]) -> Result<(), RecordError> {
        let header = header_of(record)?;
        let nonce = self.nonce();
        let (head, body) = record.split_at_mut(HEADER);
        head.copy_from_slice(&header);
        let (plaintext, tail) = body.split_at_mut(body.len() - 1 - TAG);
        let key = &self.key;
        key.seal_in_place_scatter(nonce, Aad::from(header), plaintext, &[kind], tail)
            .map_err(|_| RecordError::Keys)
    }

    /// Seals `plaintext` into `record`, which must have the length of the sealed record.
    pub(crate) fn seal_from(
        &mut self,
        plaintext: &[u8],
        kind: u8,
        record: &mut [u8],
    ) -> Result<(), RecordError> {
        let header = header_of(record)?;
        let nonce = self.nonce();
        let (head, body) = record.split_at_mut(HEADER);
        head.copy_from_slice(&header);
        let (sealed, tail) = body.split_at_mut(body.len() - 1 - TAG);
        let key = &self.key;
        key.seal_out_of_place_scatter(nonce, Aad::from(header), plaintext, sealed, &[kind], tail)
            .map_err(|_| RecordError::Keys)
    }

    /// Opens a complete `record` in place. Returns its type and the end of its plaintext, counted after the header.
    pub(crate) fn open(&mut self, record: &mut [u8]) -> Result<(u8, usize), RecordError> {
        let Some((&mut head, body)) = record.split_first_chunk_mut::<HEADER>() else {
            return Err(RecordError::BadLength {
                length: record.len(),
            });
        };
        let nonce = self.nonce();
        let inner = self
            .key
            .open_in_place(nonce, Aad::from(head), body)
            .map_err(|_| RecordError::Damaged)?;
        if inner.len() > MAX_INNER {
            return Err(RecordError::BadLength {
                length: inner.len(),
            });
        }
        // Zeros after the type are padding.
        let last = inner.iter().rposition(|&byte| byte != 0);
        let last = last.ok_or(RecordError::NoType)?;
        Ok((inner[last], last))
    }
}

/// Returns the header for a record that is not sealed yet.
fn header_of(record: &[u8]) -> Result<[u8; HEADER], RecordError> {
    let length = record.len().checked_sub(HEADER);
    let length = length.filter(|length| (1 + TAG..=MAX_INNER + TAG).contains(length));
    let length = length.and_then(|length| u16::try_from(length).ok());
    Ok(header(length.ok_or(RecordError::BadLength {
        length: record.len(),
    })?))
}

/// Returns the length of the sealed record of `plaintext` bytes.
pub(crate) const fn sealed(plaintext: usize) -> usize {
    plaintext + OVERHEAD
}
