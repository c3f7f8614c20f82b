//! A conversation of two hosts: JSON, one line a message, over a TCP connection, with or without TLS.
//!
//! It begins with one hello, whatever it is about: the version of all messages, the role that the other side is to play, and
//! what it is to do ([`Wish`]). Unknown members are ignored; another version and another role are refused by name.

pub mod callers;

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift_mem::wait_readable;
use hotlift_qmp::{Connection, Line, Lines, one_line};
use hotlift_tls::{ALERT_BEGINS, HANDSHAKE_BEGINS};
use serde::Serialize;
use serde::de::{DeserializeOwned, Error as _};

use crate::admission::Pass;
use crate::transport::Stream;

/// Version of the messages of all conversations. Another is refused: both sides come from one version of Hotlift.
pub const VERSION: u32 = 6;

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
    /// An alert of TLS.
    #[error("the other side speaks TLS only: give '--tls DIR'")]
    SpeaksTls,
    /// A handshake of TLS.
    #[error(
        "the other side speaks TLS, and this one does not: give '--tls DIR' here, or '--insecure' there"
    )]
    BeginsTls,
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
    /// Another role than the one that this side plays.
    #[error(
        "the other side wants a '{theirs}' here, and this is a '{ours}': check the address and port"
    )]
    Role {
        /// What the other side wants.
        theirs: String,
        /// What this side is.
        ours: &'static str,
    },
}

/// What opens a conversation.
pub trait Wish: Serialize + DeserializeOwned {
    /// The role that the side plays which is to fulfil it.
    const ROLE: &'static str;
}

/// The first message as it is sent.
#[derive(Serialize)]
struct Hello<'a, T> {
    hotlift: u32,
    role: &'static str,
    #[serde(flatten)]
    wish: &'a T,
}

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

    /// Returns how many bytes of the next message were taken off the connection.
    #[must_use]
    pub fn begun(&self) -> usize {
        self.0.begun().len()
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

    /// The next message. `None` if it has not come whole when something else has: a part of it, `deadline`, or what makes one of
    /// `others` readable.
    pub fn hear_until<T: DeserializeOwned>(
        &mut self,
        others: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Option<T>, ConversationError> {
        let fds = [&[self.as_fd()], others].concat();
        let is_there = self.0.begun().contains(&b'\n') || self.stream().has_plaintext();
        match is_there || wait_readable(&fds, deadline) {
            true => self.hear(Duration::ZERO),
            false => Ok(None),
        }
    }

    /// Says the first message.
    pub fn say_hello<T: Wish>(&mut self, wish: &T) -> Result<(), ConversationError> {
        self.say(&Hello {
            hotlift: VERSION,
            role: T::ROLE,
            wish,
        })
    }

    /// The first message, or `None` if none comes within `timeout`. Its version is compared before anything else is read,
    /// since what else the hello of another version has is not known.
    pub fn hear_hello<T: Wish>(
        &mut self,
        timeout: Duration,
    ) -> Result<Option<T>, ConversationError> {
        let value = self.hear::<serde_json::Value>(timeout)?;
        value.map(read_hello).transpose()
    }
}

/// Returns the wish of a hello. In a hello of any version the member whose name begins with that of the product is the
/// version.
fn read_hello<T: Wish>(value: serde_json::Value) -> Result<T, ConversationError> {
    let mut members = value.as_object().into_iter().flatten();
    let version = members.find(|(name, _)| name.starts_with("hotlift"));
    let version = version.and_then(|(_, version)| version.as_u64());
    let role = value.get("role").and_then(serde_json::Value::as_str);
    match (version, role) {
        (Some(theirs), _) if theirs != u64::from(VERSION) => Err(ConversationError::Version {
            theirs,
            ours: VERSION,
        }),
        (Some(_), Some(theirs)) if theirs != T::ROLE => Err(ConversationError::Role {
            theirs: one_line(&theirs.chars().take(START).collect::<String>()),
            ours: T::ROLE,
        }),
        (Some(_), Some(_)) => {
            let text = value.to_string();
            serde_json::from_value(value).map_err(|error| garbage(text.as_bytes(), &error))
        }
        _ => {
            let error = serde_json::Error::custom("it has no version and role");
            Err(garbage(value.to_string().as_bytes(), &error))
        }
    }
}

impl AsFd for Conversation {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

/// Shown of a message that is none, in bytes.
const START: usize = 60;

fn garbage(line: &[u8], error: &serde_json::Error) -> ConversationError {
    ConversationError::Garbage {
        problem: one_line(&error.to_string()),
        start: one_line(&String::from_utf8_lossy(&line[..line.len().min(START)])),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Tea {
        cups: u8,
    }

    impl Wish for Tea {
        const ROLE: &'static str = "kitchen";
    }

    #[test]
    fn a_wait_for_a_message_ends_with_it_its_deadline_the_end_or_another_descriptor() {
        let (here, there) = Stream::pair().unwrap();
        let (mut here, mut there) = (Conversation::new(here), Conversation::new(there));
        let (other, ends) = io::pipe().unwrap();
        for cups in [1, 2] {
            here.say(&Tea { cups }).unwrap();
        }
        // Both come in one read.
        for cups in [1, 2] {
            assert_eq!(there.hear_until(&[], None).unwrap(), Some(Tea { cups }));
        }
        let mut wait = |deadline| there.hear_until::<Tea>(&[other.as_fd()], deadline);
        assert_eq!(wait(Some(Instant::now())).unwrap(), None);
        drop(ends);
        assert_eq!(wait(None).unwrap(), None);
        drop(here);
        assert!(matches!(wait(None), Err(ConversationError::Closed)));
    }

    #[test]
    fn a_hello_is_read_by_version_then_role_then_wish() {
        let (here, there) = Stream::pair().unwrap();
        let mut here = Conversation::new(here);
        here.say_hello(&Tea { cups: 3 }).unwrap();
        let long = Duration::from_secs(30);
        let heard = Conversation::new(there).hear_hello::<Tea>(long).unwrap();
        assert_eq!(heard, Some(Tea { cups: 3 }));

        let read = |hello: serde_json::Value| read_hello::<Tea>(hello).map_err(|it| it.to_string());
        let later = json!({ "hotlift": VERSION, "role": "kitchen", "cups": 1, "sugar": true });
        assert_eq!(
            read(later),
            Ok(Tea { cups: 1 }),
            "an unknown member is ignored"
        );
        for name in ["hotlift", "hotlift-agent"] {
            let error = read(json!({ name: 99, "what": "else" })).unwrap_err();
            assert!(
                error.contains("version 99") && error.contains(&format!("this one {VERSION}")),
                "{error}"
            );
        }
        let error = read(json!({ "hotlift": VERSION, "role": "garage" })).unwrap_err();
        assert!(
            error.contains("'garage'") && error.contains("'kitchen'"),
            "{error}"
        );
        for garbage in [
            json!({}),
            json!([]),
            json!({ "hotlift": VERSION }),
            json!({ "cups": 1 }),
        ] {
            let error = read(garbage).unwrap_err();
            assert!(error.contains("not understood"), "{error}");
        }
    }
}
