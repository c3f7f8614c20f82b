//! The sockets of a proxy: listening, connecting, and ending connections.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, shutdown};

use super::Ending;
use crate::namespace::Namespace;

/// Socket on which a proxy listens.
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    pub(super) fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Unix(listener) => listener.accept().map(|(stream, _)| stream.into()),
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| of_tcp(stream)),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// Address that a proxy connects to.
pub(super) enum Target {
    Unix(PathBuf),
    /// Host and port. The network namespace is the given one, or that of this process.
    Tcp(String, u16, Option<Namespace>),
}

impl Target {
    pub(super) fn connect(&self) -> Option<OwnedFd> {
        match self {
            Self::Unix(path) => UnixStream::connect(path).ok().map(OwnedFd::from),
            Self::Tcp(host, port, namespace) => {
                let connect = || TcpStream::connect((host.as_str(), *port));
                let connected = match namespace {
                    Some(namespace) => namespace.within(connect).ok()?,
                    None => connect(),
                };
                connected.ok().map(of_tcp)
            }
        }
    }
}

fn of_tcp(stream: TcpStream) -> OwnedFd {
    let _ = stream.set_nodelay(true);
    stream.into()
}

/// Ends a connection with FIN or RST. Does nothing if the connection has already ended.
pub(super) fn end(socket: &OwnedFd, how: Ending) {
    if how == Ending::Reset {
        // Linux sends RST when a connection is dissolved this way. A UNIX socket has no reset.
        let _ = rustix::net::connect_unspec(socket);
    }
    let _ = shutdown(socket, Shutdown::Both);
}

/// Ends the outgoing direction of a connection. The incoming direction stays open.
pub(super) fn end_half(socket: &OwnedFd) {
    let _ = shutdown(socket, Shutdown::Write);
}

/// Waits until `socket` has data or has ended. Returns false if `ends` is readable and `socket` has no data.
pub(super) fn has_data(socket: &impl AsFd, ends: &OwnedFd) -> bool {
    let mut fds = [
        PollFd::new(socket, PollFlags::IN),
        PollFd::new(ends, PollFlags::IN),
    ];
    loop {
        match poll(&mut fds, None) {
            Ok(_) => return !fds[0].revents().is_empty(),
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Returns true if the peer of a half-closed socket has closed both directions.
pub(super) fn is_gone(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&Timespec::default()));
    polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

/// Writes all bytes. Returns false if the reader has closed the connection.
pub(super) fn write_all(to: &OwnedFd, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match rustix::net::send(to, bytes, SendFlags::NOSIGNAL) {
            Ok(length) => bytes = &bytes[length..],
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}
