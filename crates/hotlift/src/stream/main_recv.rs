//! Reads the bytes of the main channel.

use std::time::{Duration, Instant};

use hotlift_methods::MemoryLimit;
use hotlift_net::transport::Stream;

use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::life::wake_fd::WakeFd;
use crate::life::{LONG, Life};
use crate::stream::counted_buffer::CountedBuffer;
use crate::stream::main_channel::{Action, EndCause, MainChannel, Step};

/// Size of one read from the socket. A source without multifd sends its pages here; with 64 KiB a tenth of the time went into
/// system calls.
const READ: usize = 512 << 10;

/// Read size while a guest may wait for a requested page: all pages read before it are placed first.
const READ_IN_POSTCOPY: usize = 64 << 10;

/// Read size of the set-up, which is read before the stream is known to be supported. A set-up with few RAM blocks has some
/// hundred bytes.
const READ_OF_SET_UP: usize = 256;

/// Condition under which a wait for the source continues.
pub(crate) trait WaitCondition {
    /// Checks whether the wait may continue.
    ///
    /// # Errors
    /// The reason to stop: the migration was cancelled, or has ended elsewhere.
    fn check(&self) -> Result<(), MigrationError>;

    /// Returns the interval of the checks; each change of the lifetime also causes one.
    fn every(&self) -> Duration {
        LONG
    }
}

/// Buffered reader that can return everything read so far.
pub(crate) struct MainInput<'a> {
    channel: &'a Stream,
    counters: &'a Counters,
    wake_fd: WakeFd,
    buffer: CountedBuffer,
    /// Part of `buffer` that was read and not yet taken.
    unread: std::ops::Range<usize>,
    /// Keeps all bytes in `buffer` until the stream is identified.
    keeps: bool,
    /// Size of one read.
    read: usize,
}

/// Bytes that a [`MainInput`] has read and not taken.
pub(crate) struct ReadAhead {
    wake_fd: WakeFd,
    buffer: CountedBuffer,
    unread: std::ops::Range<usize>,
}

impl<'a> MainInput<'a> {
    /// Creates a reader whose buffer, beyond its own size, uses at most `memory`. Changes of `life` end its waits.
    ///
    /// # Errors
    /// [`MigrationError::Connection`] if the system cannot create a descriptor.
    pub(crate) fn new(
        channel: &'a Stream,
        counters: &'a Counters,
        memory: &MemoryLimit,
        life: &Life,
    ) -> Result<Self, MigrationError> {
        Ok(Self {
            channel,
            counters,
            wake_fd: WakeFd::new(life).map_err(broken)?,
            buffer: CountedBuffer::with_own(vec![0; READ], memory),
            unread: 0..0,
            keeps: false,
            read: READ,
        })
    }

    /// Keeps all bytes from the first on, and reads little ahead, until [`MainInput::detach`].
    pub(crate) fn keep_everything(mut self) -> Self {
        self.keeps = true;
        self.read = READ_OF_SET_UP;
        self
    }

    /// Reduces the read size from here on.
    pub(crate) fn read_little(&mut self) {
        self.read = READ_IN_POSTCOPY;
    }

    /// Returns the socket, for answers.
    pub(crate) fn socket(&self) -> &'a Stream {
        self.channel
    }

    /// Returns the bytes that were read and not taken.
    pub(crate) fn unread(&self) -> &[u8] {
        &self.buffer[self.unread.clone()]
    }

    /// Takes `length` unread bytes.
    pub(crate) fn take(&mut self, length: usize) {
        self.unread.start += length;
    }

    /// Returns everything read so far, taken or not. Only valid before [`MainInput::detach`].
    pub(crate) fn everything(&self) -> &[u8] {
        &self.buffer[..self.unread.end]
    }

    /// Returns the read-ahead bytes for another reader. The stream is identified, so that taken bytes need not be kept.
    pub(crate) fn detach(self) -> ReadAhead {
        ReadAhead {
            wake_fd: self.wake_fd,
            buffer: self.buffer,
            unread: self.unread,
        }
    }

    /// Continues where another reader was detached.
    pub(crate) fn attach(ahead: ReadAhead, channel: &'a Stream, counters: &'a Counters) -> Self {
        Self {
            channel,
            counters,
            wake_fd: ahead.wake_fd,
            buffer: ahead.buffer,
            unread: ahead.unread,
            keeps: false,
            read: READ,
        }
    }

    /// Returns true if there are bytes to read.
    pub(crate) fn is_readable(&self) -> Result<bool, MigrationError> {
        self.channel.wait_readable(Duration::ZERO).map_err(broken)
    }

    /// Performs the next step of `machine`: calls `act` with the action and its bytes, or reads missing bytes and returns
    /// `None`.
    ///
    /// # Errors
    /// The error of the machine, of `act` or of [`MainInput::fill`].
    pub(crate) fn step<T>(
        &mut self,
        machine: &mut MainChannel,
        waiting: &dyn WaitCondition,
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

    /// Reads at least some of the `needed` bytes for `machine`, or reports the end of the connection to it.
    ///
    /// # Errors
    /// [`MigrationError::Connection`], the error of `waiting`, and [`MigrationError::Memory`] if there is no room.
    pub(crate) fn fill(
        &mut self,
        machine: &mut MainChannel,
        needed: usize,
        waiting: &dyn WaitCondition,
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
                .wake_fd
                .wait_readable(self.channel, wait)
                .map_err(broken)?
            {
                break;
            }
            waiting.check()?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                machine.ended(EndCause::Silent);
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
            machine.ended(EndCause::Closed);
        }
        Ok(())
    }
}

fn broken(source: std::io::Error) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Main,
        doing: "receiving from the source",
        source,
    }
}
