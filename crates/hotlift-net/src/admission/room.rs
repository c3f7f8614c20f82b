//! Connections that have not stated yet what they are: a limited number waits, each for a limited time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use super::limits::Limits;

/// Connections that wait.
#[derive(Debug)]
pub struct Room<S> {
    limits: Limits,
    /// Edge-triggered: bytes that were looked at and are not enough end no further wait, and need no second look until more
    /// bytes come.
    news: OwnedFd,
    /// In the order in which they entered.
    waiting: Vec<Waiting<S>>,
    next: u64,
}

#[derive(Debug)]
struct Waiting<S> {
    number: u64,
    since: Instant,
    has_news: bool,
    connection: S,
}

/// Events that are taken at once.
const EVENTS: usize = 64;

impl<S: AsFd> Room<S> {
    /// Makes an empty one.
    ///
    /// # Errors
    /// The system gives no descriptor.
    pub fn new(limits: Limits) -> io::Result<Self> {
        Ok(Self {
            limits,
            news: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            waiting: Vec::new(),
            next: 0,
        })
    }

    /// Lets `connection` wait, which was accepted at `since`; returns the one that leaves for it.
    ///
    /// # Errors
    /// The system watches no more descriptors; `connection` is closed.
    pub fn enter(&mut self, connection: S, since: Instant) -> io::Result<Option<S>> {
        let number = self.next;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(
            &self.news,
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
            // Bytes that came behind a TLS handshake show at no descriptor.
            has_news: true,
            connection,
        });
        Ok(left.map(|(connection, _)| connection))
    }

    /// Returns what to poll for reading: it is readable when a connection has news.
    pub fn polled(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }

    /// Shortens `wait` to the moment when a connection has waited for too long; to nothing if one is to be looked at.
    pub fn shortened(&self, wait: Duration, now: Instant) -> Duration {
        if self.waiting.iter().any(|one| one.has_news) {
            return Duration::ZERO;
        }
        let patience = self.limits.patience;
        let waited = self
            .waiting
            .iter()
            .map(|one| now.saturating_duration_since(one.since));
        let left = waited.map(|waited| patience.saturating_sub(waited));
        left.fold(wait, Duration::min)
    }

    /// Returns the number of the first connection on which something has come since the last look.
    pub fn next_news(&mut self) -> Option<u64> {
        if !self.waiting.iter().any(|one| one.has_news) {
            self.take_events();
        }
        let one = self.waiting.iter_mut().find(|one| one.has_news)?;
        one.has_news = false;
        Some(one.number)
    }

    fn take_events(&mut self) {
        let empty = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        let mut events = [empty; EVENTS];
        // One that fails is as good as one without events: the next wait ends at once.
        let taken = epoll::wait(&self.news, &mut events, Some(&Timespec::default()));
        for event in &events[..taken.unwrap_or(0)] {
            self.look_again(event.data.u64());
        }
    }

    /// Lets the connection with this number have news: a look at it has taken bytes, and further bytes may be there.
    pub fn look_again(&mut self, number: u64) {
        if let Some(one) = self.waiting.iter_mut().find(|one| one.number == number) {
            one.has_news = true;
        }
    }

    /// Returns the connection with this number.
    pub fn get(&mut self, number: u64) -> Option<&mut S> {
        let one = self.waiting.iter_mut().find(|one| one.number == number);
        one.map(|one| &mut one.connection)
    }

    /// Returns all connections with the time when each was accepted.
    pub fn iter(&self) -> impl Iterator<Item = (&S, Instant)> {
        self.waiting.iter().map(|one| (&one.connection, one.since))
    }

    /// Takes out the connection with this number.
    pub fn remove(&mut self, number: u64) -> Option<(S, Instant)> {
        let place = self.waiting.iter().position(|one| one.number == number)?;
        Some(self.take(place))
    }

    /// Takes out the first that `is_it` accepts.
    pub fn take_first(&mut self, is_it: impl Fn(&S, Instant) -> bool) -> Option<(S, Instant)> {
        let mut waiting = self.waiting.iter();
        let place = waiting.position(|one| is_it(&one.connection, one.since))?;
        Some(self.take(place))
    }

    /// Takes out one that has waited for too long.
    pub fn take_late(&mut self, now: Instant) -> Option<S> {
        let patience = self.limits.patience;
        let late = self.take_first(|_, since| now.saturating_duration_since(since) >= patience);
        late.map(|(connection, _)| connection)
    }

    /// Takes it off the watched descriptors as well: another handle on the same socket would keep it there.
    fn take(&mut self, place: usize) -> (S, Instant) {
        let one = self.waiting.remove(place);
        let _ = epoll::delete(&self.news, &one.connection);
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
        patience: Duration::from_secs(10),
    };

    fn has_news(room: &Room<UnixStream>) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(room.polled(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())) == Ok(1)
    }

    #[test]
    fn a_part_of_the_first_bytes_ends_one_wait_and_the_next_part_another() {
        let mut room = Room::new(LIMITS).unwrap();
        let now = Instant::now();
        let (here, mut there) = UnixStream::pair().unwrap();
        assert!(room.enter(here, now).unwrap().is_none());
        assert_eq!(room.shortened(Duration::MAX, now), Duration::ZERO);
        assert_eq!((room.next_news(), room.next_news()), (Some(0), None));
        assert_eq!(room.shortened(Duration::MAX, now), LIMITS.patience);
        for part in [b"HL", b"TK"] {
            assert!(!has_news(&room));
            there.write_all(part).unwrap();
            assert!(has_news(&room));
            assert_eq!((room.next_news(), room.next_news()), (Some(0), None));
        }
        drop(there);
        assert!(has_news(&room), "an end is news");
    }

    #[test]
    fn the_oldest_leaves_for_one_more_and_each_after_its_time() {
        let mut room = Room::new(LIMITS).unwrap();
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
        let end = now + LIMITS.patience;
        assert!(room.take_late(end - Duration::from_nanos(1)).is_none());
        assert!(room.take_late(end).is_some() && room.take_late(end).is_some());
        assert!(room.take_late(end).is_none());
    }

    #[test]
    fn one_that_has_left_has_no_news_even_if_its_socket_lives_on() {
        let mut room = Room::new(LIMITS).unwrap();
        let (here, mut there) = UnixStream::pair().unwrap();
        let _other_handle = here.try_clone().unwrap();
        room.enter(here, Instant::now()).unwrap();
        drop(room.remove(0));
        there.write_all(b"x").unwrap();
        assert!(!has_news(&room) && room.next_news().is_none());
    }
}
