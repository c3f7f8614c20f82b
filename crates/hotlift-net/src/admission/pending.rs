//! Pending connections: admitted, but not classified yet. Their number and time are limited.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use super::limits::Limits;

/// Pending connections of a listener.
#[derive(Debug)]
pub struct PendingConnections<S> {
    limits: Limits,
    /// Edge-triggered epoll: an incomplete message wakes one wait, and the next wait only when more bytes arrive.
    epoll_fd: OwnedFd,
    /// Pending connections, the oldest first.
    waiting: Vec<Waiting<S>>,
    next: u64,
}

#[derive(Debug)]
struct Waiting<S> {
    number: u64,
    since: Instant,
    is_ready: bool,
    connection: S,
}

/// Maximum number of events read at once.
const EVENTS: usize = 64;

impl<S: AsFd> PendingConnections<S> {
    /// Creates an empty list of pending connections.
    ///
    /// # Errors
    /// If the system has no descriptor left.
    pub fn new(limits: Limits) -> io::Result<Self> {
        Ok(Self {
            limits,
            epoll_fd: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            waiting: Vec::new(),
            next: 0,
        })
    }

    /// Adds `connection`, which was accepted at `since`. If too many connections are pending, removes and returns the oldest.
    ///
    /// # Errors
    /// If the system cannot watch more descriptors. `connection` is closed in this case.
    pub fn enter(&mut self, connection: S, since: Instant) -> io::Result<Option<S>> {
        let number = self.next;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(
            &self.epoll_fd,
            &connection,
            epoll::EventData::new_u64(number),
            flags,
        )?;
        self.next += 1;
        let oldest = self.waiting.first().map(|one| one.number);
        let oldest = oldest.filter(|_| self.waiting.len() >= self.limits.most);
        let left = oldest.and_then(|number| self.remove(number));
        self.waiting.push(Waiting {
            number,
            since,
            // Bytes that arrived together with the TLS handshake are already buffered, so the descriptor does not report them.
            is_ready: true,
            connection,
        });
        Ok(left.map(|(connection, _)| connection))
    }

    /// Returns the descriptor that is readable when a pending connection has received something.
    pub fn polled(&self) -> BorrowedFd<'_> {
        self.epoll_fd.as_fd()
    }

    /// Shortens `wait` to the next timeout of a pending connection. Returns zero if a connection must be checked now.
    pub fn shortened(&self, wait: Duration, now: Instant) -> Duration {
        if self.waiting.iter().any(|one| one.is_ready) {
            return Duration::ZERO;
        }
        let max_wait = self.limits.max_wait;
        let waited = self
            .waiting
            .iter()
            .map(|one| now.saturating_duration_since(one.since));
        let left = waited.map(|waited| max_wait.saturating_sub(waited));
        left.fold(wait, Duration::min)
    }

    /// Returns the number of a connection that has received something since its last check; `None` if there is none.
    pub fn next_ready(&mut self) -> Option<u64> {
        if !self.waiting.iter().any(|one| one.is_ready) {
            self.take_events();
        }
        let one = self.waiting.iter_mut().find(|one| one.is_ready)?;
        one.is_ready = false;
        Some(one.number)
    }

    fn take_events(&mut self) {
        let empty = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        let mut events = [empty; EVENTS];
        // An error counts as no events. The next wait then returns immediately.
        let taken = epoll::wait(&self.epoll_fd, &mut events, Some(&Timespec::default()));
        for event in &events[..taken.unwrap_or(0)] {
            self.recheck(event.data.u64());
        }
    }

    /// Marks the connection `number` for another check: the last check consumed bytes, and more may already be buffered.
    pub fn recheck(&mut self, number: u64) {
        if let Some(one) = self.waiting.iter_mut().find(|one| one.number == number) {
            one.is_ready = true;
        }
    }

    /// Returns the connection `number`.
    pub fn get(&mut self, number: u64) -> Option<&mut S> {
        let one = self.waiting.iter_mut().find(|one| one.number == number);
        one.map(|one| &mut one.connection)
    }

    /// Returns all pending connections with their accept times.
    pub fn iter(&self) -> impl Iterator<Item = (&S, Instant)> {
        self.waiting.iter().map(|one| (&one.connection, one.since))
    }

    /// Removes the connection `number`. Returns it with its accept time; `None` if it is not pending.
    pub fn remove(&mut self, number: u64) -> Option<(S, Instant)> {
        let index = self.waiting.iter().position(|one| one.number == number)?;
        Some(self.take(index))
    }

    /// Removes the oldest connection for which `accepts` returns true. Returns it with its accept time; `None` if there is
    /// none.
    pub fn take_first(&mut self, accepts: impl Fn(&S, Instant) -> bool) -> Option<(S, Instant)> {
        let mut waiting = self.waiting.iter();
        let index = waiting.position(|one| accepts(&one.connection, one.since))?;
        Some(self.take(index))
    }

    /// Removes a connection that was pending for longer than the limit; `None` if there is none.
    pub fn take_late(&mut self, now: Instant) -> Option<S> {
        let max_wait = self.limits.max_wait;
        let late = self.take_first(|_, since| now.saturating_duration_since(since) >= max_wait);
        late.map(|(connection, _)| connection)
    }

    /// Removes the connection at `index` from the list and from the epoll set. A duplicate of the socket would otherwise keep
    /// it in the set.
    fn take(&mut self, index: usize) -> (S, Instant) {
        let one = self.waiting.remove(index);
        let _ = epoll::delete(&self.epoll_fd, &one.connection);
        (one.connection, one.since)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    const LIMITS: Limits = Limits {
        most: 2,
        max_wait: Duration::from_secs(10),
    };

    fn is_ready(room: &PendingConnections<UnixStream>) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(room.polled(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())) == Ok(1)
    }

    #[test]
    fn each_part_of_the_first_bytes_ends_one_wait() {
        let mut room = PendingConnections::new(LIMITS).unwrap();
        let now = Instant::now();
        let (here, mut there) = UnixStream::pair().unwrap();
        assert!(room.enter(here, now).unwrap().is_none());
        assert_eq!(room.shortened(Duration::MAX, now), Duration::ZERO);
        assert_eq!((room.next_ready(), room.next_ready()), (Some(0), None));
        assert_eq!(room.shortened(Duration::MAX, now), LIMITS.max_wait);
        for part in [b"HL", b"TK"] {
            assert!(!is_ready(&room));
            there.write_all(part).unwrap();
            assert!(is_ready(&room));
            assert_eq!((room.next_ready(), room.next_ready()), (Some(0), None));
        }
        drop(there);
        assert!(is_ready(&room), "an end counts too");
    }

    #[test]
    fn the_oldest_pending_connection_is_evicted_and_each_times_out() {
        let mut room = PendingConnections::new(LIMITS).unwrap();
        let now = Instant::now();
        let mut others = Vec::new();
        let mut left = 0;
        for _ in 0..1000 {
            let (here, there) = UnixStream::pair().unwrap();
            left += usize::from(room.enter(here, now).unwrap().is_some());
            others.truncate(2);
            others.push(there);
            assert!(room.iter().count() <= LIMITS.most);
        }
        assert_eq!(left, 1000 - LIMITS.most);
        let end = now + LIMITS.max_wait;
        assert!(room.take_late(end - Duration::from_nanos(1)).is_none());
        assert!(room.take_late(end).is_some() && room.take_late(end).is_some());
        assert!(room.take_late(end).is_none());
    }

    #[test]
    fn a_removed_connection_is_not_reported_though_its_socket_stays_open() {
        let mut room = PendingConnections::new(LIMITS).unwrap();
        let (here, mut there) = UnixStream::pair().unwrap();
        let _other_handle = here.try_clone().unwrap();
        room.enter(here, Instant::now()).unwrap();
        drop(room.remove(0));
        there.write_all(b"x").unwrap();
        assert!(!is_ready(&room) && room.next_ready().is_none());
    }
}
