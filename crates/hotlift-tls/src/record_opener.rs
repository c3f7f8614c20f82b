//! Opens records into plaintext.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;

use crate::cipher::Cipher;
use crate::error::{Alert, RecordError};
use crate::link::{Link, SMALL_BUFFER};
use crate::record::{
    ALERT, APPLICATION_DATA, HANDSHAKE, HEADER, KEY_UPDATE, MAX_MESSAGE, MESSAGE_HEADER,
    NEW_SESSION_TICKET, body_length,
};

/// Initial buffer size, for a direction with little data.
const FIRST_BUFFER: usize = 2 << 10;

/// Limit of consecutive records without data, such as tickets, KeyUpdates and empty records. OpenSSL sends two tickets.
const MAX_IDLE: u32 = 32;

/// Receiving direction of a connection. Only one thread at a time may use it.
///
/// One read of the socket takes up to three records of a Hotlift, once the buffer has grown. Records are decrypted in place,
/// and the caller gets only verified plaintext.
#[derive(Debug)]
pub struct RecordOpener {
    cipher: Cipher,
    link: Arc<Link>,
    buffer: Vec<u8>,
    /// Size limit of the buffer; `None` until the buffer must exceed [`SMALL_BUFFER`].
    limit: Option<usize>,
    /// Unconsumed plaintext in `buffer`, before `sealed`.
    plaintext: Range<usize>,
    /// Range of `buffer` that is read but not opened yet.
    sealed: Range<usize>,
    message: Message,
    /// Records without data since the last one with data.
    idle: u32,
    /// True on the client, which may receive tickets.
    is_client: bool,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// The peer has sent `close_notify`.
    Closed,
    /// The connection has ended without `close_notify`.
    Cut,
    Failed,
}

/// A handshake message, possibly spread over records.
#[derive(Debug, Default)]
struct Message {
    header: [u8; MESSAGE_HEADER],
    /// Bytes of the header received so far.
    known: usize,
    /// Bytes of the body still missing.
    left: usize,
}

/// Content of an opened record.
enum Content {
    /// Data in this range of the buffer.
    Data(Range<usize>),
    /// Messages of the TLS layer, without data.
    Ours,
    Closed,
}

impl RecordOpener {
    pub(crate) fn new(cipher: Cipher, link: Arc<Link>, is_client: bool) -> Self {
        Self {
            cipher,
            link,
            buffer: Vec::new(),
            limit: None,
            plaintext: 0..0,
            sealed: 0..0,
            message: Message::default(),
            idle: 0,
            is_client,
            state: State::Open,
        }
    }

    /// Returns plaintext that was not [consumed](Self::consume) yet. If there is none, reads more from `from`. Returns an empty
    /// slice only after `close_notify`.
    ///
    /// # Errors
    /// See [`RecordError`]; [`RecordError::Truncated`] if `from` ends without `close_notify`. After [`RecordError::Io`], such
    /// as a timeout, reading can continue. After any other error it cannot.
    pub fn plaintext(&mut self, from: &mut impl Read) -> Result<&[u8], RecordError> {
        while self.plaintext.is_empty() && self.state != State::Closed {
            let step = match self.state {
                State::Cut => Err(RecordError::Truncated),
                State::Failed => Err(RecordError::Failed),
                _ => self.next_record(from),
            };
            match step {
                Ok(Content::Data(place)) if place.is_empty() => self.count_idle()?,
                Ok(Content::Data(place)) => {
                    self.idle = 0;
                    self.plaintext = place;
                }
                Ok(Content::Ours) => self.count_idle()?,
                Ok(Content::Closed) => self.state = State::Closed,
                Err(error @ RecordError::Io(_)) => return Err(error),
                Err(error) => return Err(self.fail(error)),
            }
        }
        Ok(&self.buffer[self.plaintext.clone()])
    }

    /// Removes the first `n` bytes of [`Self::plaintext`].
    ///
    /// # Panics
    /// If fewer than `n` bytes of plaintext are left.
    pub fn consume(&mut self, n: usize) {
        assert!(n <= self.plaintext.len(), "plaintext that was not given");
        self.plaintext.start += n;
    }

    /// Copies some plaintext to `to` and returns the number of bytes; 0 after `close_notify`, or if `to` is empty.
    ///
    /// # Errors
    /// As for [`Self::plaintext`].
    pub fn read(&mut self, from: &mut impl Read, to: &mut [u8]) -> Result<usize, RecordError> {
        if to.is_empty() {
            return Ok(0);
        }
        let here = self.plaintext(from)?;
        let n = here.len().min(to.len());
        to[..n].copy_from_slice(&here[..n]);
        self.consume(n);
        Ok(n)
    }

    /// Reads until `to` is full.
    ///
    /// # Errors
    /// As for [`Self::plaintext`]; `UnexpectedEof` in [`RecordError::Io`] if `close_notify` comes before `to` is full.
    pub fn read_exact(&mut self, from: &mut impl Read, to: &mut [u8]) -> Result<(), RecordError> {
        let mut filled = 0;
        while filled < to.len() {
            match self.read(from, &mut to[filled..])? {
                0 => return Err(RecordError::Io(io::ErrorKind::UnexpectedEof.into())),
                n => filled += n,
            }
        }
        Ok(())
    }

    /// Returns true if [`Self::plaintext`] can return without reading: the caller must not wait for the socket first.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let sealed = &self.buffer[self.sealed.clone()];
        let is_whole = |header: &[u8; HEADER]| match body_length(*header) {
            Ok(length) => sealed.len() >= HEADER + length,
            Err(_) => true,
        };
        !self.plaintext.is_empty()
            || self.state != State::Open
            || sealed.first_chunk().is_some_and(is_whole)
    }

    /// Returns true after `close_notify`, once all plaintext before it is consumed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed && self.plaintext.is_empty()
    }

    /// Returns the size of the buffer, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.buffer.capacity()
    }

    /// Waits for the first record with application data, by which the server confirms that it accepts this side. Its plaintext
    /// is kept for the caller.
    pub(crate) fn wait_for_first(&mut self, from: &mut impl Read) -> Result<(), RecordError> {
        loop {
            match self.next_record(from) {
                Ok(Content::Data(place)) => {
                    self.plaintext = place;
                    return Ok(());
                }
                Ok(Content::Ours) => self.count_idle()?,
                Ok(Content::Closed) => return Err(self.fail(RecordError::Truncated)),
                Err(error) => return Err(self.fail(error)),
            }
        }
    }

    fn fail(&mut self, error: RecordError) -> RecordError {
        self.state = match error {
            RecordError::Truncated => State::Cut,
            _ => State::Failed,
        };
        self.plaintext = 0..0;
        error
    }

    fn count_idle(&mut self) -> Result<(), RecordError> {
        self.idle += 1;
        if self.idle > MAX_IDLE {
            return Err(self.fail(RecordError::Idle { limit: MAX_IDLE }));
        }
        Ok(())
    }

    /// Opens the next record; reads until it is complete.
    fn next_record(&mut self, from: &mut impl Read) -> Result<Content, RecordError> {
        let length = loop {
            let wanted = match self.buffer[self.sealed.clone()].first_chunk::<HEADER>() {
                Some(header) => HEADER + body_length(*header)?,
                None => HEADER,
            };
            if wanted > HEADER && self.sealed.len() >= wanted {
                break wanted;
            }
            self.read_more(from, wanted)?;
        };
        let start = self.sealed.start;
        self.sealed.start += length;
        let (kind, end) = self.cipher.open(&mut self.buffer[start..start + length])?;
        let content = start + HEADER..start + HEADER + end;
        if self.message.is_begun() && kind != HANDSHAKE {
            return Err(RecordError::Unexpected {
                what: "record",
                kind,
            });
        }
        match kind {
            APPLICATION_DATA => Ok(Content::Data(content)),
            HANDSHAKE if !content.is_empty() => self.messages(content).map(|()| Content::Ours),
            ALERT => self.alert(content),
            kind => Err(RecordError::Unexpected {
                what: "record",
                kind,
            }),
        }
    }

    /// Reads some bytes, after making room for a record of `wanted` bytes.
    fn read_more(&mut self, from: &mut impl Read, wanted: usize) -> Result<(), RecordError> {
        if self.sealed.is_empty() {
            self.sealed = 0..0;
        }
        if self.sealed.start + wanted > self.buffer.len() {
            self.buffer.copy_within(self.sealed.clone(), 0);
            self.sealed = 0..self.sealed.len();
            self.grow(wanted.max(FIRST_BUFFER));
        }
        let n = loop {
            match from.read(&mut self.buffer[self.sealed.end..]) {
                Ok(n) => break n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(RecordError::Io(error)),
            }
        };
        if n == 0 {
            return Err(RecordError::Truncated);
        }
        self.sealed.end += n;
        if self.sealed.end == self.buffer.len() {
            // The buffer is full, so more data may be available.
            if self.buffer.len() < SMALL_BUFFER {
                self.grow(SMALL_BUFFER);
            } else {
                let limit = *self.limit.get_or_insert_with(|| self.link.claim_bulk());
                self.grow(limit);
            }
        }
        Ok(())
    }

    fn grow(&mut self, length: usize) {
        if length > self.buffer.len() {
            self.buffer.reserve_exact(length - self.buffer.len());
            self.buffer.resize(length, 0);
        }
    }

    /// Processes handshake messages, or parts of them. Ignores the content of tickets.
    fn messages(&mut self, place: Range<usize>) -> Result<(), RecordError> {
        let mut bytes = &self.buffer[place];
        let mut new_keys = None;
        while let Some((&first, rest)) = bytes.split_first() {
            if new_keys.is_some() {
                // A message after a KeyUpdate must be in another record, under the new key.
                return Err(RecordError::Unexpected {
                    what: "message",
                    kind: first,
                });
            }
            let message = &mut self.message;
            if message.known < MESSAGE_HEADER {
                message.header[message.known] = first;
                message.known += 1;
                bytes = rest;
                if message.known < MESSAGE_HEADER {
                    continue;
                }
                message.left = message.check(self.is_client)?;
            } else if message.kind() == KEY_UPDATE {
                new_keys = Some(first);
                message.left = 0;
                bytes = rest;
            } else {
                let n = message.left.min(bytes.len());
                message.left -= n;
                bytes = &bytes[n..];
            }
            if message.left == 0 {
                *message = Message::default();
            }
        }
        match new_keys {
            None => Ok(()),
            Some(request @ (0 | 1)) => {
                self.cipher = self.link.next_to_receive()?;
                if request == 1 {
                    self.link.want_update();
                }
                Ok(())
            }
            Some(_) => Err(RecordError::BadMessage {
                kind: KEY_UPDATE,
                length: 1,
            }),
        }
    }

    fn alert(&self, place: Range<usize>) -> Result<Content, RecordError> {
        let &[_, number] = &self.buffer[place.clone()] else {
            return Err(RecordError::BadMessage {
                kind: ALERT,
                length: place.len(),
            });
        };
        match number {
            0 => Ok(Content::Closed),
            // user_canceled: close_notify follows.
            90 => Ok(Content::Ours),
            number => Err(RecordError::Alert {
                alert: Alert::new(number),
            }),
        }
    }
}

impl Message {
    fn is_begun(&self) -> bool {
        self.known > 0
    }

    fn kind(&self) -> u8 {
        self.header[0]
    }

    /// Returns the length of the body if such a message is allowed.
    fn check(&self, is_client: bool) -> Result<usize, RecordError> {
        let [kind, high, middle, low] = self.header;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        match kind {
            KEY_UPDATE if length == 1 => Ok(length),
            NEW_SESSION_TICKET if is_client && length <= MAX_MESSAGE => Ok(length),
            KEY_UPDATE => Err(RecordError::BadMessage { kind, length }),
            NEW_SESSION_TICKET if is_client => Err(RecordError::BadMessage { kind, length }),
            kind => Err(RecordError::Unexpected {
                what: "message",
                kind,
            }),
        }
    }
}
