//! A file on another host, read over connections of its own.
//!
//! Each read has a connection for itself, so that one that a guest waits for does not queue behind the background's: there are
//! as many as threads read at once. A read is the same whenever it is done, so that one whose connection is lost is done
//! again on a new one; the file that is there then has to be the same.

use std::io::{self, Read as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use hotlift_tls::ALERT_BEGINS;
use hotlift_wire::WireError;
use hotlift_wire::file_ranges::{Answer, Open, READ_LEN, Read, Refusal, Reply, VERSION};

use super::error::{FileError, ServerError};
use super::location::RemoteFile;
use crate::control::Control;
use crate::error::{MigrationError, printable};
use crate::stream::handshake;
use crate::threads::lock;
use crate::tls::{Remote, TlsError};
use crate::transport::Stream;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(10);

/// How long a server may take for some bytes of an answer. A host that lost its power acknowledges nothing, and TCP alone
/// would try for a quarter of an hour.
const ANSWER: Duration = Duration::from_secs(20);

/// Before the second attempt to connect, and at most before any.
const PAUSE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// Bytes of the file that are wanted.
pub(super) struct Range<'a> {
    position: u64,
    into: &'a mut [u8],
    /// How many of them there are: fewer only where the file ends.
    pub got: usize,
}

impl<'a> Range<'a> {
    /// All of `into`, from a position on.
    pub(super) fn new((position, into): (u64, &'a mut [u8])) -> Self {
        Self {
            position,
            into,
            got: 0,
        }
    }
}

/// What a server says of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Opened {
    length: u64,
    id: u64,
}

/// Why a read came to nothing.
enum Trouble {
    /// Another attempt may do better.
    Lost(ServerError),
    Final(FileError),
}

impl From<io::Error> for Trouble {
    fn from(source: io::Error) -> Self {
        Self::Lost(ServerError::Connection(source))
    }
}

/// Such a file.
pub(crate) struct RemoteReader {
    file: RemoteFile,
    visitor: u64,
    opened: Opened,
    pool: Mutex<Pool>,
    /// For how long a lost server is tried again; not at all without.
    patience: OnceLock<Duration>,
    /// Stopped by whoever wants no more of the file.
    waits: Control,
    is_lost: AtomicBool,
}

#[derive(Default)]
struct Pool {
    idle: Vec<Arc<Stream>>,
    in_use: Vec<Arc<Stream>>,
}

impl RemoteReader {
    /// Opens the file. A cancel of `control` ends that.
    pub(super) fn open(file: &RemoteFile, control: &Control) -> Result<Self, FileError> {
        let failed = |source| FileError::server(file, source);
        let id = handshake::new_id().map_err(|source| failed(ServerError::Connection(source)))?;
        let [visitor, _] = id.0.as_chunks::<8>().0 else {
            unreachable!("an id has 16 bytes");
        };
        let visitor = u64::from_be_bytes(*visitor);
        let (stream, opened) = match connect(file, visitor, control) {
            Ok(connected) => connected,
            Err(Trouble::Lost(source)) => return Err(failed(source)),
            Err(Trouble::Final(error)) => return Err(error),
        };
        Ok(Self {
            file: file.clone(),
            visitor,
            opened,
            pool: Mutex::new(Pool {
                idle: vec![Arc::new(stream)],
                in_use: Vec::new(),
            }),
            patience: OnceLock::new(),
            waits: Control::new(),
            is_lost: AtomicBool::new(false),
        })
    }

    /// Bytes of the file.
    pub(super) fn length(&self) -> u64 {
        self.opened.length
    }

    /// From now on a server that is lost is tried again for so long.
    pub(super) fn persist(&self, patience: Duration) {
        let _ = self.patience.set(patience);
    }

    /// Whether the server is lost, and tried again.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Nobody wants more of the file: reads that are under way, and all later ones, fail.
    pub(crate) fn give_up(&self) {
        self.waits.cancel();
        for stream in &lock(&self.pool).in_use {
            stream.break_off();
        }
    }

    /// Fills ranges of the file, all of them asked for at once.
    pub(super) fn read(&self, ranges: &mut [Range<'_>]) -> Result<(), FileError> {
        let mut since = None;
        let mut pause = Duration::ZERO;
        loop {
            let source = match self.try_read(ranges) {
                Ok(()) => {
                    if since.is_some() {
                        self.is_lost.store(false, Ordering::Release);
                    }
                    return Ok(());
                }
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Lost(source)) => source,
            };
            let waited = since.get_or_insert_with(Instant::now).elapsed();
            let patience = self.patience.get().copied().unwrap_or_default();
            if self.waits.is_stopped() || patience.is_zero() {
                return Err(FileError::server(&self.file, source));
            }
            if waited >= patience {
                return Err(FileError::Lost {
                    file: self.file.to_string(),
                    waited: patience,
                    source: Box::new(source),
                });
            }
            self.is_lost.store(true, Ordering::Release);
            let left = patience.saturating_sub(waited);
            let until = Instant::now() + pause.min(left);
            self.waits.sleep_while(until, || true);
            pause = (2 * pause).clamp(PAUSE[0], PAUSE[1]);
        }
    }

    fn try_read(&self, ranges: &mut [Range<'_>]) -> Result<(), Trouble> {
        let stream = self.take()?;
        let outcome = exchange(&stream, &self.file, ranges);
        let mut pool = lock(&self.pool);
        pool.in_use.retain(|one| !Arc::ptr_eq(one, &stream));
        match outcome {
            Err(Trouble::Lost(_)) => {
                // Those that nobody uses are most likely gone with it.
                pool.idle.clear();
            }
            _ => pool.idle.push(stream),
        }
        outcome
    }

    /// A connection for one read: that which was used last, or a new one.
    fn take(&self) -> Result<Arc<Stream>, Trouble> {
        let idle = lock(&self.pool).idle.pop();
        let stream = match idle {
            Some(stream) => stream,
            None => {
                let (stream, opened) = connect(&self.file, self.visitor, &self.waits)?;
                if opened != self.opened {
                    let file = self.file.to_string();
                    return Err(Trouble::Final(FileError::OtherFile { file }));
                }
                Arc::new(stream)
            }
        };
        let mut pool = lock(&self.pool);
        if self.waits.is_stopped() {
            return Err(io::Error::from(io::ErrorKind::Interrupted).into());
        }
        pool.in_use.push(Arc::clone(&stream));
        Ok(stream)
    }
}

/// A connection on which the file is open.
fn connect(
    file: &RemoteFile,
    visitor: u64,
    control: &Control,
) -> Result<(Stream, Opened), Trouble> {
    let remote = Remote::new(&file.address, file.tls.clone());
    let stream = remote.connect_for(control, CONNECT).map_err(|error| {
        let is_final = match &error {
            MigrationError::Tls(error) => !matches!(
                error,
                TlsError::Closed | TlsError::TimedOut { .. } | TlsError::Io(_)
            ),
            error => !matches!(error, MigrationError::Transport(_)),
        };
        let source = ServerError::Connect(Box::new(error));
        match is_final {
            true => Trouble::Final(FileError::server(file, source)),
            false => Trouble::Lost(source),
        }
    })?;
    stream.set_timeouts(ANSWER)?;
    let mut bytes = Vec::new();
    let open = Open {
        version: VERSION,
        visitor,
        name: &file.name,
    };
    let encoded = open.encode(&mut bytes).map_err(ServerError::Protocol);
    encoded.map_err(|source| Trouble::Final(FileError::server(file, source)))?;
    (&stream).write_all(&bytes)?;
    bytes.clear();
    let reply = receive(&stream, None, &mut bytes, |bytes| {
        let (reply, length) = Reply::decode(bytes)?;
        let owned = match reply {
            Reply::Opened { length, id } => Ok(Opened { length, id }),
            Reply::Refused { why, text } => Err((why, printable(text))),
        };
        Ok((owned, length))
    });
    let failed = |source| Trouble::Final(FileError::server(file, source));
    match reply {
        Ok(Ok(opened)) => Ok((stream, opened)),
        Ok(Err((Refusal::Busy, _))) => Err(Trouble::Lost(ServerError::Busy)),
        Ok(Err((Refusal::NotThere | Refusal::Version, reason))) => {
            let file = file.to_string();
            Err(Trouble::Final(FileError::Refused { file, reason }))
        }
        Err(ServerError::Protocol(_)) if bytes.starts_with(&ALERT_BEGINS) => {
            let source = Box::new(MigrationError::SpeaksTls);
            Err(failed(ServerError::Connect(source)))
        }
        Err(source @ ServerError::Protocol(_)) => Err(failed(source)),
        Err(lost) => Err(Trouble::Lost(lost)),
    }
}

/// Asks for all ranges, and takes the answers.
fn exchange(stream: &Stream, file: &RemoteFile, ranges: &mut [Range<'_>]) -> Result<(), Trouble> {
    let mut to_and_from = stream;
    let mut requests = Vec::with_capacity(ranges.len() * READ_LEN);
    for range in &*ranges {
        let read = Read {
            position: range.position,
            length: range.into.len(),
        };
        requests.extend_from_slice(&read.encode());
    }
    to_and_from.write_all(&requests)?;
    let mut head = Vec::new();
    let mut failure = None;
    for range in ranges {
        head.clear();
        let answer = receive(stream, None, &mut head, |bytes| {
            let (answer, length) = Answer::decode(bytes, range.into.len())?;
            let owned = match answer {
                Answer::Bytes(length) => Ok(length),
                Answer::Failed(reason) => Err(printable(reason)),
            };
            Ok((owned, length))
        });
        match answer.map_err(Trouble::Lost)? {
            Ok(length) => {
                to_and_from.read_exact(&mut range.into[..length])?;
                range.got = length;
            }
            // The other answers are taken all the same: the connection serves on.
            Err(reason) => {
                failure.get_or_insert(FileError::Unread {
                    file: file.to_string(),
                    position: range.position,
                    reason,
                });
            }
        }
    }
    failure.map_or(Ok(()), |error| Err(Trouble::Final(error)))
}

/// Reads a message into the empty `buffer`, and nothing behind it.
pub(super) fn receive<T>(
    stream: &Stream,
    deadline: Option<Instant>,
    buffer: &mut Vec<u8>,
    decode: impl Fn(&[u8]) -> Result<(T, usize), WireError>,
) -> Result<T, ServerError> {
    loop {
        let needed = match decode(buffer) {
            Ok((message, _)) => return Ok(message),
            Err(WireError::Truncated { needed, .. }) => needed,
            Err(error) => return Err(ServerError::Protocol(error)),
        };
        let mut there = buffer.len();
        buffer.resize(there + needed, 0);
        while there < buffer.len() {
            let into = &mut buffer[there..];
            let read = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(left) => stream.read_within(into, left),
                None => stream.read_some(into),
            };
            match read.map_err(ServerError::Connection)? {
                0 => return Err(ServerError::Closed),
                read => there += read,
            }
        }
    }
}
