//! Errors of a QMP connection.

use std::io;
use std::time::Duration;

/// A failed command or connection. Messages include QEMU's own text if there is one, without control characters.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// The address is invalid.
    #[error("'{address}' is not a QMP address: expected PATH, unix:PATH or tcp:HOST:PORT")]
    Address {
        /// The address as given.
        address: String,
    },
    /// No connection was accepted before the deadline.
    #[error("cannot connect to the QMP socket {address} within {waited:?}")]
    Connect {
        /// The socket.
        address: String,
        /// Time spent trying.
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
    #[error("the QMP connection was closed during {command}")]
    Closed {
        /// The command (or `greeting`, or `events`).
        command: String,
    },
    /// No answer arrived in time.
    #[error("no answer to {command} within {waited:?}")]
    Timeout {
        /// The command (or `greeting`).
        command: String,
        /// Time waited.
        waited: Duration,
    },
    /// A line violates the protocol.
    #[error("protocol error on the QMP connection during {command}: {problem}")]
    Protocol {
        /// The command (or `greeting`, or `events`).
        command: String,
        /// The violation.
        problem: String,
    },
    /// QEMU refused a command.
    #[error("QEMU refused {command}: {desc} ({class})")]
    Command {
        /// The command.
        command: String,
        /// QEMU's error class, such as `GenericError`.
        class: String,
        /// QEMU's description.
        desc: String,
    },
    /// The answer to a command lacks a required value, or has one of another type.
    #[error("cannot parse the answer to {command}")]
    Answer {
        /// The command.
        command: String,
        /// The missing or mistyped value.
        #[source]
        source: serde_json::Error,
    },
    /// A capability that must be enabled is unknown to this QEMU.
    #[error("QEMU {version} has no migration capability '{name}'")]
    NoCapability {
        /// The capability.
        name: String,
        /// The version of this QEMU.
        version: String,
    },
}

impl QmpError {
    /// Returns true if the connection is lost, so further commands are useless.
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Io { .. } | Self::Closed { .. } | Self::Protocol { .. }
        )
    }
}

/// Longest quoted text of a peer, in characters.
const MAX_WORDS: usize = 1000;

/// Makes a peer's text safe to show: without control characters, in one line, with limited length.
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
