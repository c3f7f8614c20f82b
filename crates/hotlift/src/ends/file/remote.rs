//! A file on another host, read over connections of its own.
//!
//! Each read has a connection for itself, so that one that a guest waits for does not queue behind the background's: there are
//! as many as threads read at once. A read is the same whenever it is done, so that one whose connection is lost is done
//! again on a new one; the file that is there then has to be the same.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use hotlift_net::transport::Stream;

use super::exchange::{Opened, Range, Trouble, connect, exchange};
use super::location::RemoteFile;
use crate::control::Control;
use crate::error::file::{FileError, ServerError};
use crate::life::Life;
use crate::life::bell::Bell;
use crate::lock::lock;
use crate::stream::handshake;

/// How long a server tries to read a part of the file that its disk or network file system does not give: one that is in trouble
/// for a moment. What is unreadable for longer is taken for damaged, and the guest gets the rest.
const UNREADABLE: Duration = Duration::from_secs(5);

/// Before the second attempt to connect, and at most before any.
const PAUSE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// A file of another host that is open.
pub(crate) struct RemoteReader {
    file: RemoteFile,
    visitor: u64,
    opened: Opened,
    /// Connections that no thread reads from now, each with what ends its waits.
    idle: Mutex<Vec<(Stream, Bell)>>,
    /// Of whoever opened the file: ends reads until somebody persists.
    control: Control,
    /// For how long a lost server is tried again; not at all without.
    patience: OnceLock<Duration>,
    /// Stopped by whoever wants no more of the file.
    waits: Life,
    is_lost: AtomicBool,
}

impl RemoteReader {
    /// Opens the file. Once `control` is stopped, that and all reads fail, until [`RemoteReader::persist`].
    pub(super) fn open(file: &RemoteFile, control: &Control) -> Result<Self, FileError> {
        let failed = |source| FileError::server(file, source);
        let id = handshake::new_id().map_err(|source| failed(ServerError::Connection(source)))?;
        let [visitor, _] = id.0.as_chunks::<8>().0 else {
            unreachable!("an id has 16 bytes");
        };
        let visitor = u64::from_be_bytes(*visitor);
        let waits = Life::default();
        let bell = Bell::new(&waits).map_err(|source| failed(ServerError::Connection(source)))?;
        let bell = bell.and(control.life());
        let is_over = || control.life().is_stopped();
        let (stream, opened) = match connect(file, visitor, bell.stop(&is_over)) {
            Ok(connected) => connected,
            Err(Trouble::Lost(source)) => return Err(failed(source)),
            Err(Trouble::Unread(error) | Trouble::Final(error)) => return Err(error),
        };
        Ok(Self {
            file: file.clone(),
            visitor,
            opened,
            idle: Mutex::new(vec![(stream, bell)]),
            control: control.clone(),
            patience: OnceLock::new(),
            waits,
            is_lost: AtomicBool::new(false),
        })
    }

    /// Bytes of the file.
    pub(super) fn length(&self) -> u64 {
        self.opened.length
    }

    /// From now on a server that is lost is tried again for so long, and nothing but [`RemoteReader::give_up`] ends reads.
    pub(super) fn persist(&self, patience: Duration) {
        let _ = self.patience.set(patience);
    }

    /// Whether the server is lost, and tried again.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Nobody wants more of the file: reads that are under way, and all later ones, fail.
    pub(crate) fn give_up(&self) {
        self.waits.close();
    }

    fn is_over(&self) -> bool {
        self.waits.is_stopped() || self.patience.get().is_none() && self.control.life().is_stopped()
    }

    /// Fills ranges of the file, all of them asked for at once.
    pub(super) fn read(&self, ranges: &mut [Range<'_>]) -> Result<(), FileError> {
        let mut since = None;
        let mut pause = Duration::ZERO;
        let patience = self.patience.get().copied().unwrap_or_default();
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
            let ends = self.is_over() || patience.is_zero();
            let limit = match trouble {
                Trouble::Final(error) => return Err(error),
                Trouble::Unread(error) if ends || waited >= UNREADABLE => return Err(error),
                Trouble::Unread(_) => UNREADABLE,
                Trouble::Lost(source) if ends => return Err(FileError::server(&self.file, source)),
                Trouble::Lost(source) if waited >= patience => {
                    return Err(FileError::Lost {
                        file: self.file.to_string(),
                        waited: patience,
                        source: Box::new(source),
                    });
                }
                Trouble::Lost(_) => {
                    self.is_lost.store(true, Ordering::Release);
                    patience
                }
            };
            let until = Instant::now() + pause.min(limit.saturating_sub(waited));
            self.waits.sleep_while(until, || true);
            pause = (2 * pause).clamp(PAUSE[0], PAUSE[1]);
        }
    }

    fn try_read(&self, ranges: &mut [Range<'_>]) -> Result<(), Trouble> {
        let is_over = &|| self.is_over();
        let (stream, bell) = self.take(is_over)?;
        let outcome = exchange(&stream, &self.file, ranges, bell.stop(is_over));
        let mut idle = lock(&self.idle);
        match outcome {
            // Those that nobody uses are most likely gone with it.
            Err(Trouble::Lost(_)) => idle.clear(),
            _ => idle.push((stream, bell)),
        }
        outcome
    }

    /// A connection for one read: that which was used last, or a new one.
    fn take(&self, is_over: &dyn Fn() -> bool) -> Result<(Stream, Bell), Trouble> {
        let mut idle = lock(&self.idle);
        while let Some((stream, bell)) = idle.pop() {
            // A server closes what nobody has used for long.
            if !stream.is_hung_up() {
                return Ok((stream, bell));
            }
        }
        drop(idle);
        let bell = Bell::new(&self.waits)?.and(self.control.life());
        let (stream, opened) = connect(&self.file, self.visitor, bell.stop(is_over))?;
        if opened != self.opened {
            let file = self.file.to_string();
            return Err(Trouble::Final(FileError::OtherFile { file }));
        }
        Ok((stream, bell))
    }
}
