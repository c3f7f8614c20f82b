//! A file on another host, read over its own connections.
//!
//! Concurrent reads use separate connections, so a read for a waiting guest does not queue after background reads. After the
//! loss of a connection, its read is repeated on a new connection. The file must not have changed in the meantime.

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

/// Time for which a failed read of the server's disk or network file system is retried, because the failure may be short. A
/// part that stays unreadable counts as damaged; other parts are still read.
const UNREADABLE: Duration = Duration::from_secs(5);

/// Pause before the second attempt to connect, and the maximum pause.
const PAUSE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// An open file on another host.
pub(crate) struct RemoteReader {
    file: RemoteFile,
    visitor: u64,
    opened: Opened,
    /// Unused connections, each with the descriptor that wakes its waiting reader.
    idle: Mutex<Vec<(Stream, WakeFd)>>,
    /// Control of the caller that opened the file. Cancelling it ends all reads, until [`RemoteReader::persist`] is called.
    control: Control,
    /// Time for which reads retry after the loss of a connection; no retry while it is unset.
    timeout: OnceLock<Duration>,
    /// Lifetime of all waits; [`RemoteReader::cancel_reads`] closes it.
    waits: Life,
    is_lost: AtomicBool,
}

impl RemoteReader {
    /// Connects and opens the file. After a stop of `control`, this call and all reads fail, until [`RemoteReader::persist`] is
    /// called.
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

    /// Sets the retry time after the loss of a connection. From then on, a cancel of the control has no effect: only
    /// [`RemoteReader::cancel_reads`] ends reads.
    pub(super) fn persist(&self, timeout: Duration) {
        let _ = self.timeout.set(timeout);
    }

    /// Returns true while the connection to the server is lost and retried.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Cancels all current and future reads.
    pub(crate) fn cancel_reads(&self) {
        self.waits.close();
    }

    fn is_over(&self) -> bool {
        self.waits.is_stopped() || self.timeout.get().is_none() && self.control.life().is_stopped()
    }

    /// Reads all `ranges` in one exchange with the server. After the loss of a connection, retries for the time set by
    /// [`RemoteReader::persist`].
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
            // The unused connections are probably lost as well.
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
