//! Errors of a QMP connection.

use std::io;
use std::time::Duration;

/// A failed command or connection. Messages include QEMU's own text if there is one; control characters are replaced by spaces.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// The address is invalid.
    #[error("'{address}' is not a QMP address; expected PATH, unix:PATH or tcp:HOST:PORT")]
    Address {
        /// The address as given.
        address: String,
    },
    /// No connection was accepted within the timeout.
    #[error("cannot connect to the QMP socket {address} within {waited:?}")]
    Connect {
        /// Address of the socket.
        address: String,
        /// Time spent with attempts.
        waited: Duration,
        /// The system's error at the last attempt.
        #[source]
        source: io::Error,
    },
    /// The connection broke.
    #[error("the QMP connection broke {}", during(command))]
    Io {
        /// The command, or `greeting` or `events`.
        command: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// QEMU closed the connection, most likely because it has ended.
    #[error("the QMP connection was closed {}", during(command))]
    Closed {
        /// The command, or `greeting` or `events`.
        command: String,
    },
    /// No answer arrived within the timeout.
    #[error("{} within {waited:?}", missing(command))]
    Timeout {
        /// The command, or `greeting`.
        command: String,
        /// Time waited.
        waited: Duration,
    },
    /// A line from QEMU violates the protocol.
    #[error("invalid data on the QMP connection {}: {problem}", during(command))]
    Protocol {
        /// The command, or `greeting` or `events`.
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
        /// QEMU's description of the error.
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
    /// Returns true if the connection is lost. Further commands on it fail, too.
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Io { .. } | Self::Closed { .. } | Self::Protocol { .. }
        )
    }
}

/// Returns the time of an error: the wait for `greeting`, for `events`, or for the answer to a command.
fn during(command: &str) -> String {
    match command {
        "greeting" => "before the greeting".to_owned(),
        "events" => "during a wait for events".to_owned(),
        command => format!("during {command}"),
    }
}

/// Returns the message that did not arrive: `greeting`, `events`, or the answer to a command.
fn missing(command: &str) -> String {
    match command {
        "greeting" => "no QMP greeting".to_owned(),
        "events" => "no QMP event".to_owned(),
        command => format!("no answer to {command}"),
    }
}

/// Maximum length of a peer's text in a message, in characters; the rest is cut.
const MAX_WORDS: usize = 1000;

/// Makes a peer's text safe to print: one line of limited length. Control characters are replaced by spaces.
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
