//! Connections as they are accepted; with TLS, once their handshake is done.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift_tls::Tls;

use super::handshakes::{Accepted, Handshakes};
use crate::transport::Listener;

/// Accepts the connections of a listener, without waiting.
pub struct Acceptor<'a> {
    listener: &'a Listener,
    /// Every connection is a TLS one.
    handshakes: Option<Handshakes>,
}

impl<'a> Acceptor<'a> {
    /// With `tls`, of TLS connections only.
    ///
    /// # Errors
    /// The system gives no file descriptors.
    pub fn new(listener: &'a Listener, tls: Option<Arc<Tls>>) -> io::Result<Self> {
        Ok(Self {
            listener,
            handshakes: tls.map(Handshakes::new).transpose()?,
        })
    }

    /// Whose connections these are.
    #[must_use]
    pub fn listener(&self) -> &'a Listener {
        self.listener
    }

    /// What to poll for reading: one of them is readable when [`Self::take`] has something to do.
    pub fn polled(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        // Whoever there is no room for waits in the kernel's queue.
        let listener = self.has_room().then(|| self.listener.as_fd());
        let ended = self.handshakes.iter().map(|all| all.wake().as_fd());
        listener.into_iter().chain(ended)
    }

    /// Shortens a wait for what [`Self::polled`] shows, if something else may come first.
    #[must_use]
    pub fn shortened(&self, wait: Duration) -> Duration {
        match &self.handshakes {
            // A place that becomes free by time alone shows at no descriptor.
            Some(all) if !self.has_room() => wait.min(all.places.until_room(Instant::now())),
            _ => wait,
        }
    }

    /// Whether [`Self::take`] has something to do that no poll shows.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.has_room() && self.listener.has_returned()
    }

    /// When the connections were accepted whose handshakes are under way.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = Instant> + '_ {
        self.handshakes.iter().flat_map(|all| all.places.since())
    }

    /// Whether a connection that has come is accepted now; if not, it waits in the kernel's queue until a handshake ends or
    /// has to give way.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let has_room = |all: &Handshakes| all.places.has_room(Instant::now());
        self.handshakes.as_ref().is_none_or(has_room)
    }

    /// Takes what has come, without waiting.
    ///
    /// # Errors
    /// The system's reason why no connection can be accepted.
    pub fn take(&mut self) -> io::Result<Vec<Accepted>> {
        let mut accepted = match &mut self.handshakes {
            Some(handshakes) => handshakes.take_ended(),
            None => Vec::new(),
        };
        if !self.has_room() {
            return Ok(accepted);
        }
        // Also with one that has ended: a QEMU 7.2 says nothing more on main until its channels have had their handshakes.
        let stream = match self.listener.accept(Duration::ZERO) {
            // One that has gone before it was accepted is no reason to end anything.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => None,
            // Nor are those lost that have ended: the next call fails.
            Err(_) if !accepted.is_empty() => None,
            stream => stream?,
        };
        let since = Instant::now();
        match (stream, &mut self.handshakes) {
            // One that was put back has had its handshake.
            (Some(stream), Some(handshakes)) if stream.is_plain() => {
                handshakes.begin(stream, since)?;
            }
            (Some(stream), _) => accepted.push((Ok(stream), since)),
            (None, _) => {}
        }
        Ok(accepted)
    }
}
