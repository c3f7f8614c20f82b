//! Reads a socket line by line, with a deadline for each line and a limit of its length.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Number of bytes requested by each read.
const CHUNK: usize = 16 << 10;

/// A connected socket.
#[derive(Debug)]
pub enum Socket {
    /// UNIX socket.
    Unix(UnixStream),
    /// TCP socket.
    Tcp(TcpStream),
}

/// A connection for lines of text.
pub trait Connection {
    /// Sets the timeout of all later writes. `timeout` must not be zero.
    ///
    /// # Errors
    /// The system's reason.
    fn set_write_timeout(&self, timeout: Duration) -> io::Result<()>;

    /// Reads available bytes. Waits up to `timeout`, which must not be zero, for the first byte.
    ///
    /// # Errors
    /// The system's error; `TimedOut` or `WouldBlock` after `timeout`.
    fn read(&self, buffer: &mut [u8], timeout: Duration) -> io::Result<usize>;

    /// Writes `bytes` or a part of them. Returns the number of written bytes.
    ///
    /// # Errors
    /// The system's error.
    fn write(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Returns true if a write can be repeated after a timeout. If false, the connection cannot be written to after a timeout.
    fn resumes(&self) -> bool {
        true
    }
}

impl Connection for Socket {
    fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_write_timeout(Some(timeout)),
            Self::Tcp(stream) => stream.set_write_timeout(Some(timeout)),
        }
    }

    fn read(&self, buffer: &mut [u8], timeout: Duration) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(Some(timeout))?,
            Self::Tcp(stream) => stream.set_read_timeout(Some(timeout))?,
        }
        let mut socket = self;
        Read::read(&mut socket, buffer)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut socket = self;
        Write::write(&mut socket, bytes)
    }
}

/// Returns the time until `deadline`, but at least a millisecond: zero would mean no timeout.
fn left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    left.max(Duration::from_millis(1))
}

impl Socket {
    /// Duplicates the handle of the connection.
    ///
    /// # Errors
    /// The system's error, such as too many open files.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
        })
    }

    /// Shuts down both directions. Threads that wait in a read or write return.
    pub fn shut_down(&self) {
        self.shut(Shutdown::Both);
    }

    pub(crate) fn shut(&self, how: Shutdown) {
        // Fails if the peer has closed the connection; then no shutdown is necessary.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(how),
            Self::Tcp(stream) => stream.shutdown(how),
        };
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Read for &Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => (&*stream).read(buffer),
            Socket::Tcp(stream) => (&*stream).read(buffer),
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => (&*stream).write(buffer),
            Socket::Tcp(stream) => (&*stream).write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Result of the wait for a line.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A complete line, without its line end.
    Whole(Vec<u8>),
    /// More bytes than the limit arrived without a line end.
    TooLong,
    /// The peer has closed or reset the connection.
    Closed,
    /// The deadline passed. The received part of the line is kept for the next read.
    Late,
}

/// A connection and the received part of the next line.
#[derive(Debug)]
pub struct Lines<C = Socket> {
    connection: C,
    limit: usize,
    buffer: Vec<u8>,
    /// Length of the prefix of `buffer` that was searched and contains no line end.
    searched: usize,
}

impl<C: Connection> Lines<C> {
    /// Creates a reader of lines. If a line does not end within `limit` bytes, a read returns [`Line::TooLong`].
    #[must_use]
    pub fn new(connection: C, limit: usize) -> Self {
        Self {
            connection,
            limit,
            buffer: Vec::new(),
            searched: 0,
        }
    }

    /// Returns the connection.
    pub fn connection(&self) -> &C {
        &self.connection
    }

    /// Returns the connection, and the bytes received after the last returned line.
    #[must_use]
    pub fn into_parts(self) -> (C, Vec<u8>) {
        (self.connection, self.buffer)
    }

    /// Returns the bytes received after the last returned line. These bytes may contain further complete lines.
    #[must_use]
    pub fn buffered(&self) -> &[u8] {
        &self.buffer
    }

    /// Reads the next line.
    ///
    /// # Errors
    /// The system's error. A reset connection is not an error, but [`Line::Closed`].
    pub fn read(&mut self, deadline: Instant) -> io::Result<Line> {
        // The deadline is also checked after each read: a peer that sends single bytes must not extend it.
        let mut is_over = false;
        loop {
            let fresh = &self.buffer[self.searched..];
            if let Some(end) = fresh.iter().position(|&byte| byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                self.searched = 0;
                line.pop();
                return Ok(Line::Whole(line));
            }
            self.searched = self.buffer.len();
            if self.searched > self.limit {
                return Ok(Line::TooLong);
            }
            if is_over {
                return Ok(Line::Late);
            }
            let mut chunk = [0; CHUNK];
            match self.connection.read(&mut chunk, left(deadline)) {
                Ok(0) => return Ok(Line::Closed),
                Ok(length) => {
                    self.buffer.extend_from_slice(&chunk[..length]);
                    is_over = Instant::now() >= deadline;
                }
                Err(error) if is_late(&error) => {
                    if Instant::now() >= deadline {
                        return Ok(Line::Late);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(Line::Closed);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes `line`, which must include its line end. Returns false if `deadline` passed first, or if a write timed out and
    /// cannot be repeated.
    ///
    /// # Errors
    /// The system's error.
    pub fn write(&self, line: &[u8], deadline: Instant) -> io::Result<bool> {
        let mut rest = line;
        while !rest.is_empty() {
            self.connection.set_write_timeout(left(deadline))?;
            match self.connection.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(length) => rest = &rest[length..],
                Err(error) if is_late(&error) => {
                    if !self.connection.resumes() || Instant::now() >= deadline {
                        return Ok(false);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

fn is_late(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}
