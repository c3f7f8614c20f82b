//! Bytes of the main channel that is read.

use std::time::{Duration, Instant};

use hotlift_methods::MemoryLimit;
use hotlift_wire::main_channel::MainEvent;
use hotlift_wire::{WireError, limits};

use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::life::bell::Bell;
use crate::life::{LONG, Life};
use crate::stream::counted_buffer::CountedBuffer;
use crate::transport::Stream;

/// Bytes asked of the socket at once. A source without multifd sends its pages here; with 64 KiB a
/// tenth of the time went into system calls.
const READ: usize = 512 << 10;

/// The same where somebody may wait for a page behind those that are read: what was read with it comes before.
const READ_IN_POSTCOPY: usize = 64 << 10;

/// The same of a set-up, which is read before the destination is known to take the stream. A set-up with few RAM blocks has
/// some hundred bytes.
const READ_OF_SET_UP: usize = 256;

/// Whether a wait for the source goes on.
pub(crate) trait Waiting {
    /// # Errors
    /// Why it does not: the migration was cancelled, or has ended elsewhere.
    fn check(&self) -> Result<(), MigrationError>;

    /// How often it is asked, beside at each change of the lifetime.
    fn every(&self) -> Duration {
        LONG
    }
}

/// For how long the source may be silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silence {
    /// At any time.
    Always(Duration),
    /// Within a record. A source writes records whole: one that stays a part has a damaged length, and what is awaited
    /// will never come. Between records silence is usual.
    WithinRecords(Duration),
    /// As long as it likes.
    Unlimited,
}

/// A buffered reader that can give back all it has read so far.
pub(crate) struct MainInput<'a> {
    channel: &'a Stream,
    counters: &'a Counters,
    bell: Bell,
    buffer: CountedBuffer,
    /// The part of `buffer` that was read and not yet taken.
    unread: std::ops::Range<usize>,
    /// Everything from the first byte on is kept in `buffer`, until the stream is understood.
    keeps: bool,
    silence: Silence,
    /// Bytes asked of the socket at once.
    read: usize,
    /// Of every byte taken so far, as long as somebody may ask for it.
    crc: Option<crc32fast::Hasher>,
}

/// What a [`MainInput`] has read ahead of what was taken.
pub(crate) struct ReadAhead {
    bell: Bell,
    buffer: CountedBuffer,
    unread: std::ops::Range<usize>,
    crc: Option<crc32fast::Hasher>,
}

impl<'a> MainInput<'a> {
    /// A reader whose buffer, beyond its own choice, takes no more than `memory` has. Changes of `life` end its waits.
    ///
    /// # Errors
    /// [`MigrationError::Connection`] if the system gives no descriptor.
    pub(crate) fn new(
        channel: &'a Stream,
        counters: &'a Counters,
        silence: Silence,
        memory: &MemoryLimit,
        life: &Life,
    ) -> Result<Self, MigrationError> {
        Ok(Self {
            channel,
            counters,
            bell: Bell::new(life).map_err(broken)?,
            buffer: CountedBuffer::with_own(vec![0; READ], memory),
            unread: 0..0,
            keeps: false,
            silence,
            read: READ,
            crc: Some(crc32fast::Hasher::new()),
        })
    }

    /// Keeps everything from the first byte on, and reads little beyond what is needed, until [`MainInput::detach`].
    pub(crate) fn keep_everything(mut self) -> Self {
        self.keeps = true;
        self.read = READ_OF_SET_UP;
        self
    }

    /// From here on the source may be silent between records, and within them for `limit`.
    pub(crate) fn be_patient(&mut self, limit: Duration) {
        self.silence = Silence::WithinRecords(limit);
    }

    /// From here on little is read at once.
    pub(crate) fn read_little(&mut self) {
        self.read = READ_IN_POSTCOPY;
    }

    /// The socket, for answers.
    pub(crate) fn socket(&self) -> &'a Stream {
        self.channel
    }

    /// Bytes read and not taken.
    pub(crate) fn unread(&self) -> &[u8] {
        &self.buffer[self.unread.clone()]
    }

    /// Takes `length` of the unread bytes.
    pub(crate) fn take(&mut self, length: usize) {
        let taken = self.unread.start..self.unread.start + length;
        if let Some(crc) = &mut self.crc {
            crc.update(&self.buffer[taken]);
        }
        self.unread.start += length;
    }

    /// Compares the CRC-32 of everything taken with the source's, where it is summed up.
    ///
    /// # Errors
    /// [`WireError::Checksum`], with both.
    pub(crate) fn check_crc(&self, expected: u32) -> Result<(), WireError> {
        match self.crc() {
            Some(taken) => check_crc(taken, expected),
            None => Ok(()),
        }
    }

    /// The CRC-32 of everything taken, to go on with; `None` where it is not summed up.
    pub(crate) fn crc(&self) -> Option<crc32fast::Hasher> {
        self.crc.clone()
    }

    /// Everything read so far, taken or not; only before [`MainInput::detach`].
    pub(crate) fn everything(&self) -> &[u8] {
        &self.buffer[..self.unread.end]
    }

    /// What was read ahead, to go on elsewhere. The stream is understood: what was taken need not be
    /// kept, nor, from a source that sends no checksum, summed up.
    pub(crate) fn detach(self, checksummed: bool) -> ReadAhead {
        ReadAhead {
            bell: self.bell,
            buffer: self.buffer,
            unread: self.unread,
            crc: self.crc.filter(|_| checksummed),
        }
    }

    /// Goes on where another reader was detached.
    pub(crate) fn attach(ahead: ReadAhead, channel: &'a Stream, counters: &'a Counters) -> Self {
        Self {
            channel,
            counters,
            bell: ahead.bell,
            buffer: ahead.buffer,
            unread: ahead.unread,
            keeps: false,
            silence: Silence::Unlimited,
            read: READ,
            crc: ahead.crc,
        }
    }

    /// Whether there is something to read.
    pub(crate) fn is_readable(&self) -> Result<bool, MigrationError> {
        self.channel.wait_readable(Duration::ZERO).map_err(broken)
    }

    /// Reads at least `needed` more bytes; false if the source closed the stream before.
    pub(crate) fn fill(
        &mut self,
        needed: usize,
        waiting: &dyn Waiting,
    ) -> Result<bool, MigrationError> {
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
            if !self.fill_some(more, None, waiting)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads what there is, with room for at least `room` bytes; false if the source has closed, or
    /// said nothing for `patience`.
    pub(crate) fn fill_some(
        &mut self,
        room: usize,
        patience: Option<Duration>,
        waiting: &dyn Waiting,
    ) -> Result<bool, MigrationError> {
        if !self.keeps && self.unread.start > 0 {
            self.buffer.as_mut().copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        if self.buffer.len() < self.unread.end + room {
            let length = self.unread.end + room.max(READ);
            let grown = self.buffer.grow_to(length);
            grown.map_err(|source| MigrationError::memory(Channel::Main, source))?;
        }
        let since = Instant::now();
        let limit = [patience, self.silence_limit()].into_iter().flatten().min();
        loop {
            let left = limit.map_or(LONG, |limit| limit.saturating_sub(since.elapsed()));
            let wait = left.min(waiting.every());
            if self
                .bell
                .wait_readable(self.channel, wait)
                .map_err(broken)?
            {
                break;
            }
            waiting.check()?;
            if patience.is_some_and(|patience| since.elapsed() >= patience) {
                return Ok(false);
            }
            self.check_silence(since.elapsed(), room)?;
        }
        waiting.check()?;
        let most = self.unread.end + room.max(self.read);
        let end = most.min(self.buffer.len());
        let into = &mut self.buffer.as_mut()[self.unread.end..end];
        let read = self.channel.read_some(into).map_err(broken)?;
        self.counters.add_bytes(read);
        self.unread.end += read;
        Ok(read > 0)
    }
}

impl MainInput<'_> {
    /// For how long the source may be silent now.
    fn silence_limit(&self) -> Option<Duration> {
        match self.silence {
            Silence::Always(limit) => Some(limit),
            Silence::WithinRecords(limit) => (!self.unread.is_empty()).then_some(limit),
            Silence::Unlimited => None,
        }
    }

    /// Whether the source may be silent for so long, while `needed` bytes are awaited.
    fn check_silence(&self, silent: Duration, needed: usize) -> Result<(), MigrationError> {
        let Some(limit) = self.silence_limit().filter(|limit| silent >= *limit) else {
            return Ok(());
        };
        let waiting_for = match self.silence {
            Silence::WithinRecords(_) => {
                let come = self.unread.len();
                let wanted = come + needed;
                format!("a record of the main channel ({come} of {wanted} bytes have come)")
            }
            Silence::Always(_) | Silence::Unlimited => "the source's set-up on main".to_owned(),
        };
        Err(MigrationError::Timeout {
            waiting_for: format!("the rest of {waiting_for}"),
            waited: limit,
        })
    }
}

/// Compares the CRC-32 of everything that `taken` has with the source's.
///
/// # Errors
/// [`WireError::Checksum`], with both.
pub(crate) fn check_crc(taken: crc32fast::Hasher, expected: u32) -> Result<(), WireError> {
    match taken.finalize() {
        got if got == expected => Ok(()),
        got => Err(WireError::Checksum {
            what: "the main channel",
            expected,
            got,
        }),
    }
}

/// An event's name, without what is in it.
pub(crate) fn event_name(event: &MainEvent<'_>) -> String {
    let text = format!("{event:?}");
    let end = text.find([' ', '(', '{']).unwrap_or(text.len());
    text[..end].to_owned()
}

fn broken(source: std::io::Error) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Main,
        doing: "listening to the source",
        source,
    }
}
