//! Circulation of batches from the threads that fill them to the workers, and back.
//!
//! ```text
//! free --take--> filled --submit--> ready --next--> worked on --give_back--> free
//! ```
//!
//! The number of batches is fixed. When workers are slow no batch is free, and the filling threads wait: this is the
//! backpressure, and memory does not grow.
//!
//! Any worker takes a batch, unless it is addressed to one of them: those batches stay in order.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::life::Wake;

#[derive(Debug)]
pub(crate) struct Flow<B> {
    state: Mutex<State<B>>,
    /// Signals that a batch became free, or the flow broke.
    freed: Condvar,
    /// Signals that a batch became ready, or the flow ended.
    readied: Condvar,
    /// Signals that no batch is in work.
    drained: Condvar,
}

/// Error: the flow is broken, and passes no batch on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FlowBroken;

#[derive(Debug)]
struct State<B> {
    /// Last in, first out: the memory of the last returned batch is in the caches.
    free: Vec<B>,
    /// Filled batches, each with the worker that it is addressed to.
    ready: VecDeque<(Option<usize>, B)>,
    /// Count of batches submitted and not yet given back.
    under_way: usize,
    ended: bool,
    broken: bool,
}

impl<B: Send + std::fmt::Debug> Wake for Flow<B> {
    fn wake(&self, is_closed: bool) {
        if is_closed {
            self.break_flow();
        }
    }
}

impl<B> Flow<B> {
    /// Creates a flow of these batches.
    pub(crate) fn new(batches: impl Iterator<Item = B>) -> Self {
        let free: Vec<_> = batches.collect();
        Self {
            state: Mutex::new(State {
                // Avoids later allocations.
                ready: VecDeque::with_capacity(free.len()),
                free,
                under_way: 0,
                ended: false,
                broken: false,
            }),
            freed: Condvar::new(),
            readied: Condvar::new(),
            drained: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a free batch; returns `None` once the flow is broken.
    pub(crate) fn take(&self) -> Option<B> {
        self.take_while(|| true).ok().flatten()
    }

    /// Waits for a free batch while `waits` returns true, which is checked again at each [`Flow::ask_again`].
    ///
    /// # Errors
    /// The flow is broken.
    pub(crate) fn take_while(&self, waits: impl Fn() -> bool) -> Result<Option<B>, FlowBroken> {
        let mut state = self
            .freed
            .wait_while(self.lock(), |state| {
                state.free.is_empty() && !state.broken && waits()
            })
            .unwrap_or_else(PoisonError::into_inner);
        match state.broken {
            true => Err(FlowBroken),
            false => Ok(state.free.pop()),
        }
    }

    /// Wakes the waiting threads after a change of their condition.
    pub(crate) fn ask_again(&self) {
        // A waiting thread has checked its condition before this lock, or checks it after.
        drop(self.lock());
        self.freed.notify_all();
    }

    /// Returns a free batch, if there is one now.
    pub(crate) fn try_take(&self) -> Option<B> {
        let mut state = self.lock();
        if state.broken {
            return None;
        }
        state.free.pop()
    }

    /// Passes a filled batch to the workers.
    pub(crate) fn submit(&self, batch: B) {
        self.submit_to(None, batch);
    }

    /// Passes a filled batch to `worker`.
    pub(crate) fn submit_to(&self, worker: Option<usize>, batch: B) {
        let mut state = self.lock();
        state.ready.push_back((worker, batch));
        state.under_way += 1;
        match worker {
            None => self.readied.notify_one(),
            // `notify_one` could wake another worker.
            Some(_) => self.readied.notify_all(),
        }
    }

    /// Waits for a batch that any worker may take; returns `None` once the flow has ended or is broken.
    pub(crate) fn next(&self) -> Option<B> {
        self.next_of(None)
    }

    /// Waits for a batch like [`Flow::next`], including those addressed to `worker`.
    pub(crate) fn next_of(&self, worker: Option<usize>) -> Option<B> {
        let first = |state: &State<B>| {
            let mut ready = state.ready.iter();
            ready.position(|(to, _)| to.is_none() || *to == worker)
        };
        let mut state = self
            .readied
            .wait_while(self.lock(), |state| {
                first(state).is_none() && !state.ended && !state.broken
            })
            .unwrap_or_else(PoisonError::into_inner);
        if state.broken {
            return None;
        }
        let (_, batch) = first(&state).and_then(|first| state.ready.remove(first))?;
        Some(batch)
    }

    /// Returns a taken batch that was not submitted.
    pub(crate) fn release(&self, batch: B) {
        self.lock().free.push(batch);
        self.freed.notify_one();
    }

    /// Returns a batch after the work on it.
    pub(crate) fn give_back(&self, batch: B) {
        let mut state = self.lock();
        state.free.push(batch);
        state.under_way -= 1;
        self.freed.notify_one();
        if state.under_way == 0 {
            self.drained.notify_all();
        }
    }

    /// Waits until all submitted batches are given back; returns false if the flow is broken.
    pub(crate) fn drain(&self) -> bool {
        let state = self
            .drained
            .wait_while(self.lock(), |state| state.under_way > 0 && !state.broken)
            .unwrap_or_else(PoisonError::into_inner);
        !state.broken
    }

    /// Ends the flow: workers stop after the ready batches.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.readied.notify_all();
    }

    /// Breaks the flow: ends all waits, now and later.
    pub(crate) fn break_flow(&self) {
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
    fn drain_returns_once_every_submitted_batch_is_returned() {
        let flow = Flow::new(0..3);
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
                    let batch = flow.take().unwrap();
                    flow.submit(batch);
                }
                assert!(flow.drain());
                assert_eq!(written.load(Ordering::SeqCst), 5 * round);
            }
            flow.end();
        });
    }

    #[test]
    fn a_batch_for_one_worker_is_taken_only_by_it_in_order() {
        let flow = Flow::new(0..4);
        let mut batches = [0; 4].map(|_| flow.take().unwrap());
        batches.sort_unstable();
        for (worker, batch) in [Some(1), None, Some(0), Some(1)].into_iter().zip(batches) {
            flow.submit_to(worker, batch);
        }
        let taken = [Some(0), Some(0), Some(1), Some(1)].map(|worker| flow.next_of(worker));
        assert_eq!(taken, [1, 2, 0, 3].map(Some));
        flow.end();
        assert_eq!(flow.next_of(Some(0)), None);
    }

    #[test]
    fn taking_without_waiting_returns_only_free_batches() {
        let flow = Flow::new(0..2);
        let first = flow.try_take().unwrap();
        flow.submit(first);
        let second = flow.try_take().unwrap();
        assert_eq!(flow.try_take(), None);
        assert_eq!(flow.next(), Some(first));
        flow.give_back(first);
        assert_eq!(flow.try_take(), Some(first));
        assert_eq!(flow.try_take(), None);
        flow.release(second);
        assert_eq!(flow.take(), Some(second));
        assert!(flow.drain(), "nothing is under way");
    }

    #[test]
    fn a_wait_for_a_batch_can_be_ended_without_one() {
        let flow = Flow::new(0..1);
        let batch = flow.take().unwrap();
        let asked = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let reader =
                scope.spawn(|| flow.take_while(|| asked.fetch_add(1, Ordering::SeqCst) == 0));
            while asked.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            flow.ask_again();
            assert_eq!(reader.join().unwrap(), Ok(None));
        });
        flow.release(batch);
        assert_eq!(flow.take_while(|| true), Ok(Some(batch)));
        flow.break_flow();
        assert_eq!(flow.take_while(|| true), Err(FlowBroken));
    }

    #[test]
    fn a_broken_flow_releases_all_waiting_threads() {
        let flow = Flow::new(0..1);
        let batch = flow.take().unwrap();
        flow.submit(batch);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| flow.take().is_none());
            let drainer = scope.spawn(|| !flow.drain());
            flow.break_flow();
            assert!(reader.join().unwrap());
            assert!(drainer.join().unwrap());
            assert!(flow.next().is_none());
        });
    }
}
