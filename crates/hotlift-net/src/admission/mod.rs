//! Admission: accepts connections, does their TLS handshakes, and classifies them. All of Hotlift's listeners use it.
//!
//! | module | |
//! |---|---|
//! | `listener` | accepts from a socket or from a queue |
//! | `connection_queue` | the queue between two listeners |
//! | `handshake_slots` | slots of concurrent handshakes, without I/O |
//! | `handshakes` | a thread for each TLS handshake |
//! | `pending` | unclassified connections, limited in number and time |
//! | `limits` | the number and time limits of each kind of connection |
//! | `connection_class` | classification of a connection by its first bytes |
//! | `admitted` | an admitted connection and its classification |
//! | `token` | the token that binds connections to a conversation |

mod admitted;
mod connection_class;
mod connection_queue;
mod handshake_slots;
mod handshakes;
pub mod limits;
mod listener;
mod pending;
mod token;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift_tls::Tls;

pub use admitted::Admitted;
pub use connection_class::{
    BROKEN, ConnectionClass, NO_STREAM, RESUMED_MAGIC, peek_class, read_class,
};
pub use connection_queue::ConnectionSender;
pub use handshakes::Refused;
use handshakes::{Accepted, Handshakes};
use limits::Limits;
pub use listener::Listener;
pub use pending::PendingConnections;
pub use token::ConnectionToken;

/// Connections of a listener between their arrival and their classification.
pub struct Admission<'a, S> {
    listener: &'a Listener,
    /// Handshakes in progress; `None` without TLS.
    handshakes: Option<Handshakes>,
    /// Connections that are not classified yet.
    pub pending: PendingConnections<S>,
}

/// A connection that was refused, or was admitted and then closed for a newer one.
pub enum Rejected<S> {
    /// The TLS handshake of the connection failed.
    Refused(Refused),
    /// The connection was replaced by a newer one, because too many were pending.
    Replaced(S),
}

impl<'a, S: AsFd> Admission<'a, S> {
    /// Admits the connections of `listener` within `limits`. With `tls`, admits only TLS connections.
    ///
    /// # Errors
    /// If the system has no descriptors left.
    pub fn new(listener: &'a Listener, tls: Option<Arc<Tls>>, limits: Limits) -> io::Result<Self> {
        Ok(Self {
            listener,
            handshakes: tls.map(Handshakes::new).transpose()?,
            pending: PendingConnections::new(limits)?,
        })
    }

    /// Returns the listener.
    pub fn listener(&self) -> &'a Listener {
        self.listener
    }

    /// Returns the descriptors to poll for reading.
    pub fn polled(&self, now: Instant) -> impl Iterator<Item = BorrowedFd<'_>> {
        // While no handshake slot is available, new connections wait in the accept queue of the kernel.
        let listener = self.can_accept(now).then(|| self.listener.as_fd());
        let ended = self.handshakes.iter().map(|all| all.wake().as_fd());
        listener
            .into_iter()
            .chain(ended)
            .chain([self.pending.polled()])
    }

    /// Shortens the duration `wait` of a poll on [`Self::polled`], so that it ends at the next action that no descriptor
    /// reports.
    #[must_use]
    pub fn shortened(&self, wait: Duration, now: Instant) -> Duration {
        let wait = match &self.handshakes {
            Some(all) if !self.can_accept(now) => wait.min(all.slots.until_room(now)),
            _ if self.listener.has_returned() => Duration::ZERO,
            _ => wait,
        };
        self.pending.shortened(wait, now)
    }

    /// Returns the accept times of the connections that are not classified yet.
    pub fn since(&self) -> impl Iterator<Item = Instant> + '_ {
        let waiting = self.pending.iter().map(|(_, since)| since);
        let under_way = self.handshakes.iter().flat_map(|all| all.slots.since());
        waiting.chain(under_way)
    }

    /// Returns true if a new connection can be accepted now. Otherwise new connections wait in the accept queue of the kernel,
    /// until a handshake ends or may be interrupted.
    fn can_accept(&self, now: Instant) -> bool {
        let has_room = |all: &Handshakes| all.slots.has_room(now);
        self.handshakes.as_ref().is_none_or(has_room)
    }

    /// Accepts the next connection and collects finished handshakes, without waiting. `connection` converts each admitted
    /// connection. Returns the rejected connections.
    ///
    /// # Errors
    /// The system's error if accepting failed.
    pub fn accept(
        &mut self,
        now: Instant,
        connection: impl Fn(Admitted) -> S,
    ) -> io::Result<Vec<Rejected<S>>> {
        let mut rejected = Vec::new();
        for one in self.take(now)? {
            match one {
                Ok(one) => {
                    let since = one.since;
                    let left = self.pending.enter(connection(one), since)?;
                    rejected.extend(left.map(Rejected::Replaced));
                }
                Err(refused) => rejected.push(Rejected::Refused(refused)),
            }
        }
        Ok(rejected)
    }

    /// Accepts the next connection if a handshake slot is available, and collects the finished handshakes.
    fn take(&mut self, now: Instant) -> io::Result<Vec<Accepted>> {
        let mut accepted = match &mut self.handshakes {
            Some(handshakes) => handshakes.take_ended(),
            None => Vec::new(),
        };
        if !self.can_accept(now) {
            return Ok(accepted);
        }
        // A connection is also accepted if a handshake has finished. QEMU 7.2 sends nothing more on main until the handshakes
        // of its channels are complete.
        let one = match self.listener.accept(now) {
            // If the client closed its connection before the accept, this is not an error.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => None,
            // The finished handshakes are returned now. The next call returns the error.
            Err(_) if !accepted.is_empty() => None,
            one => one?,
        };
        match (one, &mut self.handshakes) {
            // A connection that was put back has already completed its handshake.
            (Some(one), Some(handshakes)) if one.stream.is_plain() => handshakes.begin(one, now)?,
            (Some(one), _) => accepted.push(Ok(one)),
            (None, _) => {}
        }
        Ok(accepted)
    }
}
