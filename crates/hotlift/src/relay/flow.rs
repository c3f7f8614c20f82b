//! The way of batches from the threads that read to the threads that write.
//!
//! ```text
//! free --take--> filled by a reader --submit--> ready --next--> written by a worker --give_back--> free
//! ```
//!
//! A fixed number of batches goes round. When the wire is slow none is free, readers stop reading, and
//! the source feels it: that is the back-pressure, and the relay's memory stays what it was.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::batch::Batch;

#[derive(Debug)]
pub(crate) struct Flow {
    state: Mutex<State>,
    /// A batch became free, or the flow broke.
    freed: Condvar,
    /// A batch became ready, or the flow ended.
    readied: Condvar,
    /// Nothing is under way any more.
    drained: Condvar,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Batch>,
    ready: VecDeque<Batch>,
    /// Batches submitted and not yet given back.
    under_way: usize,
    ended: bool,
    broken: bool,
}

impl Flow {
    /// A flow of `batches` batches.
    pub(crate) fn new(batches: usize) -> Self {
        let free = (0..batches).map(|_| Batch::new()).collect();
        Self {
            state: Mutex::new(State {
                free,
                ..State::default()
            }),
            freed: Condvar::new(),
            readied: Condvar::new(),
            drained: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a free batch; `None` once the flow is broken.
    pub(crate) fn take(&self) -> Option<Batch> {
        let mut state = self
            .freed
            .wait_while(self.lock(), |state| state.free.is_empty() && !state.broken)
            .unwrap_or_else(PoisonError::into_inner);
        if state.broken {
            return None;
        }
        state.free.pop()
    }

    /// Hands a filled batch to the writers. An empty one is free again at once.
    pub(crate) fn submit(&self, batch: Batch) {
        let mut state = self.lock();
        if batch.len() == 0 {
            state.free.push(batch);
            self.freed.notify_one();
            return;
        }
        state.ready.push_back(batch);
        state.under_way += 1;
        self.readied.notify_one();
    }

    /// Waits for a batch to write; `None` once the flow has ended or is broken.
    pub(crate) fn next(&self) -> Option<Batch> {
        let mut state = self
            .readied
            .wait_while(self.lock(), |state| {
                state.ready.is_empty() && !state.ended && !state.broken
            })
            .unwrap_or_else(PoisonError::into_inner);
        if state.broken {
            return None;
        }
        state.ready.pop_front()
    }

    /// A batch has been written.
    pub(crate) fn give_back(&self, batch: Batch) {
        let mut state = self.lock();
        state.free.push(batch);
        state.under_way -= 1;
        self.freed.notify_one();
        if state.under_way == 0 {
            self.drained.notify_all();
        }
    }

    /// Waits until everything submitted has been written; false if the flow is broken.
    pub(crate) fn drain(&self) -> bool {
        let state = self
            .drained
            .wait_while(self.lock(), |state| state.under_way > 0 && !state.broken)
            .unwrap_or_else(PoisonError::into_inner);
        !state.broken
    }

    /// No more batches will be submitted: writers end when the ready ones are written.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.readied.notify_all();
    }

    /// Ends all waiting, now and later.
    pub(crate) fn break_up(&self) {
        self.lock().broken = true;
        self.freed.notify_all();
        self.readied.notify_all();
        self.drained.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn drain_returns_only_when_every_submitted_batch_is_written() {
        let flow = Flow::new(3);
        let written = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while let Some(batch) = flow.next() {
                        written.fetch_add(1, Ordering::SeqCst);
                        flow.give_back(batch);
                    }
                });
            }
            for round in 1..=200 {
                for _ in 0..5 {
                    let mut batch = flow.take().unwrap();
                    batch.start(0);
                    batch.zero.push(0);
                    flow.submit(batch);
                }
                assert!(flow.drain());
                assert_eq!(written.load(Ordering::SeqCst), 5 * round);
            }
            flow.end();
        });
    }

    #[test]
    fn an_empty_batch_reaches_no_writer() {
        let flow = Flow::new(1);
        let mut batch = flow.take().unwrap();
        batch.start(0);
        flow.submit(batch);
        assert!(flow.drain());
        assert!(flow.take().is_some());
    }

    #[test]
    fn a_broken_flow_frees_everybody_who_waits() {
        let flow = Flow::new(1);
        let mut batch = flow.take().unwrap();
        batch.start(0);
        batch.zero.push(0);
        flow.submit(batch);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| flow.take().is_none());
            let drainer = scope.spawn(|| !flow.drain());
            flow.break_up();
            assert!(reader.join().unwrap());
            assert!(drainer.join().unwrap());
            assert!(flow.next().is_none());
        });
    }
}
