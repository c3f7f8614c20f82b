//! Listener: accepts connections from a socket, or from a queue that another listener fills.

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hotlift_mem::lock;

use super::admitted::Admitted;
use super::connection_queue::{ConnectionSender, QueueListener};
use crate::transport::{
    Address, Stream, TransportError, UnixSocketFile, listen_tcp, listen_unix, wait_readable,
};

/// Accepts the connections of one migration.
#[derive(Debug)]
pub struct Listener {
    bound: Bound,
    /// Connections of the next migration, which arrived during the current one.
    returned: Mutex<VecDeque<Admitted>>,
}

#[derive(Debug)]
enum Bound {
    Tcp(TcpListener),
    /// Socket with its file, which is removed on drop.
    Unix(UnixSocketFile),
    Queue(QueueListener),
}

impl Address {
    /// Listens on this address.
    ///
    /// # Errors
    /// [`TransportError::Listen`] with the system's error.
    pub fn listen(&self) -> Result<Listener, TransportError> {
        let listening = match self {
            Self::Tcp { host, port } => listen_tcp(host, *port).map(Bound::Tcp),
            Self::Unix { path } => listen_unix(path, None).map(Bound::Unix),
        };
        let bound = listening.map_err(|source| TransportError::Listen {
            uri: self.to_string(),
            source,
        })?;
        Ok(Listener {
            bound,
            returned: Mutex::default(),
        })
    }
}

impl Listener {
    /// Creates a listener without a socket, and a sender. The listener accepts the connections that the sender queues after
    /// their TLS handshakes. `is_local` is true if all connections come from this host.
    ///
    /// # Errors
    /// If the system has no file descriptor left.
    pub fn queue(is_local: bool) -> io::Result<(Self, ConnectionSender)> {
        let (handed, sender) = QueueListener::new(is_local)?;
        let listener = Self {
            bound: Bound::Queue(handed),
            returned: Mutex::default(),
        };
        Ok((listener, sender))
    }

    /// Returns the address to which a source connects, with the port if the system has chosen it.
    ///
    /// # Errors
    /// The system's error; `Unsupported` for a listener without a socket ([`Listener::queue`]).
    pub fn address(&self) -> io::Result<Address> {
        Ok(match &self.bound {
            Bound::Tcp(listener) => {
                let local = listener.local_addr()?;
                let ip = local.ip();
                let host = if ip.is_unspecified() {
                    String::new()
                } else {
                    ip.to_string()
                };
                Address::Tcp {
                    host,
                    port: local.port(),
                }
            }
            Bound::Unix(file) => Address::Unix {
                path: file.path().to_owned(),
            },
            Bound::Queue(_) => return Err(io::ErrorKind::Unsupported.into()),
        })
    }

    /// Returns true if all connections come from this host: no lost TCP segment can delay a handshake.
    pub fn is_local(&self) -> bool {
        match &self.bound {
            Bound::Tcp(_) => false,
            Bound::Unix(_) => true,
            Bound::Queue(handed) => handed.is_local(),
        }
    }

    /// Returns true if the listener's address is reachable only from this host. A local proxy may nevertheless forward
    /// connections of other hosts.
    pub fn is_loopback(&self) -> bool {
        match &self.bound {
            Bound::Tcp(listener) => {
                let address = listener.local_addr();
                address.is_ok_and(|address| address.ip().to_canonical().is_loopback())
            }
            Bound::Unix(_) | Bound::Queue(_) => false,
        }
    }

    /// Closes a listener without a socket. Returns the connections that were not accepted or were put back: they belong to a
    /// later migration.
    pub fn close(&self) -> Vec<Admitted> {
        let mut rest: Vec<_> = self.returned().drain(..).collect();
        if let Bound::Queue(handed) = &self.bound {
            rest.extend(handed.close());
        }
        rest
    }

    /// Returns true if another listener accepts the connections first, and sends them to this one.
    pub fn is_queue(&self) -> bool {
        matches!(self.bound, Bound::Queue(_))
    }

    /// Keeps a connection that belongs to the next migration, until the next [`Listener::accept`].
    pub fn put_back(&self, one: Admitted) {
        // The next migration has another token, so the connection must present that one.
        let has_passed = false;
        self.returned().push_back(Admitted { has_passed, ..one });
    }

    /// Returns true if the next [`Listener::accept`] returns a connection that was put back.
    pub(crate) fn has_returned(&self) -> bool {
        !self.returned().is_empty()
    }

    fn returned(&self) -> MutexGuard<'_, VecDeque<Admitted>> {
        lock(&self.returned)
    }

    /// Accepts a connection without waiting; `now` is the current time. Returns `None` if no connection has arrived.
    ///
    /// # Errors
    /// The system's error.
    pub fn accept(&self, now: Instant) -> io::Result<Option<Admitted>> {
        let known = match (self.returned().pop_front(), &self.bound) {
            (Some(returned), _) => Some(returned),
            (None, Bound::Queue(handed)) => handed.take(),
            (None, _) if !wait_readable(self.as_fd(), Duration::ZERO)? => None,
            (None, Bound::Tcp(listener)) => {
                let stream = Stream::of_tcp(listener.accept()?.0)?;
                Some(Admitted::new(stream, now))
            }
            (None, Bound::Unix(file)) => {
                let stream = file.listener().accept()?.0.into();
                Some(Admitted::new(stream, now))
            }
        };
        // The time limit of this listener starts now.
        Ok(known.map(|one| Admitted { since: now, ..one }))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.bound {
            Bound::Tcp(listener) => listener.as_fd(),
            Bound::Unix(file) => file.listener().as_fd(),
            Bound::Queue(handed) => handed.as_fd(),
        }
    }
}
