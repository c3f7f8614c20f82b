//! A stranger's socket: what is read from it and how long it may take is bounded.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use hotlift_mem::sock::unacknowledged;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::error::{Missing, TlsError};

/// More than the other side may send.
#[derive(Debug, thiserror::Error)]
#[error("more bytes than are taken")]
struct TooMuch;

/// How often a wait looks whether it was called off.
const TICK: Duration = Duration::from_millis(100);

/// Who waits has no use of the connection any more.
#[derive(Debug, thiserror::Error)]
#[error("it was called off")]
struct CalledOff;

/// A blocking socket, used so that nothing blocks beyond a deadline. The socket's own timeouts and flags are left alone:
/// the engine sets them, and another thread may use it at the same time.
pub(crate) struct BoundedSocket<'a> {
    fd: BorrowedFd<'a>,
    time: Duration,
    deadline: Instant,
    bytes: usize,
    /// Of `bytes`, those that may still be read.
    left: usize,
    is_called_off: &'a dyn Fn() -> bool,
    has_sent: bool,
}

/// Returns what a handshake lacks, of whose sent bytes `unacknowledged` are not acknowledged.
fn missing(has_sent: bool, unacknowledged: impl FnOnce() -> u32) -> Missing {
    match has_sent {
        false => Missing::Start,
        true if unacknowledged() > 0 => Missing::Acknowledgement,
        true => Missing::Answer,
    }
}

impl<'a> BoundedSocket<'a> {
    /// Reads and writes fail once `is_called_off`.
    pub(crate) fn new(
        fd: BorrowedFd<'a>,
        time: Duration,
        bytes: usize,
        is_called_off: &'a dyn Fn() -> bool,
    ) -> Self {
        Self {
            fd,
            time,
            deadline: Instant::now() + time,
            bytes,
            left: bytes,
            is_called_off,
            has_sent: false,
        }
    }

    /// Why a read or write failed.
    pub(crate) fn explain(&self, error: io::Error) -> TlsError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => TlsError::Closed,
            io::ErrorKind::TimedOut => TlsError::TimedOut {
                after: self.time,
                missing: missing(self.has_sent, || unacknowledged(self.fd).unwrap_or(0)),
            },
            _ if error.get_ref().is_some_and(|inner| inner.is::<TooMuch>()) => {
                TlsError::TooMuch { limit: self.bytes }
            }
            _ => TlsError::Io(error),
        }
    }

    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if (self.is_called_off)() {
                return Err(io::Error::other(CalledOff));
            }
            let timeout = Timespec::try_from(left.min(TICK)).map_err(io::Error::other)?;
            let mut fds = [PollFd::from_borrowed_fd(self.fd, flags)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Read for BoundedSocket<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::Error::other(TooMuch));
        }
        let length = to.len().min(self.left);
        loop {
            self.wait(PollFlags::IN)?;
            match recv(self.fd, &mut to[..length], RecvFlags::DONTWAIT) {
                Ok((_, n)) => {
                    self.left -= n;
                    return Ok(n);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Write for BoundedSocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.wait(PollFlags::OUT)?;
            match send(self.fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) => {
                    self.has_sent = true;
                    return Ok(n);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_that_is_late_names_what_is_missing_and_the_mtu_where_it_may_be_the_cause() {
        for (has_sent, unacknowledged, expected) in [
            (false, 0, "the other side has sent nothing"),
            (
                true,
                900,
                "does not acknowledge what was sent; the path may drop packets of the full size (check the MTU)",
            ),
            (true, 0, "the other side does not answer"),
        ] {
            let missing = missing(has_sent, || unacknowledged).to_string();
            assert!(missing.contains(expected), "{missing}");
            assert_eq!(missing.contains("MTU"), has_sent, "{missing}");
        }
    }
}
