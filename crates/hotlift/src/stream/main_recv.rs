//! Bytes of the main channel that is read.

use std::time::{Duration, Instant};

use hotlift_methods::MemoryLimit;
use hotlift_net::transport::Stream;

use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::life::bell::Bell;
use crate::life::{LONG, Life};
use crate::stream::counted_buffer::CountedBuffer;
use crate::stream::main_channel::{Action, Ended, MainChannel, Step};

/// Bytes asked of the socket at once. A source without multifd sends its pages here; with 64 KiB a
/// tenth of the time went into system calls.
const READ: usize = 512 << 10;

/// The same where a guest may wait for a page behind those that are read: what was read with it comes before.
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
    /// Bytes asked of the socket at once.
    read: usize,
}

/// What a [`MainInput`] has read ahead of what was taken.
pub(crate) struct ReadAhead {
    bell: Bell,
    buffer: CountedBuffer,
    unread: std::ops::Range<usize>,
}

impl<'a> MainInput<'a> {
    /// A reader whose buffer, beyond its own choice, takes no more than `memory` has. Changes of `life` end its waits.
    ///
    /// # Errors
    /// [`MigrationError::Connection`] if the system gives no descriptor.
    pub(crate) fn new(
        channel: &'a Stream,
        counters: &'a Counters,
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
            read: READ,
        })
    }

    /// Keeps everything from the first byte on, and reads little beyond what is needed, until [`MainInput::detach`].
    pub(crate) fn keep_everything(mut self) -> Self {
        self.keeps = true;
        self.read = READ_OF_SET_UP;
        self
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
        self.unread.start += length;
    }

    /// Everything read so far, taken or not; only before [`MainInput::detach`].
    pub(crate) fn everything(&self) -> &[u8] {
        &self.buffer[..self.unread.end]
    }

    /// What was read ahead, to go on elsewhere. The stream is understood: what was taken need not be kept.
    pub(crate) fn detach(self) -> ReadAhead {
        ReadAhead {
            bell: self.bell,
            buffer: self.buffer,
            unread: self.unread,
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
            read: READ,
        }
    }

    /// Whether there is something to read.
    pub(crate) fn is_readable(&self) -> Result<bool, MigrationError> {
        self.channel.wait_readable(Duration::ZERO).map_err(broken)
    }

    /// Does the next step of `machine`: has `act` do what there is to do, with the bytes that it took, or reads what is
    /// missing and returns `None`.
    ///
    /// # Errors
    /// That of the machine, of `act` or of [`MainInput::fill`].
    pub(crate) fn step<T>(
        &mut self,
        machine: &mut MainChannel,
        waiting: &dyn Waiting,
        act: impl FnOnce(Action<'_>, &[u8]) -> Result<T, MigrationError>,
    ) -> Result<Option<T>, MigrationError> {
        match machine.next(self.unread())? {
            Step::Need(needed) => self.fill(machine, needed, waiting).map(|()| None),
            Step::Do(action, consumed) => {
                let done = act(action, &self.unread()[..consumed])?;
                self.take(consumed);
                Ok(Some(done))
            }
        }
    }

    /// Reads some of the `needed` bytes that `machine` awaits, and perhaps more, or informs it that none come.
    ///
    /// # Errors
    /// [`MigrationError::Connection`], that of `waiting`, and [`MigrationError::Memory`] if there is no room.
    pub(crate) fn fill(
        &mut self,
        machine: &mut MainChannel,
        needed: usize,
        waiting: &dyn Waiting,
    ) -> Result<(), MigrationError> {
        if !self.keeps && self.unread.start > 0 {
            self.buffer.as_mut().copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        if self.buffer.len() < self.unread.end + needed {
            let length = self.unread.end + needed.max(READ);
            let grown = self.buffer.grow_to(length);
            grown.map_err(|source| MigrationError::memory(Channel::Main, source))?;
        }
        let deadline = machine.deadline(Instant::now(), self.unread.len());
        loop {
            let left = deadline.map_or(LONG, |it| it.saturating_duration_since(Instant::now()));
            let wait = left.min(waiting.every());
            if self
                .bell
                .wait_readable(self.channel, wait)
                .map_err(broken)?
            {
                break;
            }
            waiting.check()?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                machine.ended(Ended::Silent);
                return Ok(());
            }
        }
        waiting.check()?;
        let most = self.unread.end + needed.max(self.read);
        let end = most.min(self.buffer.len());
        let into = &mut self.buffer.as_mut()[self.unread.end..end];
        let read = self.channel.read_some(into).map_err(broken)?;
        self.counters.add_bytes(read);
        self.unread.end += read;
        if read == 0 {
            machine.ended(Ended::Closed);
        }
        Ok(())
    }
}

fn broken(source: std::io::Error) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Main,
        doing: "listening to the source",
        source,
    }
}
