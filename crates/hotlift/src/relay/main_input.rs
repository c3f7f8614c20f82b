//! Bytes of the incoming main channel.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hotlift_methods::MemoryLimit;
use hotlift_wire::{WireError, limits};

use super::memory::Held;
use super::session::Call;
use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::transport::{Stream, wait_readable};

/// How often a wait for the source looks whether it was called off.
const TICK: Duration = Duration::from_millis(100);

/// Bytes asked of the socket at once. A source without multifd sends its pages here; with 64 KiB a
/// tenth of the time went into system calls.
const READ: usize = 512 << 10;

/// A buffered reader that can give back all it has read so far.
pub(super) struct MainInput<'a> {
    stream: &'a Stream,
    counters: &'a Counters,
    buffer: Held,
    /// The part of `buffer` that was read and not yet taken.
    unread: std::ops::Range<usize>,
    /// Until the stream is understood everything from its first byte on is kept in `buffer`, and the
    /// source may be silent for no longer than this. (Later it may rest for as long as it likes.)
    set_up: Option<Duration>,
    /// Of every byte taken so far, as long as somebody may ask for it.
    crc: Option<crc32fast::Hasher>,
}

/// What a [`MainInput`] has read ahead of what was taken.
pub(super) struct ReadAhead {
    buffer: Held,
    unread: std::ops::Range<usize>,
    crc: Option<crc32fast::Hasher>,
}

impl<'a> MainInput<'a> {
    pub(super) fn new(
        stream: &'a Stream,
        counters: &'a Counters,
        silence: Duration,
        memory: &MemoryLimit,
    ) -> Self {
        Self {
            stream,
            counters,
            buffer: Held::with_own(vec![0; READ], memory),
            unread: 0..0,
            set_up: Some(silence),
            crc: Some(crc32fast::Hasher::new()),
        }
    }

    /// The socket, for answers.
    pub(super) fn stream(&self) -> &'a Stream {
        self.stream
    }

    /// Bytes read and not taken.
    pub(super) fn unread(&self) -> &[u8] {
        &self.buffer[self.unread.clone()]
    }

    /// Takes `length` of the unread bytes.
    pub(super) fn take(&mut self, length: usize) {
        let taken = self.unread.start..self.unread.start + length;
        if let Some(crc) = &mut self.crc {
            crc.update(&self.buffer[taken]);
        }
        self.unread.start += length;
    }

    /// CRC-32 of everything taken; `None` where nobody asks.
    pub(super) fn crc(&self) -> Option<u32> {
        self.crc.clone().map(crc32fast::Hasher::finalize)
    }

    /// Everything read so far, taken or not; only before [`MainInput::detach`].
    pub(super) fn everything(&self) -> &[u8] {
        &self.buffer[..self.unread.end]
    }

    /// What was read ahead, to go on elsewhere. The stream is understood: what was taken need not be
    /// kept, nor, from a source that sends no checksum, summed up.
    pub(super) fn detach(self, checksummed: bool) -> ReadAhead {
        ReadAhead {
            buffer: self.buffer,
            unread: self.unread,
            crc: self.crc.filter(|_| checksummed),
        }
    }

    /// Goes on where another reader was detached.
    pub(super) fn attach(ahead: ReadAhead, stream: &'a Stream, counters: &'a Counters) -> Self {
        Self {
            stream,
            counters,
            buffer: ahead.buffer,
            unread: ahead.unread,
            set_up: None,
            crc: ahead.crc,
        }
    }

    /// Reads at least `needed` more bytes; false if the source closed the stream before.
    pub(super) fn fill(&mut self, needed: usize, call: &Call<'_>) -> Result<bool, MigrationError> {
        let wanted = self.unread.len() + needed;
        if wanted > limits::MAIN_RECORD {
            return Err(MigrationError::Wire {
                channel: Channel::Main,
                source: WireError::OverLimit {
                    what: "record of the main channel",
                    limit: limits::MAIN_RECORD as u64,
                    got: wanted as u64,
                },
            });
        }
        while self.unread.len() < wanted {
            let more = wanted - self.unread.len();
            if !self.fill_some(more, None, call)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads what there is, with room for at least `room` bytes; false if the source has closed, or
    /// said nothing for `patience`.
    pub(super) fn fill_some(
        &mut self,
        room: usize,
        patience: Option<Duration>,
        call: &Call<'_>,
    ) -> Result<bool, MigrationError> {
        if self.set_up.is_none() {
            self.buffer.as_mut().copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        if self.buffer.len() < self.unread.end + room {
            let length = self.unread.end + room.max(READ);
            let grown = self.buffer.grow_to(length);
            grown.map_err(|source| MigrationError::memory(Channel::Main, source))?;
        }
        let since = Instant::now();
        while !wait_readable(self.stream.as_fd(), TICK).map_err(broken)? {
            call.check()?;
            if patience.is_some_and(|patience| since.elapsed() >= patience) {
                return Ok(false);
            }
            if let Some(silence) = self.set_up
                && since.elapsed() >= silence
            {
                return Err(MigrationError::Timeout {
                    waiting_for: "the rest of the source's set-up on main".to_owned(),
                    waited: silence,
                });
            }
        }
        call.check()?;
        let read = self
            .stream
            .read_some(&mut self.buffer.as_mut()[self.unread.end..])
            .map_err(broken)?;
        self.counters.add_bytes(read);
        self.unread.end += read;
        Ok(read > 0)
    }
}

fn broken(source: std::io::Error) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Main,
        doing: "listening to the source",
        source,
    }
}
