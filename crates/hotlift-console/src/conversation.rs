//! A conversation of two hosts: JSON, one line a message, over a TCP connection.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use hotlift::Address;
use hotlift::transport::Stream;
use hotlift_qmp::{Line, Lines, Socket, one_line};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::ConsoleError;

/// How long connecting to the other host may take.
pub const CONNECT: Duration = Duration::from_secs(10);

/// Longest message, in bytes. The longest is a result with the CPU time of 255 channels.
const MAX_MESSAGE: usize = 256 << 10;

/// How long the other side may take to read a message.
const WRITE: Duration = Duration::from_secs(10);

/// Why a conversation ended.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The connection.
    #[error("the connection broke")]
    Io(#[from] std::io::Error),
    /// An end without a word.
    #[error("the other side closed the connection")]
    Closed,
    /// A line without end.
    #[error("a message of more than {MAX_MESSAGE} bytes")]
    TooLong,
    /// A full connection.
    #[error("the other side did not take a message within {WRITE:?}")]
    NotTaken,
    /// Something else.
    #[error("a message that is not understood ({problem}): '{start}'")]
    Garbage {
        /// What is wrong with it.
        problem: String,
        /// Its first bytes.
        start: String,
    },
    /// Another version of the protocol that is spoken over it.
    #[error(
        "the other side speaks version {theirs} of the control protocol, this one {ours}: use the same hotlift on both hosts"
    )]
    Version {
        /// The other side's.
        theirs: u64,
        /// This side's.
        ours: u32,
    },
}

/// One end of a conversation.
#[derive(Debug)]
pub struct Conversation(Lines);

impl Conversation {
    /// Over a connection that was made or accepted.
    pub fn new(stream: TcpStream) -> Result<Self, ConversationError> {
        stream.set_nodelay(true)?;
        Ok(Self(Lines::new(Socket::Tcp(stream), MAX_MESSAGE)))
    }

    /// With `hotlift serve` at `to`, which was given with `flag`.
    ///
    /// # Errors
    /// If nobody listens there.
    pub fn connect(to: &Address, flag: &'static str) -> Result<Self, ConsoleError> {
        if !matches!(to, Address::Tcp { .. }) {
            return Err(ConsoleError::OnlyTcp { flag });
        }
        match to.connect(CONNECT) {
            Ok(Stream::Tcp(stream)) => Ok(Self::new(stream)?),
            Ok(Stream::Unix(_)) => Err(ConsoleError::OnlyTcp { flag }),
            Err(source) => Err(ConsoleError::NoServe { source }),
        }
    }

    /// Says something.
    pub fn say<T: Serialize>(&mut self, message: &T) -> Result<(), ConversationError> {
        let mut line = serde_json::to_vec(message).map_err(std::io::Error::from)?;
        line.push(b'\n');
        match self.0.write(&line, Instant::now() + WRITE)? {
            true => Ok(()),
            false => Err(ConversationError::NotTaken),
        }
    }

    /// The next message, or `None` if none comes within `timeout`.
    pub fn hear<T: DeserializeOwned>(
        &mut self,
        timeout: Duration,
    ) -> Result<Option<T>, ConversationError> {
        let line = match self.0.read(Instant::now() + timeout)? {
            Line::Whole(line) => line,
            Line::Late => return Ok(None),
            Line::Closed => return Err(ConversationError::Closed),
            Line::TooLong => return Err(ConversationError::TooLong),
        };
        let message = serde_json::from_slice(&line);
        message.map(Some).map_err(|error| garbage(&line, &error))
    }
}

/// The message that a value is.
pub fn read<T: DeserializeOwned>(value: serde_json::Value) -> Result<T, ConversationError> {
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
