//! A conversation of two hosts: JSON, one line a message, over a TCP connection, with or without TLS.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift::Address;
use hotlift::relay::Pass;
use hotlift::tls::{ALERT_BEGINS, HANDSHAKE_BEGINS, Tls};
use hotlift::transport::Stream;
use hotlift_qmp::{Connection, Line, Lines, one_line};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::error::ConversationError;
use crate::error::{ConsoleError, MAX_MESSAGE, WRITE};

/// How long connecting to the other host may take.
pub const CONNECT: Duration = Duration::from_secs(10);

/// The connection of a conversation. Cheap to clone.
#[derive(Debug, Clone)]
struct Over(Arc<Stream>);

impl Connection for Over {
    fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.0.set_write_timeout(timeout)
    }

    fn read(&self, buffer: &mut [u8], timeout: Duration) -> io::Result<usize> {
        self.0.read_within(buffer, timeout)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        (&*self.0).write(bytes)
    }

    fn resumes(&self) -> bool {
        // A record of which a part was sent cannot be sent again.
        self.0.is_plain()
    }
}

/// One end of a conversation.
#[derive(Debug)]
pub struct Conversation(Lines<Over>);

/// Another handle on a conversation, to speak while this side waits for a message.
#[derive(Debug)]
pub struct Speaker(Lines<Over>);

impl Speaker {
    /// Says something.
    pub fn say<T: Serialize>(&self, message: &T) -> Result<(), ConversationError> {
        say(&self.0, message)
    }

    /// Ends the conversation.
    pub fn end(&self) {
        self.0.connection().0.shutdown(std::net::Shutdown::Both);
    }
}

fn say<T: Serialize>(lines: &Lines<Over>, message: &T) -> Result<(), ConversationError> {
    let mut line = serde_json::to_vec(message).map_err(io::Error::from)?;
    line.push(b'\n');
    match lines.write(&line, Instant::now() + WRITE)? {
        true => Ok(()),
        false => Err(ConversationError::NotTaken),
    }
}

impl Conversation {
    /// Over a connection that was made or accepted.
    #[must_use]
    pub fn new(stream: Stream) -> Self {
        Self(Lines::new(Over(Arc::new(stream)), MAX_MESSAGE))
    }

    /// With `hotlift serve` at `to`, which was given with `flag`.
    ///
    /// # Errors
    /// If nobody listens there, or the handshake of `tls` fails.
    pub fn connect(
        to: &Address,
        flag: &'static str,
        tls: Option<&Tls>,
    ) -> Result<Self, ConsoleError> {
        if !matches!(to, Address::Tcp { .. }) {
            return Err(ConsoleError::OnlyTcp { flag });
        }
        let stream = to.connect(CONNECT);
        let stream = stream.map_err(|source| ConsoleError::NoServe { source })?;
        Ok(Self::new(match tls {
            Some(tls) => {
                let host = stream.peer_host();
                let secured = stream.secure(tls, Some(to.host()));
                secured.map_err(|source| ConsoleError::Tls {
                    host,
                    source: Box::new(source),
                })?
            }
            None => stream,
        }))
    }

    /// Another handle on it.
    #[must_use]
    pub fn speaker(&self) -> Speaker {
        Speaker(Lines::new(self.0.connection().clone(), MAX_MESSAGE))
    }

    /// What opens the connections that are announced in it by `token`.
    #[must_use]
    pub fn pass(&self, token: [u8; 16]) -> Pass {
        Pass::new(token, self.stream().exporter().cloned())
    }

    /// The connection, for what is no conversation, and what was read of it behind the last message; `None` while there is
    /// a [`Speaker`].
    #[must_use]
    pub fn into_stream(self) -> Option<(Stream, Vec<u8>)> {
        let (over, rest) = self.0.into_parts();
        let stream = Arc::into_inner(over.0)?;
        // What is no conversation has its own patience.
        stream.lift_write_timeout().ok()?;
        Some((stream, rest))
    }

    /// Whether a part of a message has come.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        !self.0.begun().is_empty()
    }

    /// Whether something was received that a poll does not show.
    #[must_use]
    pub fn has_received(&self) -> bool {
        self.stream().has_plaintext()
    }

    /// What it is held over.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.0.connection().0
    }

    /// Says something.
    pub fn say<T: Serialize>(&mut self, message: &T) -> Result<(), ConversationError> {
        say(&self.0, message)
    }

    /// The next message, or `None` if none comes within `timeout`.
    pub fn hear<T: DeserializeOwned>(
        &mut self,
        timeout: Duration,
    ) -> Result<Option<T>, ConversationError> {
        let read = self.0.read(Instant::now() + timeout)?;
        let bytes = match &read {
            // What is no line of a conversation may end as one does.
            Line::Whole(line) => line,
            _ => self.0.begun(),
        };
        if bytes.starts_with(&ALERT_BEGINS) {
            return Err(ConversationError::SpeaksTls);
        }
        if bytes.starts_with(&HANDSHAKE_BEGINS) {
            return Err(ConversationError::BeginsTls);
        }
        let line = match read {
            Line::Whole(line) => line,
            Line::Late => return Ok(None),
            Line::Closed => return Err(ConversationError::Closed),
            Line::TooLong => return Err(ConversationError::TooLong),
        };
        let message = serde_json::from_slice(&line);
        message.map(Some).map_err(|error| garbage(&line, &error))
    }

    /// The first message, or `None` if none comes within `timeout`: its member `key` is the version of all that follow, which
    /// must be `ours`. Another is refused before anything else is read, since what else its hello has is not known.
    pub fn hear_hello<T: DeserializeOwned>(
        &mut self,
        (key, ours): (&str, u32),
        timeout: Duration,
    ) -> Result<Option<T>, ConversationError> {
        let Some(value) = self.hear::<serde_json::Value>(timeout)? else {
            return Ok(None);
        };
        match value.get(key).and_then(serde_json::Value::as_u64) {
            Some(theirs) if theirs != u64::from(ours) => {
                Err(ConversationError::Version { theirs, ours })
            }
            _ => read(value).map(Some),
        }
    }
}

impl AsFd for Conversation {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

/// The message that a value is.
fn read<T: DeserializeOwned>(value: serde_json::Value) -> Result<T, ConversationError> {
    let text = value.to_string();
    serde_json::from_value(value).map_err(|error| garbage(text.as_bytes(), &error))
}

/// Shown of a message that is none, in bytes.
const START: usize = 60;

fn garbage(line: &[u8], error: &serde_json::Error) -> ConversationError {
    ConversationError::Garbage {
        problem: one_line(&error.to_string()),
        start: one_line(&String::from_utf8_lossy(&line[..line.len().min(START)])),
    }
}
