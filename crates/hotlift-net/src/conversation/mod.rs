//! A conversation of two hosts over a TCP connection, with or without TLS. Each message is one line of JSON.
//!
//! The first message is the hello. The hello contains the version of all messages, the role that the peer must have, and
//! the request ([`OpeningRequest`]). Unknown members are ignored. A hello with another version or role is refused with an error
//! that names the version or role.

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

use crate::admission::ConnectionToken;
use crate::transport::Stream;

/// Version of the messages of all conversations. Another version is refused, so both sides must have the same version of
/// Hotlift.
pub const VERSION: u32 = 6;

/// Maximum length of a message, in bytes. The longest message is a result with the CPU times of 255 channels.
const MAX_MESSAGE: usize = 256 << 10;

/// Maximum time for the peer to read a message.
const WRITE: Duration = Duration::from_secs(10);

/// Error that ends a conversation.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The connection failed.
    #[error("the connection broke")]
    Io(#[from] std::io::Error),
    /// The peer closed the connection.
    #[error("the other side closed the connection")]
    Closed,
    /// The peer requires TLS: it sent a TLS alert.
    #[error("the other side accepts only TLS; give '--tls DIR'")]
    SpeaksTls,
    /// The peer uses TLS: it began a handshake.
    #[error(
        "the other side uses TLS, but this side does not; give '--tls DIR' here, or '--insecure' there"
    )]
    BeginsTls,
    /// The peer sent a line that is too long.
    #[error("the other side sent a message of more than {MAX_MESSAGE} bytes")]
    TooLong,
    /// The peer did not read a message in time.
    #[error("the other side did not read a message within {WRITE:?}")]
    NotTaken,
    /// The peer sent an invalid message.
    #[error("the other side sent an unknown message ({problem}): '{start}'")]
    Garbage {
        /// Error of the parser.
        problem: String,
        /// First bytes of the message.
        start: String,
    },
    /// The peer has another version of the protocol.
    #[error(
        "the other side has version {theirs} of the control protocol, this side has version {ours}; use the same hotlift on both hosts"
    )]
    Version {
        /// Version of the peer.
        theirs: u64,
        /// Version of this side.
        ours: u32,
    },
    /// The peer expects another role than this side has.
    #[error(
        "the other side accepts connections of kind '{theirs}', and this one is of kind '{ours}'; check the address and port"
    )]
    Role {
        /// Role that the peer expects.
        theirs: String,
        /// Role of this side.
        ours: &'static str,
    },
}

/// Request in the hello of a conversation.
pub trait OpeningRequest: Serialize + DeserializeOwned {
    /// Role of the side that executes the request.
    const ROLE: &'static str;
}

/// The hello, as it is sent.
#[derive(Serialize)]
struct Hello<'a, T> {
    hotlift: u32,
    role: &'static str,
    #[serde(flatten)]
    request: &'a T,
}

/// The connection of a conversation; its clones share one connection.
#[derive(Debug, Clone)]
struct SharedStream(Arc<Stream>);

impl Connection for SharedStream {
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
        // A TLS record that was sent partially cannot be continued.
        self.0.is_plain()
    }
}

/// End of a conversation in this process.
#[derive(Debug)]
pub struct Conversation(Lines<SharedStream>);

/// Second handle of a conversation, to send messages while another thread waits for a message.
#[derive(Debug)]
pub struct ConversationSender(Lines<SharedStream>);

impl ConversationSender {
    /// Sends a message.
    pub fn send<T: Serialize>(&self, message: &T) -> Result<(), ConversationError> {
        send(&self.0, message)
    }

    /// Ends the conversation by shutting down its connection.
    pub fn end(&self) {
        self.0.connection().0.shutdown(std::net::Shutdown::Both);
    }
}

fn send<T: Serialize>(lines: &Lines<SharedStream>, message: &T) -> Result<(), ConversationError> {
    let mut line = serde_json::to_vec(message).map_err(io::Error::from)?;
    line.push(b'\n');
    match lines.write(&line, Instant::now() + WRITE)? {
        true => Ok(()),
        false => Err(ConversationError::NotTaken),
    }
}

impl Conversation {
    /// Creates a conversation over a connection.
    #[must_use]
    pub fn new(stream: Stream) -> Self {
        Self(Lines::new(SharedStream(Arc::new(stream)), MAX_MESSAGE))
    }

    /// Returns a second handle that can send messages.
    #[must_use]
    pub fn sender(&self) -> ConversationSender {
        ConversationSender(Lines::new(self.0.connection().clone(), MAX_MESSAGE))
    }

    /// Returns the token for connections of this conversation, from the random bytes `token` that one side sent.
    #[must_use]
    pub fn pass(&self, token: [u8; 16]) -> ConnectionToken {
        ConnectionToken::new(token, self.stream().exporter().cloned())
    }

    /// Returns the connection for other use, and the bytes that were read after the last message. Returns `None` if a
    /// [`ConversationSender`] still exists, or if the connection failed.
    #[must_use]
    pub fn into_stream(self) -> Option<(Stream, Vec<u8>)> {
        let (over, rest) = self.0.into_parts();
        let stream = Arc::into_inner(over.0)?;
        // The timeouts of a conversation do not apply to other uses.
        stream.lift_write_timeout().ok()?;
        Some((stream, rest))
    }

    /// Returns the number of received bytes after the last message.
    #[must_use]
    pub fn buffered_len(&self) -> usize {
        self.0.buffered().len()
    }

    /// Returns the connection.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.0.connection().0
    }

    /// Sends a message.
    pub fn send<T: Serialize>(&mut self, message: &T) -> Result<(), ConversationError> {
        send(&self.0, message)
    }

    /// Receives the next message; `None` if none arrives within `timeout`.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        timeout: Duration,
    ) -> Result<Option<T>, ConversationError> {
        let read = self.0.read(Instant::now() + timeout)?;
        let bytes = match &read {
            // TLS records can also contain the byte that ends a line.
            Line::Whole(line) => line,
            _ => self.0.buffered(),
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

    /// Receives the next message. Returns `None` if only a part of the message arrives, if `deadline` passes, or if one of
    /// `others` becomes readable.
    pub fn receive_until<T: DeserializeOwned>(
        &mut self,
        others: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Option<T>, ConversationError> {
        let fds = [&[self.as_fd()], others].concat();
        let is_there = self.0.buffered().contains(&b'\n') || self.stream().has_plaintext();
        match is_there || wait_readable(&fds, deadline) {
            true => self.receive(Duration::ZERO),
            false => Ok(None),
        }
    }

    /// Sends the hello with this `request`.
    pub fn send_hello<T: OpeningRequest>(&mut self, request: &T) -> Result<(), ConversationError> {
        self.send(&Hello {
            hotlift: VERSION,
            role: T::ROLE,
            request,
        })
    }

    /// Receives the hello, and returns its request; `None` if none arrives within `timeout`. The version is compared first,
    /// because the format of another version's hello is unknown.
    pub fn receive_hello<T: OpeningRequest>(
        &mut self,
        timeout: Duration,
    ) -> Result<Option<T>, ConversationError> {
        let value = self.receive::<serde_json::Value>(timeout)?;
        value.map(read_hello).transpose()
    }
}

/// Returns the request of a hello. In every version, the member whose name begins with the product's name contains the version.
fn read_hello<T: OpeningRequest>(value: serde_json::Value) -> Result<T, ConversationError> {
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
            let error = serde_json::Error::custom("version and role are missing");
            Err(garbage(value.to_string().as_bytes(), &error))
        }
    }
}

impl AsFd for Conversation {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

/// Length of the quoted start of an invalid message, in bytes.
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

    impl OpeningRequest for Tea {
        const ROLE: &'static str = "kitchen";
    }

    #[test]
    fn a_wait_for_a_message_ends_with_it_its_deadline_the_end_or_another_descriptor() {
        let (here, there) = Stream::pair().unwrap();
        let (mut here, mut there) = (Conversation::new(here), Conversation::new(there));
        let (other, ends) = io::pipe().unwrap();
        for cups in [1, 2] {
            here.send(&Tea { cups }).unwrap();
        }
        // Both messages arrive in one read.
        for cups in [1, 2] {
            assert_eq!(there.receive_until(&[], None).unwrap(), Some(Tea { cups }));
        }
        let mut wait = |deadline| there.receive_until::<Tea>(&[other.as_fd()], deadline);
        assert_eq!(wait(Some(Instant::now())).unwrap(), None);
        drop(ends);
        assert_eq!(wait(None).unwrap(), None);
        drop(here);
        assert!(matches!(wait(None), Err(ConversationError::Closed)));
    }

    #[test]
    fn a_hello_is_checked_by_version_then_role_then_request() {
        let (here, there) = Stream::pair().unwrap();
        let mut here = Conversation::new(here);
        here.send_hello(&Tea { cups: 3 }).unwrap();
        let long = Duration::from_secs(30);
        let received = Conversation::new(there).receive_hello::<Tea>(long).unwrap();
        assert_eq!(received, Some(Tea { cups: 3 }));

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
                error.contains("version 99")
                    && error.contains(&format!("this side has version {VERSION}")),
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
            assert!(error.contains("unknown message"), "{error}");
        }
    }
}
