//! Socket of an unauthenticated peer, with limits of bytes and time.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use hotlift_mem::sock::unacknowledged;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::error::{Missing, TlsError};

/// The peer sent more bytes than allowed.
#[derive(Debug, thiserror::Error)]
#[error("more bytes than are taken")]
struct TooManyBytes;

/// The caller no longer needs the connection.
#[derive(Debug, thiserror::Error)]
#[error("cancelled")]
struct Cancelled;

/// A blocking socket that is used with a deadline. The timeouts and flags of the socket are not changed: the engine sets them,
/// and another thread may use the socket at the same time.
pub(crate) struct BoundedSocket<'a> {
    fd: BorrowedFd<'a>,
    time: Duration,
    deadline: Instant,
    bytes: usize,
    /// Number of bytes that may still be read. It starts at `bytes`.
    left: usize,
    wake_fd: Option<BorrowedFd<'a>>,
    is_cancelled: &'a dyn Fn() -> bool,
    has_sent: bool,
}

/// Returns the missing part of a handshake that timed out. `unacknowledged` returns the number of unacknowledged sent bytes.
fn missing(has_sent: bool, unacknowledged: impl FnOnce() -> u32) -> Missing {
    match has_sent {
        false => Missing::Start,
        true if unacknowledged() > 0 => Missing::Acknowledgement,
        true => Missing::Answer,
    }
}

impl<'a> BoundedSocket<'a> {
    /// Limits the use of `fd` to `time` and to `bytes` received bytes. Reads and writes fail once `is_cancelled` returns true.
    /// `is_cancelled` is also checked when `wake_fd` becomes readable.
    pub(crate) fn new(
        fd: BorrowedFd<'a>,
        time: Duration,
        bytes: usize,
        wake_fd: Option<BorrowedFd<'a>>,
        is_cancelled: &'a dyn Fn() -> bool,
    ) -> Self {
        Self {
            fd,
            time,
            deadline: Instant::now() + time,
            bytes,
            left: bytes,
            wake_fd,
            is_cancelled,
            has_sent: false,
        }
    }

    /// Converts the error of a read or write to an error of the handshake.
    pub(crate) fn explain(&self, error: io::Error) -> TlsError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => TlsError::Closed,
            io::ErrorKind::TimedOut => TlsError::TimedOut {
                after: self.time,
                missing: missing(self.has_sent, || unacknowledged(self.fd).unwrap_or(0)),
            },
            _ if error
                .get_ref()
                .is_some_and(|inner| inner.is::<TooManyBytes>()) =>
            {
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
            if (self.is_cancelled)() {
                return Err(io::Error::other(Cancelled));
            }
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut fds = vec![PollFd::from_borrowed_fd(self.fd, flags)];
            fds.extend(
                self.wake_fd
                    .iter()
                    .map(|wake_fd| PollFd::new(wake_fd, PollFlags::IN)),
            );
            match poll(&mut fds, Some(&timeout)) {
                Ok(_) if !fds[0].revents().is_empty() => return Ok(()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Read for BoundedSocket<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::Error::other(TooManyBytes));
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
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use hotlift_mem::is_readable;

    use super::*;

    #[test]
    fn a_late_handshake_names_the_missing_message_and_the_mtu_if_that_may_be_the_cause() {
        for (has_sent, unacknowledged, expected) in [
            (false, 0, "the other side sent nothing"),
            (
                true,
                900,
                "does not acknowledge sent data; the path may drop full-size packets (check the MTU)",
            ),
            (true, 0, "the other side does not answer"),
        ] {
            let missing = missing(has_sent, || unacknowledged).to_string();
            assert!(missing.contains(expected), "{missing}");
            assert_eq!(missing.contains("MTU"), has_sent, "{missing}");
        }
    }

    #[test]
    fn a_wait_ends_by_its_wake_fd_or_by_arriving_bytes() {
        let year = Duration::from_secs(365 * 86_400);
        let is_cancelled = AtomicBool::new(false);
        let (wake_fd, ends) = io::pipe().unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let wait = || {
                let is_cancelled = || is_cancelled.load(Ordering::Acquire);
                let wake_fd = Some(wake_fd.as_fd());
                let mut socket = BoundedSocket::new(ours.as_fd(), year, 2, wake_fd, &is_cancelled);
                [socket.read(&mut [0; 1]), socket.read(&mut [0; 1])].map(Result::ok)
            };
            let waits = scope.spawn(wait);
            theirs.write_all(b"1").unwrap();
            // The first read may not have begun: it is cancelled only after the byte has arrived.
            while is_readable(ours.as_fd()) {
                thread::yield_now();
            }
            is_cancelled.store(true, Ordering::Release);
            drop(ends);
            assert_eq!(waits.join().unwrap(), [Some(1), None]);
        });
    }
}
