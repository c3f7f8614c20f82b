//! Reads the bytes of an incoming main channel.

use std::time::{Duration, Instant};

use hotlift_methods::MemoryLimit;
use hotlift_net::transport::Stream;

use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::life::wake_fd::WakeFd;
use crate::life::{LONG, Life};
use crate::stream::counted_buffer::CountedBuffer;
use crate::stream::main_channel::{Action, EndCause, MainChannel, Step};

/// Size of one read from the socket, in bytes. A source without multifd sends its pages on main; with 64 KiB a tenth of the
/// time was spent in system calls.
const READ: usize = 512 << 10;

/// Read size in bytes while a guest may wait for a requested page. It is smaller, because all pages read before the requested
/// page are placed first.
const READ_IN_POSTCOPY: usize = 64 << 10;

/// Read size of the set-up in bytes. The set-up is read before the stream is known to be supported. A set-up with few RAM
/// blocks has some hundred bytes.
const READ_OF_SET_UP: usize = 256;

/// Condition under which a wait for the source continues.
pub(crate) trait WaitCondition {
    /// Returns success if the wait may continue.
    ///
    /// # Errors
    /// The reason to stop the wait: the migration was cancelled, or another thread has ended it.
    fn check(&self) -> Result<(), MigrationError>;

    /// Returns the interval between two checks. In addition, each change of the lifetime causes a check.
    fn every(&self) -> Duration {
        LONG
    }
}

/// Buffered reader of a main channel. It can return everything read so far, to pass the stream through.
pub(crate) struct MainInput<'a> {
    channel: &'a Stream,
    counters: &'a Counters,
    wake_fd: WakeFd,
    buffer: CountedBuffer,
    /// Range of `buffer` that was read, but not taken yet.
    unread: std::ops::Range<usize>,
    /// True while all bytes are kept in `buffer`, until the stream is identified.
    keeps: bool,
    /// Size of one read in bytes.
    read: usize,
}

/// Bytes that a [`MainInput`] has read from the socket, but that were not taken.
pub(crate) struct ReadAhead {
    wake_fd: WakeFd,
    buffer: CountedBuffer,
    unread: std::ops::Range<usize>,
}

impl<'a> MainInput<'a> {
    /// Creates a reader. Its buffer, beyond its initial size, uses at most `memory`. Changes of `life` end its waits.
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

    /// Keeps all bytes that are read, until [`MainInput::detach`]. In this state each read is small, to read little ahead.
    pub(crate) fn keep_everything(mut self) -> Self {
        self.keeps = true;
        self.read = READ_OF_SET_UP;
        self
    }

    /// Reduces the size of later reads, for postcopy.
    pub(crate) fn read_little(&mut self) {
        self.read = READ_IN_POSTCOPY;
    }

    /// Returns the socket, to send answers.
    pub(crate) fn socket(&self) -> &'a Stream {
        self.channel
    }

    /// Returns the bytes that were read, but not taken yet.
    pub(crate) fn unread(&self) -> &[u8] {
        &self.buffer[self.unread.clone()]
    }

    /// Marks `length` unread bytes as taken.
    pub(crate) fn take(&mut self, length: usize) {
        self.unread.start += length;
    }

    /// Returns all bytes read so far, including taken bytes. Only valid before [`MainInput::detach`].
    pub(crate) fn everything(&self) -> &[u8] {
        &self.buffer[..self.unread.end]
    }

    /// Returns the bytes that were not taken, for another reader. Must be called only once the stream is identified, because
    /// taken bytes are dropped.
    pub(crate) fn detach(self) -> ReadAhead {
        ReadAhead {
            wake_fd: self.wake_fd,
            buffer: self.buffer,
            unread: self.unread,
        }
    }

    /// Creates a reader that continues after a detached reader.
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

    /// Returns true if the socket has bytes to read.
    pub(crate) fn is_readable(&self) -> Result<bool, MigrationError> {
        self.channel.wait_readable(Duration::ZERO).map_err(broken)
    }

    /// Performs the next step of `machine`. For an action, calls `act` with the action and the consumed bytes, and returns the
    /// result of `act`. If bytes are missing, reads some and returns `None`.
    ///
    /// # Errors
    /// An error of the machine, of `act` or of [`MainInput::fill`].
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

    /// Reads at least one of the `needed` bytes for `machine`. At the end of the connection, informs `machine` instead.
    ///
    /// # Errors
    /// [`MigrationError::Connection`], the error of `waiting`, or [`MigrationError::Memory`] if the buffer reaches its memory
    /// limit.
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
