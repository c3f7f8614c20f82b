//! Queue of messages from the server to one client.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::lines::Socket;

/// Maximum number of queued events; a client that exceeds it is disconnected. A migration sends some dozens of events.
pub const MAX_EVENTS_WAITING: usize = 1024;

/// A queue of messages for the thread that writes to the client. It contains at most one answer and [`MAX_EVENTS_WAITING`]
/// events.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<(OutboxEntry, Arc<[u8]>)>,
    answers: usize,
    /// True if no more messages will be queued.
    finished: bool,
    /// True if no more messages are written.
    closed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OutboxEntry {
    Answer,
    Event,
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the previous answer was written, and queues an answer. Returns false if the queue is closed.
    pub(super) fn answer(&self, line: Vec<u8>) -> bool {
        let mut state = self.lock();
        while state.answers > 0 && !state.closed {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return false;
        }
        state.answers += 1;
        state.waiting.push_back((OutboxEntry::Answer, line.into()));
        self.changed.notify_all();
        true
    }

    /// Queues an event without waiting. Returns false if the queue is full.
    fn event(&self, line: &Arc<[u8]>) -> bool {
        let mut state = self.lock();
        if state.waiting.len() >= MAX_EVENTS_WAITING {
            return false;
        }
        state
            .waiting
            .push_back((OutboxEntry::Event, Arc::clone(line)));
        self.changed.notify_all();
        true
    }

    /// Waits for the next message to write. Returns `None` if the queue is closed, or is finished and empty.
    fn next(&self) -> Option<(OutboxEntry, Arc<[u8]>)> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(next) = state.waiting.pop_front() {
                return Some(next);
            }
            if state.finished {
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Writes messages until a write fails, or until [`Outbox::finish`] was called and all messages are written.
    pub(super) fn write_to(&self, mut socket: &Socket) {
        use std::io::Write;
        while let Some((what, line)) = self.next() {
            if socket.write_all(&line).is_err() {
                break;
            }
            if what == OutboxEntry::Answer {
                self.lock().answers -= 1;
                self.changed.notify_all();
            }
        }
        self.close();
    }

    /// Marks the end of the messages: those in the queue are still written.
    pub(super) fn finish(&self) {
        self.lock().finished = true;
        self.changed.notify_all();
    }

    /// Stops all writes, and wakes the threads that wait for the queue.
    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }
}

/// Sends events to all clients that have finished the negotiation (`qmp_capabilities`). All clones share the same clients.
#[derive(Debug, Clone, Default)]
pub struct Events(Arc<Mutex<Vec<Listening>>>);

#[derive(Debug)]
struct Listening {
    outbox: Arc<Outbox>,
    socket: Arc<Socket>,
}

impl Events {
    /// Creates a sender without clients.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Listening>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the event `name` with the current time to all clients. Does not wait: a client whose queue is full is
    /// disconnected.
    pub fn send(&self, name: &str, data: Option<&Value>) {
        let mut clients = self.lock();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default();
        let mut event = json!({
            "event": name,
            "timestamp": { "seconds": now.as_secs(), "microseconds": now.subsec_micros() },
        });
        if let Some(data) = data {
            event["data"] = data.clone();
        }
        let line: Arc<[u8]> = line(&event).into();
        clients.retain(|client| {
            let taken = client.outbox.event(&line);
            if !taken {
                client.outbox.close();
                client.socket.shut_down();
            }
            taken
        });
    }

    pub(super) fn add(&self, outbox: &Arc<Outbox>, socket: &Arc<Socket>) {
        self.lock().push(Listening {
            outbox: Arc::clone(outbox),
            socket: Arc::clone(socket),
        });
    }

    pub(super) fn remove(&self, outbox: &Arc<Outbox>) {
        self.lock()
            .retain(|client| !Arc::ptr_eq(&client.outbox, outbox));
    }
}

/// Encodes a message as a line, with the same line end as QEMU.
pub(super) fn line(message: &Value) -> Vec<u8> {
    let mut line = message.to_string().into_bytes();
    line.extend_from_slice(b"\r\n");
    line
}
