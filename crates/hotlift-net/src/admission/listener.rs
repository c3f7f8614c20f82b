//! Where connections come in: a socket that listens, or a queue that another door fills.

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hotlift_mem::lock;

use super::admitted::Admitted;
use super::handed::{Giver, Handed};
use crate::transport::{
    Address, Stream, TransportError, UnixSocketFile, listen_tcp, listen_unix, wait_readable,
};

/// Accepts the connections of one migration.
#[derive(Debug)]
pub struct Listener {
    bound: Bound,
    /// Connections of the next migration that came while one was under way.
    returned: Mutex<VecDeque<Admitted>>,
}

#[derive(Debug)]
enum Bound {
    Tcp(TcpListener),
    /// The socket's file goes when the listener does.
    Unix(UnixSocketFile),
    Handed(Handed),
}

impl Address {
    /// Starts to listen.
    ///
    /// # Errors
    /// [`TransportError::Listen`] with the system's reason.
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
    /// A listener without a socket: it accepts the connections that the giver gives it. Those with TLS have had
    /// their handshakes. `is_local` is true if all are from this host.
    ///
    /// # Errors
    /// The system gives no file descriptor.
    pub fn handed(is_local: bool) -> io::Result<(Self, Giver)> {
        let (handed, giver) = Handed::new(is_local)?;
        let listener = Self {
            bound: Bound::Handed(handed),
            returned: Mutex::default(),
        };
        Ok((listener, giver))
    }

    /// The address that a source connects to (with the port that the system chose).
    ///
    /// # Errors
    /// The system's reason; `Unsupported` if it has none ([`Listener::handed`]).
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
            Bound::Handed(_) => return Err(io::ErrorKind::Unsupported.into()),
        })
    }

    /// Whether it listens on this host only, where a handshake loses no segment.
    pub fn is_local(&self) -> bool {
        match &self.bound {
            Bound::Tcp(_) => false,
            Bound::Unix(_) => true,
            Bound::Handed(handed) => handed.is_local(),
        }
    }

    /// Whether it listens at an address that only this host reaches, though a proxy here may pass on another host's connections.
    pub fn is_loopback(&self) -> bool {
        match &self.bound {
            Bound::Tcp(listener) => {
                let address = listener.local_addr();
                address.is_ok_and(|address| address.ip().to_canonical().is_loopback())
            }
            Bound::Unix(_) | Bound::Handed(_) => false,
        }
    }

    /// Takes no more connections, and gives back those that were not accepted and those that were put back: they are of a
    /// later migration. Of a listener that is handed its connections.
    pub fn close(&self) -> Vec<Admitted> {
        let mut rest: Vec<_> = self.returned().drain(..).collect();
        if let Bound::Handed(handed) = &self.bound {
            rest.extend(handed.close());
        }
        rest
    }

    /// Returns true if another door accepts its connections.
    pub fn is_handed(&self) -> bool {
        matches!(self.bound, Bound::Handed(_))
    }

    /// Keeps a connection of the next migration for the next [`Listener::accept`].
    pub fn put_back(&self, one: Admitted) {
        // The next migration has a pass of its own.
        let has_passed = false;
        self.returned().push_back(Admitted { has_passed, ..one });
    }

    /// Whether [`Listener::accept`] has a connection that was put back.
    pub(crate) fn has_returned(&self) -> bool {
        !self.returned().is_empty()
    }

    fn returned(&self) -> MutexGuard<'_, VecDeque<Admitted>> {
        lock(&self.returned)
    }

    /// Accepts a connection at `now`, or returns `None` if none has come.
    ///
    /// # Errors
    /// The system's reason.
    pub fn accept(&self, now: Instant) -> io::Result<Option<Admitted>> {
        let known = match (self.returned().pop_front(), &self.bound) {
            (Some(returned), _) => Some(returned),
            (None, Bound::Handed(handed)) => handed.take(),
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
        // It waits here from now on.
        Ok(known.map(|one| Admitted { since: now, ..one }))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.bound {
            Bound::Tcp(listener) => listener.as_fd(),
            Bound::Unix(file) => file.listener().as_fd(),
            Bound::Handed(handed) => handed.as_fd(),
        }
    }
}
