//! Queue between two listeners: the first listener admits the connections, and the second accepts them from the queue.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use hotlift_mem::lock;
use rustix::event::{EventfdFlags, eventfd};

use super::admitted::Admitted;
use super::limits::QUEUED;
use crate::transport::Stream;

/// State that a listener and its senders share.
#[derive(Debug)]
struct Queue {
    state: Mutex<State>,
    /// Semaphore that counts the queued connections. Its descriptor is readable while the count is not zero.
    count: OwnedFd,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<Admitted>,
    is_open: bool,
    /// True after the listener has accepted its first connection.
    is_begun: bool,
}

impl State {
    fn takes(&self) -> bool {
        self.is_open && self.waiting.len() < QUEUED
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// The listener's end of the queue.
#[derive(Debug)]
pub(super) struct QueueListener {
    queue: Arc<Queue>,
    is_local: bool,
}

/// The sender's end of the queue ([`Listener::queue`](super::Listener::queue)).
#[derive(Debug, Clone)]
pub struct ConnectionSender(Arc<Queue>);

impl ConnectionSender {
    /// Queues `one` for the listener.
    ///
    /// # Errors
    /// The connection itself, if the listener is closed or its queue is full.
    pub fn send(&self, one: Admitted) -> Result<(), Admitted> {
        let mut state = self.0.lock();
        if !state.takes() {
            return Err(one);
        }
        state.waiting.push_back(one);
        // Cannot overflow: the counter's maximum is 2^64 - 2.
        let _ = rustix::io::write(&self.0.count, &1_u64.to_ne_bytes());
        Ok(())
    }

    /// Returns true if a [`Self::send`] would succeed now.
    #[must_use]
    pub fn takes(&self) -> bool {
        self.0.lock().takes()
    }

    /// Returns the number of connections in the queue.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.lock().waiting.len()
    }

    /// Returns true if the client has disconnected before the listener accepted anything. That is the case if connections are
    /// queued, and all of them are closed according to their socket or to `has_closed`.
    pub fn is_deserted(&self, has_closed: &dyn Fn(&Stream) -> bool) -> bool {
        let state = self.0.lock();
        let has_gone = |stream: &Stream| stream.is_hung_up() || has_closed(stream);
        !state.is_begun
            && !state.waiting.is_empty()
            && state.waiting.iter().all(|one| has_gone(&one.stream))
    }
}

impl QueueListener {
    /// Creates both ends of a queue. `is_local` is true if all connections come from this host.
    ///
    /// # Errors
    /// If the system has no file descriptor left.
    pub(super) fn new(is_local: bool) -> io::Result<(Self, ConnectionSender)> {
        let flags = EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let queue = Arc::new(Queue {
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                is_open: true,
                is_begun: false,
            }),
            count: eventfd(0, flags)?,
        });
        let sender = ConnectionSender(Arc::clone(&queue));
        Ok((Self { queue, is_local }, sender))
    }

    /// Returns true if all connections come from this host: no lost TCP segment can delay a connection.
    pub(super) fn is_local(&self) -> bool {
        self.is_local
    }

    /// Removes and returns the oldest queued connection; `None` if the queue is empty.
    pub(super) fn take(&self) -> Option<Admitted> {
        let mut state = self.queue.lock();
        let one = state.waiting.pop_front()?;
        state.is_begun = true;
        let _ = rustix::io::read(&self.queue.count, &mut [0; 8]);
        Some(one)
    }
}

impl QueueListener {
    /// Closes the queue, and returns the queued connections.
    pub(super) fn close(&self) -> VecDeque<Admitted> {
        let mut state = self.queue.lock();
        state.is_open = false;
        std::mem::take(&mut state.waiting)
    }
}

impl AsFd for QueueListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.count.as_fd()
    }
}

impl Drop for QueueListener {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::Listener;
    use super::*;

    fn pair() -> (Admitted, Stream) {
        let (here, there) = Stream::pair().unwrap();
        (Admitted::new(here, Instant::now()), there)
    }

    #[test]
    fn connections_are_accepted_in_order_and_a_dropped_listener_takes_none() {
        let (listener, sender) = Listener::queue(true).unwrap();
        assert!(listener.accept(Instant::now()).unwrap().is_none());
        let (one, first) = pair();
        let (two, _second) = pair();
        sender.send(one).unwrap();
        sender.send(two).unwrap();
        let accepted = listener.accept(Instant::now()).unwrap().unwrap();
        std::io::Write::write_all(&mut &first, b"1").unwrap();
        let mut byte = [0];
        accepted.stream.read_some(&mut byte).unwrap();
        assert_eq!(&byte, b"1");
        assert!(listener.accept(Instant::now()).unwrap().is_some());
        assert!(listener.accept(Instant::now()).unwrap().is_none());
        drop(listener);
        let (three, _third) = pair();
        assert!(sender.send(three).is_err());
    }

    #[test]
    fn a_listener_whose_queued_connections_all_closed_is_deserted() {
        let (listener, sender) = Listener::queue(true).unwrap();
        assert!(!sender.is_deserted(&|_| false), "no caller was waiting");
        let (one, first) = pair();
        let (two, second) = pair();
        std::io::Write::write_all(&mut &first, b"sent before it closed").unwrap();
        sender.send(one).unwrap();
        sender.send(two).unwrap();
        drop(first);
        assert!(!sender.is_deserted(&|_| false), "one is still there");
        drop(second);
        assert!(sender.is_deserted(&|_| false));
        drop(listener.accept(Instant::now()).unwrap().unwrap());
        assert!(
            !sender.is_deserted(&|_| false),
            "the caller of accept finds out"
        );
    }

    #[test]
    fn a_listener_without_accepts_queues_a_limited_number() {
        let (_listener, sender) = Listener::queue(true).unwrap();
        let given = (0..=QUEUED).map(|_| sender.send(pair().0));
        let given: Vec<_> = given.map(|given| given.is_ok()).collect();
        assert_eq!(given.iter().filter(|given| **given).count(), QUEUED);
        assert!(!given[QUEUED]);
    }
}
