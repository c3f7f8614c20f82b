//! Client of QEMU's guest agent (qemu-ga), over the UNIX socket of its virtio-serial port.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};

use crate::error::one_line;
use crate::lines::{Line, Lines, Socket};

/// Maximum length of a line from the agent, in bytes. The answers to the commands used here have less than 100.
const MAX_LINE: usize = 64 << 10;

/// Byte that resets the agent's parser, and removes incomplete input of an earlier client (see QEMU's `guest-sync-delimited`).
const RESET: u8 = 0xff;

/// Reason why the guest's clock was not set. Control characters in the agent's texts are replaced by spaces.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestAgentError {
    /// The connection to the socket failed.
    #[error("cannot connect to the guest agent's socket {}", path.display())]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection to the guest agent broke during {command}")]
    Io {
        /// The command.
        command: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The connection was closed.
    #[error("the guest agent's socket was closed during {command}")]
    Closed {
        /// The command.
        command: &'static str,
    },
    /// No answer arrived within the timeout.
    #[error(
        "the guest agent did not answer {command} within {waited:?}; check that qemu-ga runs in the guest, and that no other \
         client is connected to the socket"
    )]
    Timeout {
        /// The command.
        command: &'static str,
        /// Timeout of all commands together.
        waited: Duration,
    },
    /// An answer violates the protocol.
    #[error("the guest agent's answer to {command} is not JSON of up to {MAX_LINE} bytes")]
    Protocol {
        /// The command.
        command: &'static str,
    },
    /// The agent refused a command.
    #[error("the guest agent refused {command}: {reason}")]
    Refused {
        /// The command.
        command: &'static str,
        /// The agent's reason.
        reason: String,
    },
}

/// Sets the guest's clock through the guest agent at the UNIX socket `path` (`guest-set-time`). `clock`, which is called after
/// the agent's first answer, returns the time since 1970. `timeout` limits all steps together.
///
/// # Errors
/// [`GuestAgentError`]. The clock is unchanged, with one exception: the agent received the last command, and its answer was
/// lost.
pub fn set_guest_time(
    path: &Path,
    clock: impl FnOnce() -> Duration,
    timeout: Duration,
) -> Result<(), GuestAgentError> {
    let deadline = Instant::now() + timeout;
    let stream = connect(path, timeout).map_err(|source| GuestAgentError::Connect {
        path: path.to_owned(),
        source,
    })?;
    let mut agent = GuestAgent {
        lines: Lines::new(Socket::Unix(stream), MAX_LINE),
        deadline,
        timeout,
    };
    let id = u64::from(std::process::id());
    agent.send(&[RESET], "guest-sync", &json!({ "id": id }))?;
    // The first answers may belong to an earlier client, or may report an error in its incomplete input.
    while agent.receive("guest-sync")? != Ok(id.into()) {}
    let nanoseconds = u64::try_from(clock().as_nanos()).unwrap_or(u64::MAX);
    agent.send(&[], "guest-set-time", &json!({ "time": nanoseconds }))?;
    match agent.receive("guest-set-time")? {
        Ok(_) => Ok(()),
        Err(reason) => Err(GuestAgentError::Refused {
            command: "guest-set-time",
            reason,
        }),
    }
}

/// Connects to the socket. If its accept queue is full because of another client, the kernel waits up to `timeout`.
fn connect(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// A connection to an agent.
struct GuestAgent {
    lines: Lines,
    deadline: Instant,
    timeout: Duration,
}

impl GuestAgent {
    fn send(
        &self,
        before: &[u8],
        command: &'static str,
        arguments: &Value,
    ) -> Result<(), GuestAgentError> {
        let request = json!({ "execute": command, "arguments": arguments });
        let mut line = before.to_vec();
        line.extend_from_slice(request.to_string().as_bytes());
        line.push(b'\n');
        match self.lines.write(&line, self.deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.late(command)),
            Err(source) => Err(GuestAgentError::Io { command, source }),
        }
    }

    /// Returns the next answer, or the reason for a refusal.
    fn receive(&mut self, command: &'static str) -> Result<Result<Value, String>, GuestAgentError> {
        let read = self.lines.read(self.deadline);
        let line = match read.map_err(|source| GuestAgentError::Io { command, source })? {
            Line::Whole(line) => line,
            Line::TooLong => return Err(GuestAgentError::Protocol { command }),
            Line::Closed => return Err(GuestAgentError::Closed { command }),
            Line::Late => return Err(self.late(command)),
        };
        let text = line.strip_prefix(&[RESET]).unwrap_or(&line);
        let mut answer: Value =
            serde_json::from_slice(text).map_err(|_| GuestAgentError::Protocol { command })?;
        if !answer.is_object() {
            return Err(GuestAgentError::Protocol { command });
        }
        if let Some(reason) = answer.pointer("/error/desc").and_then(Value::as_str) {
            return Ok(Err(one_line(reason)));
        }
        Ok(Ok(answer["return"].take()))
    }

    fn late(&self, command: &'static str) -> GuestAgentError {
        GuestAgentError::Timeout {
            command,
            waited: self.timeout,
        }
    }
}
