//! Why a conversation with a QEMU failed.

use std::io;
use std::time::Duration;

/// A failed command or connection. Messages carry QEMU's own words where it said any, without control
/// characters.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// The address is none.
    #[error("'{address}' is no QMP address: expected PATH, unix:PATH or tcp:HOST:PORT")]
    Address {
        /// As given.
        address: String,
    },
    /// Nobody took the connection before the deadline.
    #[error("cannot connect to the QMP socket {address} within {waited:?}")]
    Connect {
        /// The socket.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// The system's reason at the last attempt.
        #[source]
        source: io::Error,
    },
    /// The connection broke.
    #[error("the QMP connection broke during {command}")]
    Io {
        /// The command (or `greeting`, or `events`).
        command: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// QEMU closed the connection: it has most likely ended.
    #[error("QEMU closed its QMP connection during {command}")]
    Closed {
        /// The command (or `greeting`, or `events`).
        command: String,
    },
    /// No answer in time.
    #[error("no answer from QEMU to {command} within {waited:?}")]
    Timeout {
        /// The command (or `greeting`).
        command: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A line is not what the protocol allows.
    #[error("QEMU broke the QMP protocol during {command}: {problem}")]
    Protocol {
        /// The command (or `greeting`, or `events`).
        command: String,
        /// What is wrong.
        problem: String,
    },
    /// QEMU refused a command.
    #[error("QEMU refused {command}: {desc} ({class})")]
    Command {
        /// The command.
        command: String,
        /// QEMU's error class, such as `GenericError`.
        class: String,
        /// QEMU's words.
        desc: String,
    },
    /// The answer to a command lacks what it must have.
    #[error("the answer to {command} is not understood")]
    Answer {
        /// The command.
        command: String,
        /// What is missing or of another type.
        #[source]
        source: serde_json::Error,
    },
    /// A capability is to be switched on that this QEMU does not know.
    #[error("QEMU {version} has no migration capability '{name}'")]
    NoCapability {
        /// The capability.
        name: String,
        /// The version of this QEMU.
        version: String,
    },
}

impl QmpError {
    /// True if there is no use in asking this QEMU again: the connection is gone.
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Io { .. } | Self::Closed { .. } | Self::Protocol { .. }
        )
    }
}

/// Longest piece of QEMU's words in a message, in characters.
const MAX_WORDS: usize = 1000;

/// Words of a peer, fit to be shown: without control characters, in one line, not too long.
#[must_use]
pub fn one_line(words: &str) -> String {
    words
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_WORDS)
        .collect::<String>()
        .trim()
        .to_owned()
}
