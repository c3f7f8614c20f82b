//! Who connects: the one door of all listeners of Hotlift's.
//!
//! | module | |
//! |---|---|
//! | `acceptor` | connections as they are accepted; with TLS, after their handshakes |
//! | `places` | which handshakes may be under way, by the time alone |
//! | `handshakes` | a thread for each handshake |
//! | `room` | connections that have not stated yet what they are, their number and time limited |
//! | `head` | what the first bytes of a connection state |
//! | `pass` | what opens the connections that a conversation has announced |
//! | `strangers` | connections that were turned away, counted |

mod acceptor;
mod handshakes;
pub(crate) mod head;
pub(crate) mod pass;
mod places;
mod room;
pub(crate) mod strangers;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

pub use acceptor::Acceptor;
pub use handshakes::{Accepted, Refused};
pub use head::{Head, peek_head};
pub use room::{Limits, Room};

use crate::transport::{Listener, Stream};

/// Connections of a listener, from their arrival until each has stated what it is.
pub struct Admission<'a, S> {
    acceptor: Acceptor<'a>,
    /// Those that have not stated it.
    pub room: Room<S>,
}

/// What became of a connection that has come.
pub enum Entered<S> {
    /// It was not let in.
    Refused(Refused),
    /// It left the room for one more.
    Left(S),
}

impl<'a, S: AsFd> Admission<'a, S> {
    /// Those of `acceptor`, which wait by `limits`.
    ///
    /// # Errors
    /// The system gives no descriptor.
    pub fn new(acceptor: Acceptor<'a>, limits: Limits) -> io::Result<Self> {
        let room = Room::new(limits)?;
        Ok(Self { acceptor, room })
    }

    /// Returns whose connections these are.
    pub fn listener(&self) -> &'a Listener {
        self.acceptor.listener()
    }

    /// Returns what to poll for reading.
    pub fn polled(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.acceptor.polled().chain([self.room.polled()])
    }

    /// Shortens a wait for what [`Self::polled`] shows to the moment when there is something to do without that.
    #[must_use]
    pub fn shortened(&self, wait: Duration, now: Instant) -> Duration {
        match self.acceptor.is_ready() {
            true => Duration::ZERO,
            false => self.room.shortened(self.acceptor.shortened(wait), now),
        }
    }

    /// Returns when the connections were accepted that have not stated what they are.
    pub(crate) fn since(&self) -> impl Iterator<Item = Instant> + '_ {
        let waiting = self.room.iter().map(|(_, since)| since);
        waiting.chain(self.acceptor.under_way())
    }

    /// Lets in what has come, as `connection` makes it of a stream, without waiting; those that are not in.
    ///
    /// # Errors
    /// The system's reason why no connection can be accepted.
    pub fn accept(&mut self, connection: impl Fn(Stream) -> S) -> io::Result<Vec<Entered<S>>> {
        let mut not_in = Vec::new();
        for (stream, since) in self.acceptor.take()? {
            match stream {
                Ok(stream) => {
                    let left = self.room.enter(connection(stream), since)?;
                    not_in.extend(left.map(Entered::Left));
                }
                Err(refused) => not_in.push(Entered::Refused(refused)),
            }
        }
        Ok(not_in)
    }
}
