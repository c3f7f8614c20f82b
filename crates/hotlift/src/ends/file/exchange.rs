//! One connection to a file server: requests and answers.
//!
//! A deadline applies to a whole message. With a timeout for each byte instead, a slow server could block a guest forever.

use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use hotlift_net::transport::{Stop, Stream};
use hotlift_tls::ALERT_BEGINS;
use hotlift_wire::WireError;
use hotlift_wire::file_ranges::{Answer, Open, READ_LEN, Read, Refusal, Reply, VERSION};

use super::location::RemoteFile;
use crate::error::file::{FileError, ServerError};
use crate::error::{MigrationError, printable};
use crate::remote::Remote;
use crate::tls::TlsError;

/// Time limit for a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Time limit for an answer, in addition to the time for its bytes. If the server's host has lost its power, TCP alone would
/// retry for a quarter of an hour.
const ANSWER: Duration = Duration::from_secs(20);

/// Minimum rate of an answer, in bytes per second. A restore with five connections on a link of 10 Mbit/s gets four times this
/// rate for each connection.
const SLOWEST: u64 = 64 << 10;

/// A range of the file to read, and the buffer for its bytes.
pub(super) struct Range<'a> {
    position: u64,
    into: &'a mut [u8],
    /// Number of received bytes. It is less than requested at the end of the file, or if the read failed.
    pub got: usize,
}

impl<'a> Range<'a> {
    /// Creates the request for the bytes from `position` on that fill `into`.
    pub(super) fn new((position, into): (u64, &'a mut [u8])) -> Self {
        Self {
            position,
            into,
            got: 0,
        }
    }
}

/// The server's description of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Opened {
    pub length: u64,
    pub id: u64,
}

/// Reason why a read failed.
pub(super) enum ReadFailure {
    /// The connection is unusable; a new one may work.
    Lost(ServerError),
    /// The server could not read the file; the connection stays usable.
    Unread(FileError),
    Final(FileError),
}

impl From<ServerError> for ReadFailure {
    fn from(error: ServerError) -> Self {
        Self::Lost(error)
    }
}

impl From<io::Error> for ReadFailure {
    fn from(source: io::Error) -> Self {
        ServerError::Connection(source).into()
    }
}

/// Deadline for the bytes of a message; `stop` can end the wait earlier.
pub(super) struct ReadDeadline<'a> {
    until: Instant,
    stop: Stop<'a>,
}

impl<'a> ReadDeadline<'a> {
    pub(super) fn new(time: Duration, stop: Stop<'a>) -> Self {
        Self {
            until: Instant::now() + time,
            stop,
        }
    }

    /// Fills `into` before the deadline.
    fn read_exact(&self, stream: &Stream, into: &mut [u8]) -> Result<(), ServerError> {
        let mut there = 0;
        while there < into.len() {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let kind = io::ErrorKind::TimedOut;
                return Err(ServerError::Connection(kind.into()));
            }
            let wait = self.stop.wait_readable(stream, left);
            if wait.map_err(ServerError::Connection)? {
                let read = stream.read_some(&mut into[there..]);
                match read.map_err(ServerError::Connection)? {
                    0 => return Err(ServerError::Closed),
                    read => there += read,
                }
            }
        }
        Ok(())
    }

    /// Receives and decodes exactly one message. `buffer` must be empty.
    pub(super) fn receive<T>(
        &self,
        stream: &Stream,
        buffer: &mut Vec<u8>,
        decode: impl Fn(&[u8]) -> Result<(T, usize), WireError>,
    ) -> Result<T, ServerError> {
        loop {
            let needed = match decode(buffer) {
                Ok((message, _)) => return Ok(message),
                Err(WireError::Truncated { needed, .. }) => needed,
                Err(error) => return Err(ServerError::Protocol(error)),
            };
            let there = buffer.len();
            buffer.resize(there + needed, 0);
            if let Err(error) = self.read_exact(stream, &mut buffer[there..]) {
                buffer.truncate(there);
                return Err(error);
            }
        }
    }
}

/// Connects to the server and opens the file. `stop` can end the wait.
pub(super) fn connect(
    file: &RemoteFile,
    visitor: u64,
    stop: Stop<'_>,
) -> Result<(Stream, Opened), ReadFailure> {
    let remote = Remote::new(&file.address, file.tls.clone());
    let stream = remote.connect_unless(CONNECT, stop).map_err(|error| {
        let is_final = match &error {
            MigrationError::Tls { source, .. } => !matches!(
                **source,
                TlsError::Closed | TlsError::TimedOut { .. } | TlsError::Io(_)
            ),
            error => !matches!(error, MigrationError::Transport(_)),
        };
        let source = ServerError::Connect(Box::new(error));
        match is_final {
            true => ReadFailure::Final(FileError::server(file, source)),
            false => ReadFailure::Lost(source),
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
    encoded.map_err(|source| ReadFailure::Final(FileError::server(file, source)))?;
    (&stream).write_all(&bytes)?;
    bytes.clear();
    let reply = ReadDeadline::new(ANSWER, stop).receive(&stream, &mut bytes, |bytes| {
        let (reply, length) = Reply::decode(bytes)?;
        let owned = match reply {
            Reply::Opened { length, id } => Ok(Opened { length, id }),
            Reply::Refused { why, text } => Err((why, printable(text))),
        };
        Ok((owned, length))
    });
    let failed = |source| ReadFailure::Final(FileError::server(file, source));
    match reply {
        Ok(Ok(opened)) => Ok((stream, opened)),
        Ok(Err((Refusal::NotNow, reason))) => {
            Err(ReadFailure::Lost(ServerError::NotNow { reason }))
        }
        Ok(Err((Refusal::NotThere | Refusal::Version, reason))) => {
            let file = file.to_string();
            Err(ReadFailure::Final(FileError::Refused { file, reason }))
        }
        Err(ServerError::Protocol(_)) if bytes.starts_with(&ALERT_BEGINS) => {
            let source = Box::new(MigrationError::SpeaksTls);
            Err(failed(ServerError::Connect(source)))
        }
        Err(source @ ServerError::Protocol(_)) => Err(failed(source)),
        Err(lost) => Err(ReadFailure::Lost(lost)),
    }
}

/// Requests all ranges at once, and reads the answers.
pub(super) fn exchange(
    mut stream: &Stream,
    file: &RemoteFile,
    ranges: &mut [Range<'_>],
    stop: Stop<'_>,
) -> Result<(), ReadFailure> {
    let mut requests = Vec::with_capacity(ranges.len() * READ_LEN);
    let mut expected = 0;
    for range in &*ranges {
        let read = Read {
            position: range.position,
            length: range.into.len(),
        };
        requests.extend_from_slice(&read.encode());
        expected += range.into.len() as u64;
    }
    stream.write_all(&requests)?;
    let wait = ReadDeadline::new(ANSWER + Duration::from_secs(expected / SLOWEST), stop);
    let mut head = Vec::new();
    let mut failure = None;
    for range in ranges {
        head.clear();
        let answer = wait.receive(stream, &mut head, |bytes| {
            let (answer, length) = Answer::decode(bytes, range.into.len())?;
            let owned = match answer {
                Answer::Bytes(length) => Ok(length),
                Answer::Failed(reason) => Err(printable(reason)),
            };
            Ok((owned, length))
        })?;
        match answer {
            Ok(length) => {
                wait.read_exact(stream, &mut range.into[..length])?;
                range.got = length;
            }
            // The remaining answers are still read, so that the connection stays usable.
            Err(reason) => {
                failure.get_or_insert(FileError::Unread {
                    file: file.to_string(),
                    position: range.position,
                    reason,
                });
            }
        }
    }
    failure.map_or(Ok(()), |error| Err(ReadFailure::Unread(error)))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_message_in_single_bytes_has_the_same_timeout() {
        let (here, there) = Stream::pair().unwrap();
        // This thread ends when the connection is closed.
        let dribbling = thread::spawn(move || while (&there).write_all(&[0]).is_ok() {});
        let mut message = Vec::new();
        let wait = ReadDeadline::new(Duration::from_millis(1), Stop::NEVER);
        let received = wait.receive(&here, &mut message, |bytes| -> Result<((), usize), _> {
            assert!(bytes.len() < 1 << 16, "it is waited for on and on");
            let (what, needed) = ("a message", 1);
            Err(WireError::Truncated { what, needed })
        });
        let Err(ServerError::Connection(error)) = received else {
            panic!("{received:?}");
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(here);
        dribbling.join().unwrap();
    }
}
