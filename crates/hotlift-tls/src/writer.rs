//! Plaintext into records.

use std::io::{IoSlice, Write};
use std::sync::Arc;

use crate::cipher::{Cipher, sealed};
use crate::error::{Alert, RecordError};
use crate::link::{Link, SMALL_BUFFER};
use crate::record::{
    ALERT, APPLICATION_DATA, HANDSHAKE, HEADER, KEY_UPDATE_MESSAGE, RECORD_PLAINTEXT,
};

/// What is to be sent, from front to back. Each byte is taken once, and sealed where it was copied to, so that it may lie in
/// memory that others write to meanwhile: a guest's.
pub trait Plaintext {
    /// Bytes not yet taken.
    fn remaining(&self) -> usize;

    /// Copies the next bytes into `to`, as many as it has; never more than [`Self::remaining`].
    fn take(&mut self, to: &mut [u8]);

    /// Takes the next `length` bytes where they lie, if they lie in one piece to which nobody writes. What comes from memory is
    /// sealed in 0.87 of the time of copy and seal.
    fn take_in_place(&mut self, length: usize) -> Option<&[u8]> {
        let _ = length;
        None
    }
}

/// Slices, one after the other.
#[derive(Debug)]
pub struct Parts<'a, T> {
    parts: &'a [T],
    /// Bytes of the first part that are taken.
    taken: usize,
    remaining: usize,
}

impl<'a, T: AsRef<[u8]>> Parts<'a, T> {
    /// All bytes of `parts`.
    pub fn new(parts: &'a [T]) -> Self {
        Self {
            parts,
            taken: 0,
            remaining: parts.iter().map(|part| part.as_ref().len()).sum(),
        }
    }
}

impl<T: AsRef<[u8]>> Plaintext for Parts<'_, T> {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn take(&mut self, to: &mut [u8]) {
        let mut at = 0;
        while at < to.len() {
            let Some((first, rest)) = self.parts.split_first() else {
                return;
            };
            let left = &first.as_ref()[self.taken..];
            let n = left.len().min(to.len() - at);
            to[at..at + n].copy_from_slice(&left[..n]);
            at += n;
            self.taken += n;
            self.remaining -= n;
            if n == left.len() {
                self.parts = rest;
                self.taken = 0;
            }
        }
    }

    fn take_in_place(&mut self, length: usize) -> Option<&[u8]> {
        let first = self.parts.first()?.as_ref();
        let piece = first.get(self.taken..self.taken + length)?;
        self.taken += length;
        self.remaining -= length;
        Some(piece)
    }
}

/// The slices of a vectored write.
impl Plaintext for &mut [IoSlice<'_>] {
    fn remaining(&self) -> usize {
        self.iter().map(|slice| slice.len()).sum()
    }

    fn take(&mut self, to: &mut [u8]) {
        let mut at = 0;
        while at < to.len() && !self.is_empty() {
            let n = self[0].len().min(to.len() - at);
            to[at..at + n].copy_from_slice(&self[0][..n]);
            at += n;
            IoSlice::advance_slices(self, n);
        }
    }
}

/// The direction from this side to the other. Belongs to one thread at a time.
///
/// Its buffer holds records on their way into the socket, three at most. A caller that has a buffer of its own to send from
/// takes [`Self::seal`] and adds what it gives to that buffer; the memory is the same either way. Bytes are copied once at
/// most: to where they are encrypted.
#[derive(Debug)]
pub struct RecordWriter {
    cipher: Cipher,
    link: Arc<Link>,
    /// Records are sealed here; empty until there is one.
    buffer: Vec<u8>,
    /// The most that it may have; none before there was a reason to ask.
    limit: Option<usize>,
    records_per_key: u64,
    has_ended: bool,
}

impl RecordWriter {
    pub(crate) fn new(cipher: Cipher, link: Arc<Link>, records_per_key: u64) -> Self {
        Self {
            cipher,
            link,
            buffer: Vec::new(),
            limit: None,
            records_per_key,
            has_ended: false,
        }
    }

    /// Sends all of `from`, a system call for as many records as the buffer holds.
    ///
    /// # Errors
    /// The system's; and [`RecordError::Ended`] after [`Self::close`]. After an error nothing can be sent any more: how
    /// much the other side has got is not known.
    pub fn send(
        &mut self,
        to: &mut impl Write,
        from: &mut impl Plaintext,
    ) -> Result<(), RecordError> {
        while from.remaining() > 0 {
            let records = self.seal(from)?;
            if let Err(error) = to.write_all(records) {
                self.has_ended = true;
                return Err(RecordError::Io(error));
            }
        }
        Ok(())
    }

    /// Seals what of `from` the buffer holds, and gives the records, which the caller must send before it calls again. To be
    /// called until nothing remains of `from`. Nothing in, nothing out.
    ///
    /// # Errors
    /// [`RecordError::Ended`] after [`Self::close`].
    pub fn seal(&mut self, from: &mut impl Plaintext) -> Result<&[u8], RecordError> {
        if self.has_ended {
            return Err(RecordError::Ended);
        }
        let wanted = sealed(0) + KEY_UPDATE_MESSAGE.len() + whole(from.remaining());
        if wanted <= SMALL_BUFFER {
            self.grow(wanted);
        } else {
            let limit = *self.limit.get_or_insert_with(|| self.link.claim_bulk());
            self.grow(wanted.min(limit));
        }
        let mut filled = 0;
        while from.remaining() > 0 {
            filled = self.update_key_if_due(filled)?;
            let room = (self.buffer.len() - filled).saturating_sub(sealed(0));
            let length = from.remaining().min(RECORD_PLAINTEXT);
            // What is left of a buffer is not filled with a small record while there is more to say.
            if room < length && (filled > 0 || room == 0) {
                break;
            }
            let length = length.min(room);
            let record = &mut self.buffer[filled..filled + sealed(length)];
            match from.take_in_place(length) {
                Some(plaintext) => self.cipher.seal_from(plaintext, APPLICATION_DATA, record)?,
                None => {
                    from.take(&mut record[HEADER..HEADER + length]);
                    self.cipher.seal(APPLICATION_DATA, record)?;
                }
            }
            filled += record.len();
        }
        Ok(&self.buffer[..filled])
    }

    /// Seals a record without content: it tells the other side that the handshake is done.
    pub(crate) fn send_nothing(&mut self, to: &mut impl Write) -> Result<(), RecordError> {
        self.send_record(to, APPLICATION_DATA, &[])
    }

    /// Says that nothing follows (`close_notify`). The other direction goes on.
    ///
    /// # Errors
    /// The system's; [`RecordError::Ended`] if it was said before.
    pub fn close(&mut self, to: &mut impl Write) -> Result<(), RecordError> {
        self.alert(to, Alert::new(0))
    }

    /// Tells the other side why this one gives up. Nothing can be sent after it.
    ///
    /// # Errors
    /// The system's; [`RecordError::Ended`] if there was an end before.
    pub fn alert(&mut self, to: &mut impl Write, alert: Alert) -> Result<(), RecordError> {
        // Levels have no meaning any more; OpenSSL wants 1 (warning) for these two, and 2 (fatal) for all others.
        let level = if matches!(alert.number(), 0 | 90) {
            1
        } else {
            2
        };
        let sent = self.send_record(to, ALERT, &[level, alert.number()]);
        self.has_ended = true;
        sent
    }

    /// Bytes of memory of the buffer.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.buffer.capacity()
    }

    /// Sends one record of this type; `content` fits it.
    pub(crate) fn send_record(
        &mut self,
        to: &mut impl Write,
        kind: u8,
        content: &[u8],
    ) -> Result<(), RecordError> {
        if self.has_ended {
            return Err(RecordError::Ended);
        }
        self.grow(2 * sealed(KEY_UPDATE_MESSAGE.len().max(content.len())));
        let at = self.update_key_if_due(0)?;
        let end = self.put(at, kind, content)?;
        if let Err(error) = to.write_all(&self.buffer[..end]) {
            self.has_ended = true;
            return Err(RecordError::Io(error));
        }
        Ok(())
    }

    /// Seals `content` at `at` in the buffer, which has the room, and returns where the record ends.
    fn put(&mut self, at: usize, kind: u8, content: &[u8]) -> Result<usize, RecordError> {
        let record = &mut self.buffer[at..at + sealed(content.len())];
        record[HEADER..HEADER + content.len()].copy_from_slice(content);
        self.cipher.seal(kind, record)?;
        Ok(at + sealed(content.len()))
    }

    /// Puts a KeyUpdate at `at` of the buffer if the key has sealed as many records as it may, or the other side has asked for
    /// one; waits with the latter for a buffer with room. Returns where the next record goes.
    fn update_key_if_due(&mut self, at: usize) -> Result<usize, RecordError> {
        let is_last = self.cipher.records() + 1 >= self.records_per_key;
        let has_room = self.buffer.len() - at >= sealed(KEY_UPDATE_MESSAGE.len());
        if !has_room || !(self.link.take_wanted_update() || is_last) {
            return Ok(at);
        }
        let end = self.put(at, HANDSHAKE, &KEY_UPDATE_MESSAGE)?;
        self.next_key()?;
        Ok(end)
    }

    /// Goes on with the next key; the other side has been told.
    pub(crate) fn next_key(&mut self) -> Result<(), RecordError> {
        self.cipher = self.link.next_to_send()?;
        Ok(())
    }

    fn grow(&mut self, length: usize) {
        if length > self.buffer.len() {
            self.buffer.reserve_exact(length - self.buffer.len());
            self.buffer.resize(length, 0);
        }
    }
}

/// Bytes of the records of `plaintext` bytes.
fn whole(plaintext: usize) -> usize {
    let full = plaintext / RECORD_PLAINTEXT;
    let rest = plaintext % RECORD_PLAINTEXT;
    full * sealed(RECORD_PLAINTEXT) + if rest > 0 { sealed(rest) } else { 0 }
}
