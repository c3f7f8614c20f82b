//! A file on another host, read over its own connections.
//!
//! Each read has its own connection, so that a read for a waiting guest does not queue behind background reads. So there are as
//! many connections as concurrent readers. Reads are idempotent: after a lost connection the read is repeated on a new one, on
//! which the file must be unchanged.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use hotlift_net::transport::Stream;

use super::exchange::{Opened, Range, ReadFailure, connect, exchange};
use super::location::RemoteFile;
use crate::control::Control;
use crate::error::file::{FileError, ServerError};
use crate::life::Life;
use crate::life::wake_fd::WakeFd;
use crate::lock::lock;
use crate::stream::handshake;

/// Time for which a part of the file that the server cannot read is retried: its disk or network file system may have a short
/// failure. A part that stays unreadable counts as damaged, and the guest gets the rest.
const UNREADABLE: Duration = Duration::from_secs(5);

/// Pause before the second attempt to connect, and the maximum pause.
const PAUSE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// An open file on another host.
pub(crate) struct RemoteReader {
    file: RemoteFile,
    visitor: u64,
    opened: Opened,
    /// Unused connections, each with the descriptor that ends its waits.
    idle: Mutex<Vec<(Stream, WakeFd)>>,
    /// Control of the caller that opened the file: its cancel ends reads until [`RemoteReader::persist`].
    control: Control,
    /// Time for which reads retry after a lost connection; unset for no retry.
    timeout: OnceLock<Duration>,
    /// Life that [`RemoteReader::cancel_reads`] closes.
    waits: Life,
    is_lost: AtomicBool,
}

impl RemoteReader {
    /// Opens the file. Once `control` is stopped, this and all reads fail, until [`RemoteReader::persist`].
    pub(super) fn open(file: &RemoteFile, control: &Control) -> Result<Self, FileError> {
        let failed = |source| FileError::server(file, source);
        let id = handshake::new_id().map_err(|source| failed(ServerError::Connection(source)))?;
        let [visitor, _] = id.0.as_chunks::<8>().0 else {
            unreachable!("an id has 16 bytes");
        };
        let visitor = u64::from_be_bytes(*visitor);
        let waits = Life::default();
        let wake_fd =
            WakeFd::new(&waits).map_err(|source| failed(ServerError::Connection(source)))?;
        let wake_fd = wake_fd.and(control.life());
        let is_over = || control.life().is_stopped();
        let (stream, opened) = match connect(file, visitor, wake_fd.stop(&is_over)) {
            Ok(connected) => connected,
            Err(ReadFailure::Lost(source)) => return Err(failed(source)),
            Err(ReadFailure::Unread(error) | ReadFailure::Final(error)) => return Err(error),
        };
        Ok(Self {
            file: file.clone(),
            visitor,
            opened,
            idle: Mutex::new(vec![(stream, wake_fd)]),
            control: control.clone(),
            timeout: OnceLock::new(),
            waits,
            is_lost: AtomicBool::new(false),
        })
    }

    /// Returns the length of the file, in bytes.
    pub(super) fn length(&self) -> u64 {
        self.opened.length
    }

    /// Sets the retry time after a lost connection. From now on only [`RemoteReader::cancel_reads`] cancels reads.
    pub(super) fn persist(&self, timeout: Duration) {
        let _ = self.timeout.set(timeout);
    }

    /// Returns true while the connection to the server is lost and retried.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Cancels all current and later reads.
    pub(crate) fn cancel_reads(&self) {
        self.waits.close();
    }

    fn is_over(&self) -> bool {
        self.waits.is_stopped() || self.timeout.get().is_none() && self.control.life().is_stopped()
    }

    /// Fills ranges of the file, all requested at once.
    pub(super) fn read(&self, ranges: &mut [Range<'_>]) -> Result<(), FileError> {
        let mut since = None;
        let mut pause = Duration::ZERO;
        let timeout = self.timeout.get().copied().unwrap_or_default();
        loop {
            let trouble = match self.try_read(ranges) {
                Ok(()) => {
                    if since.is_some() {
                        self.is_lost.store(false, Ordering::Release);
                    }
                    return Ok(());
                }
                Err(trouble) => trouble,
            };
            let waited = since.get_or_insert_with(Instant::now).elapsed();
            let ends = self.is_over() || timeout.is_zero();
            let limit = match trouble {
                ReadFailure::Final(error) => return Err(error),
                ReadFailure::Unread(error) if ends || waited >= UNREADABLE => return Err(error),
                ReadFailure::Unread(_) => UNREADABLE,
                ReadFailure::Lost(source) if ends => {
                    return Err(FileError::server(&self.file, source));
                }
                ReadFailure::Lost(source) if waited >= timeout => {
                    return Err(FileError::Lost {
                        file: self.file.to_string(),
                        waited: timeout,
                        source: Box::new(source),
                    });
                }
                ReadFailure::Lost(_) => {
                    self.is_lost.store(true, Ordering::Release);
                    timeout
                }
            };
            let until = Instant::now() + pause.min(limit.saturating_sub(waited));
            self.waits.sleep_while(until, || true);
            pause = (2 * pause).clamp(PAUSE[0], PAUSE[1]);
        }
    }

    fn try_read(&self, ranges: &mut [Range<'_>]) -> Result<(), ReadFailure> {
        let is_over = &|| self.is_over();
        let (stream, wake_fd) = self.take(is_over)?;
        let outcome = exchange(&stream, &self.file, ranges, wake_fd.stop(is_over));
        let mut idle = lock(&self.idle);
        match outcome {
            // The unused connections are most likely lost as well.
            Err(ReadFailure::Lost(_)) => idle.clear(),
            _ => idle.push((stream, wake_fd)),
        }
        outcome
    }

    /// Returns a connection for one read: the most recently used one, or a new one.
    fn take(&self, is_over: &dyn Fn() -> bool) -> Result<(Stream, WakeFd), ReadFailure> {
        let mut idle = lock(&self.idle);
        while let Some((stream, wake_fd)) = idle.pop() {
            // A server closes connections that are unused for long.
            if !stream.is_hung_up() {
                return Ok((stream, wake_fd));
            }
        }
        drop(idle);
        let wake_fd = WakeFd::new(&self.waits)?.and(self.control.life());
        let (stream, opened) = connect(&self.file, self.visitor, wake_fd.stop(is_over))?;
        if opened != self.opened {
            let file = self.file.to_string();
            return Err(ReadFailure::Final(FileError::OtherFile { file }));
        }
        Ok((stream, wake_fd))
    }
}
