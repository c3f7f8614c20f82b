//! Descriptor that wakes a poll at the next change of the lifetime.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use hotlift_net::transport::{Stop, Stream};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::life::{Life, Wake};

/// Descriptor that becomes readable at each change of a lifetime. A poll of this descriptor needs no timeout to notice a
/// change.
#[derive(Debug)]
pub struct WakeFd(Arc<Counter>);

#[derive(Debug)]
struct Counter(OwnedFd);

impl Wake for Counter {
    fn wake(&self, _: bool) {
        // The counter counts up to 2^64 - 2. It is readable from 1 on.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl WakeFd {
    /// Creates a descriptor that becomes readable at each change of `life`.
    ///
    /// # Errors
    /// The system's error if it cannot create a descriptor.
    pub(crate) fn new(life: &Life) -> io::Result<Self> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let counter = Arc::new(Counter(eventfd(0, flags)?));
        life.register(&counter);
        Ok(Self(counter))
    }

    /// Makes the descriptor readable also at each change of `life`, which is another lifetime.
    pub(crate) fn and(self, life: &Life) -> Self {
        life.register(&self.0);
        self
    }

    /// Returns the stop condition of a connection attempt. The attempt ends once `when` returns true; each change of the
    /// lifetime calls `when` again.
    pub(crate) fn stop<'a>(&'a self, when: &'a dyn Fn() -> bool) -> Stop<'a> {
        let wake_fd = Some(self.as_fd());
        Stop { wake_fd, when }
    }

    /// Waits for an event on `fds`, a change of the lifetime, or the end of the time `wait`. The caller must check the lifetime
    /// before each call. If the lifetime has changed after that check, the call returns at once.
    ///
    /// # Errors
    /// The system's error if it cannot wait.
    pub fn poll<'f>(&'f self, fds: &mut Vec<PollFd<'f>>, wait: Duration) -> io::Result<()> {
        fds.push(PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN));
        // A time that does not fit the type means no limit.
        let wait = Timespec::try_from(wait).ok();
        let polled = poll(fds, wait.as_ref());
        let wake_fd = fds.pop();
        if wake_fd.is_some_and(|wake_fd| !wake_fd.revents().is_empty()) {
            let _ = rustix::io::read(&self.0.0, &mut [0; 8]);
        }
        match polled {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl WakeFd {
    /// Waits until `stream` has data to read. Returns false if the lifetime changes, or the time `wait` ends, before data
    /// arrives.
    ///
    /// # Errors
    /// See [`WakeFd::poll`].
    pub fn wait_readable(&self, stream: &Stream, wait: Duration) -> io::Result<bool> {
        if stream.has_plaintext() {
            return Ok(true);
        }
        let mut fds = Vec::with_capacity(2);
        fds.push(PollFd::new(stream, PollFlags::IN));
        self.poll(&mut fds, wait)?;
        stream.is_readable(&fds[0])
    }
}

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_before_or_during_a_poll_ends_it_and_is_consumed_once() {
        const LONG: Duration = Duration::from_secs(600);
        let life = Life::default();
        let wake_fd = WakeFd::new(&life).unwrap();
        life.cancel();
        wake_fd.poll(&mut Vec::new(), LONG).unwrap();
        std::thread::scope(|scope| {
            let polls = scope.spawn(|| wake_fd.poll(&mut Vec::new(), LONG));
            life.wake();
            polls.join().unwrap().unwrap();
        });
        let mut fds = [PollFd::new(&wake_fd, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(0));
    }
}
