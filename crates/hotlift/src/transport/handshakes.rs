//! TLS handshakes of connections that were accepted, each in a thread of its own: a stranger's may take seconds.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hotlift_tls::{Tls, TlsError};
use rustix::net::RecvFlags;

use crate::transport::{Stream, wait_readable};

/// Handshakes that may be under way. Others wait in the listener's queue, where they cost this process nothing.
const UNDER_WAY: usize = 64;

/// How often it is looked, while all places are taken, whether a handshake has had its time.
const FULL: Duration = Duration::from_millis(100);

/// For how long a handshake cannot be pushed out by a new connection when all places are taken: two round-trip times of any
/// network, and some work. If none were pushed out, as many silent connections would keep everybody out for ten seconds.
const PATIENCE: Duration = Duration::from_secs(1);

/// The same where one host has more than half of the places. A Hotlift makes its connections one after the other.
const PATIENCE_WITH_A_CROWD: Duration = Duration::from_millis(100);

/// A handshake that has ended, by its number.
type Ended = (u64, Accepted);

/// A connection that was not let in.
#[derive(Debug, thiserror::Error)]
#[error("a connection from {from}")]
pub struct Refused {
    /// Who has made it: an address without its port.
    pub from: String,
    /// Why its handshake has failed.
    pub source: TlsError,
}

/// A connection, or why there is none, and when it was accepted.
pub type Accepted = (Result<Stream, Refused>, Instant);

/// Connections that are in a handshake.
pub(super) struct Handshakes {
    tls: Arc<Tls>,
    /// The oldest first.
    under_way: Vec<UnderWay>,
    /// Number of the next one.
    next: u64,
    ended: (Sender<Ended>, Receiver<Ended>),
    /// Becomes readable when one has ended.
    wake: (UnixStream, UnixStream),
}

struct UnderWay {
    number: u64,
    since: Instant,
    from: String,
    /// The same socket, to end the handshake by.
    socket: OwnedFd,
    thread: JoinHandle<()>,
}

impl Handshakes {
    pub(super) fn new(tls: Arc<Tls>) -> io::Result<Self> {
        let wake = UnixStream::pair()?;
        wake.0.set_nonblocking(true)?;
        wake.1.set_nonblocking(true)?;
        Ok(Self {
            tls,
            under_way: Vec::with_capacity(UNDER_WAY),
            next: 0,
            ended: channel(),
            wake,
        })
    }

    /// What to poll for handshakes that have ended.
    pub(super) fn wake(&self) -> &UnixStream {
        &self.wake.0
    }

    /// When the connections were accepted.
    pub(super) fn since(&self) -> impl Iterator<Item = Instant> + '_ {
        self.under_way.iter().map(|handshake| handshake.since)
    }

    /// Whether there is room for another, or one that has to give way to it.
    pub(super) fn has_room(&self, now: Instant) -> bool {
        self.under_way.len() < UNDER_WAY || self.gives_way(now).is_some()
    }

    /// Shortens a wait for connections while there is no room: that a handshake gives way by its time shows at no descriptor.
    pub(super) fn shortened(&self, wait: Duration, now: Instant) -> Duration {
        match self.has_room(now) {
            true => wait,
            false => wait.min(FULL),
        }
    }

    /// The place of the handshake that has to give way to a new one where there is no room.
    fn gives_way(&self, now: Instant) -> Option<usize> {
        let has_had = |time| move |one: &UnderWay| now.saturating_duration_since(one.since) > time;
        let of_a_crowd = |one: &UnderWay| {
            let same = self.under_way.iter().filter(|other| other.from == one.from);
            same.count() > UNDER_WAY / 2 && has_had(PATIENCE_WITH_A_CROWD)(one)
        };
        let crowd = self.under_way.iter().position(of_a_crowd);
        crowd.or_else(|| self.under_way.iter().position(has_had(PATIENCE)))
    }

    /// Begins that of `stream`; call it if there is room.
    ///
    /// # Errors
    /// The system gives no file descriptor or thread.
    pub(super) fn begin(&mut self, stream: Stream, since: Instant) -> io::Result<()> {
        if self.under_way.len() >= UNDER_WAY {
            let place = self.gives_way(Instant::now()).unwrap_or(0);
            self.under_way.remove(place).end();
        }
        let number = self.next;
        self.next += 1;
        let socket = rustix::io::dup(&stream)?;
        let from = stream.peer_host();
        let (tls, ended) = (Arc::clone(&self.tls), self.ended.0.clone());
        let wake = self.wake.1.try_clone()?;
        let thread = thread::Builder::new()
            .name("tls/accept".to_owned())
            .spawn(move || {
                let from = stream.peer_host();
                let socket = rustix::io::dup(&stream);
                let secured = stream.accept_secured(&tls).map_err(|source| {
                    if let Ok(socket) = &socket {
                        let_read(socket);
                    }
                    Refused { from, source }
                });
                let _ = ended.send((number, (secured, since)));
                // A full pipe wakes as well.
                let _ = (&wake).write(&[0]);
            })?;
        self.under_way.push(UnderWay {
            number,
            since,
            from,
            socket,
            thread,
        });
        Ok(())
    }

    /// Those that have ended since the last call.
    pub(super) fn take_ended(&mut self) -> Vec<Accepted> {
        let mut bytes = [0; UNDER_WAY];
        while matches!((&self.wake.0).read(&mut bytes), Ok(1..)) {}
        let mut ended = Vec::new();
        while let Ok((number, accepted)) = self.ended.1.try_recv() {
            let place = self.under_way.iter().position(|it| it.number == number);
            match place {
                Some(place) => drop(self.under_way.remove(place).thread.join()),
                // It had to give way when it was done already: its socket is shut.
                None if accepted.0.is_ok() => continue,
                None => {}
            }
            ended.push(accepted);
        }
        ended
    }
}

impl UnderWay {
    /// Ends it before its time.
    fn end(self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _ = self.thread.join();
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        for handshake in self.under_way.drain(..) {
            handshake.end();
        }
    }
}

/// How long whoever was refused may take to read why.
const READING: Duration = Duration::from_millis(500);

/// Lets the other side of a connection that is refused read the reason: a socket that is closed with something unread
/// takes back what was sent.
fn let_read(socket: &OwnedFd) {
    let deadline = Instant::now() + READING;
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
    let mut unread = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !wait_readable(socket.as_fd(), left).unwrap_or(false) {
            return;
        }
        match rustix::net::recv(socket, &mut unread, RecvFlags::DONTWAIT) {
            Ok((_, 1..)) => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::tests::some_tls;

    #[test]
    fn a_handshake_that_does_not_move_gives_way_to_the_next() {
        let tls = some_tls();
        let mut handshakes = Handshakes::new(tls).unwrap();
        let now = Instant::now();
        let long_ago = now.checked_sub(2 * PATIENCE).unwrap();
        let wait = Duration::from_secs(600);
        let mut others = Vec::new();
        for number in 0..UNDER_WAY {
            assert!(handshakes.has_room(now));
            let (here, there) = UnixStream::pair().unwrap();
            let here = Stream::from(here);
            others.push(there);
            let since = if number == 0 { long_ago } else { now };
            handshakes.begin(here, since).unwrap();
        }
        assert!(handshakes.has_room(now), "the first has had its time");
        assert_eq!(handshakes.shortened(wait, now), wait);
        let (here, _there) = UnixStream::pair().unwrap();
        handshakes.begin(here.into(), now).unwrap();
        assert_eq!(handshakes.under_way.len(), UNDER_WAY);
        let ended = handshakes.take_ended();
        assert!(matches!(ended[..], [(Err(_), since)] if since == long_ago));
        assert!(!handshakes.has_room(now), "nobody else has");
        assert_eq!(handshakes.shortened(wait, now), FULL);
    }
}
