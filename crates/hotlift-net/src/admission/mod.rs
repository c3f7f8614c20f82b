//! Who connects: the one door of all listeners of Hotlift's.
//!
//! | module | |
//! |---|---|
//! | `listener` | where connections come in |
//! | `handed` | the queue between two doors |
//! | `places` | which handshakes may be under way, by the time alone |
//! | `handshakes` | a thread for each handshake |
//! | `room` | connections that have not stated yet what they are, their number and time limited |
//! | `limits` | the number and the time of each kind of connection |
//! | `head` | what the first bytes of a connection state |
//! | `admitted` | a connection that was let in, with all that is known of it |
//! | `pass` | what opens the connections that a conversation has announced |

mod admitted;
mod handed;
mod handshakes;
mod head;
pub mod limits;
mod listener;
mod pass;
mod places;
mod room;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift_tls::Tls;

pub use admitted::Admitted;
pub use handed::Giver;
pub use handshakes::Refused;
use handshakes::{Accepted, Handshakes};
pub use head::{BROKEN, Head, NO_STREAM, RESUMED_MAGIC, peek_head, read_head};
use limits::Limits;
pub use listener::Listener;
pub use pass::Pass;
pub use room::Room;

/// Connections of a listener, from their arrival until each has stated what it is.
pub struct Admission<'a, S> {
    listener: &'a Listener,
    /// Every connection is a TLS one.
    handshakes: Option<Handshakes>,
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
    /// Those of `listener`, which wait by `limits`; with `tls`, TLS connections only.
    ///
    /// # Errors
    /// The system gives no descriptors.
    pub fn new(listener: &'a Listener, tls: Option<Arc<Tls>>, limits: Limits) -> io::Result<Self> {
        Ok(Self {
            listener,
            handshakes: tls.map(Handshakes::new).transpose()?,
            room: Room::new(limits)?,
        })
    }

    /// Returns whose connections these are.
    pub fn listener(&self) -> &'a Listener {
        self.listener
    }

    /// Returns what to poll for reading.
    pub fn polled(&self, now: Instant) -> impl Iterator<Item = BorrowedFd<'_>> {
        // A connection without a place for its handshake waits in the kernel's queue.
        let listener = self.has_place(now).then(|| self.listener.as_fd());
        let ended = self.handshakes.iter().map(|all| all.wake().as_fd());
        listener
            .into_iter()
            .chain(ended)
            .chain([self.room.polled()])
    }

    /// Shortens a wait for what [`Self::polled`] shows to the moment when there is something to do without that.
    #[must_use]
    pub fn shortened(&self, wait: Duration, now: Instant) -> Duration {
        let wait = match &self.handshakes {
            Some(all) if !self.has_place(now) => wait.min(all.places.until_room(now)),
            _ if self.listener.has_returned() => Duration::ZERO,
            _ => wait,
        };
        self.room.shortened(wait, now)
    }

    /// Returns when the connections were accepted that have not stated what they are.
    pub fn since(&self) -> impl Iterator<Item = Instant> + '_ {
        let waiting = self.room.iter().map(|(_, since)| since);
        let under_way = self.handshakes.iter().flat_map(|all| all.places.since());
        waiting.chain(under_way)
    }

    /// Returns true if a connection that has come is accepted now; if not, it waits in the kernel's queue until a handshake ends
    /// or has to give way.
    fn has_place(&self, now: Instant) -> bool {
        let has_room = |all: &Handshakes| all.places.has_room(now);
        self.handshakes.as_ref().is_none_or(has_room)
    }

    /// Lets in what has come by `now`, as `connection` makes it of what is admitted, without waiting; those that are not in.
    ///
    /// # Errors
    /// The system's reason why no connection can be accepted.
    pub fn accept(
        &mut self,
        now: Instant,
        connection: impl Fn(Admitted) -> S,
    ) -> io::Result<Vec<Entered<S>>> {
        let mut not_in = Vec::new();
        for one in self.take(now)? {
            match one {
                Ok(one) => {
                    let since = one.since;
                    let left = self.room.enter(connection(one), since)?;
                    not_in.extend(left.map(Entered::Left));
                }
                Err(refused) => not_in.push(Entered::Refused(refused)),
            }
        }
        Ok(not_in)
    }

    /// Takes what has come by `now`, and what has ended its handshake.
    fn take(&mut self, now: Instant) -> io::Result<Vec<Accepted>> {
        let mut accepted = match &mut self.handshakes {
            Some(handshakes) => handshakes.take_ended(),
            None => Vec::new(),
        };
        if !self.has_place(now) {
            return Ok(accepted);
        }
        // Also with one that has ended: a QEMU 7.2 says nothing more on main until its channels have had their handshakes.
        let one = match self.listener.accept(now) {
            // One that has gone before it was accepted is no reason to end anything.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => None,
            // Nor are those lost that have ended: the next call fails.
            Err(_) if !accepted.is_empty() => None,
            one => one?,
        };
        match (one, &mut self.handshakes) {
            // One that was put back has had its handshake.
            (Some(one), Some(handshakes)) if one.stream.is_plain() => handshakes.begin(one, now)?,
            (Some(one), _) => accepted.push(Ok(one)),
            (None, _) => {}
        }
        Ok(accepted)
    }
}
