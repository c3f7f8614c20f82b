//! Circulates batches: from the threads that fill them to the worker threads that write them, and back.
//!
//! ```text
//! free --take--> filled --submit--> ready --next--> worked on --give_back--> free
//! ```
//!
//! The count of batches is fixed. While workers are slow, no batch is free, and the filling threads wait. This backpressure
//! limits the memory.
//!
//! Any worker may take a batch, unless the batch is addressed to one worker. A worker gets the batches addressed to it in
//! order.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::life::Wake;

#[derive(Debug)]
pub(crate) struct Flow<B> {
    state: Mutex<State<B>>,
    /// Signals that a batch became free, or that the flow is broken.
    freed: Condvar,
    /// Signals that a batch became ready, or that the flow has ended.
    readied: Condvar,
    /// Signals that all submitted batches were given back.
    drained: Condvar,
}

/// Error: the migration has ended, and the flow passes on no more batches.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FlowBroken;

#[derive(Debug)]
struct State<B> {
    /// Free batches. Last in, first out: the memory of the last returned batch is still in the CPU's caches.
    free: Vec<B>,
    /// Filled batches. A batch with `Some` is for the worker with this index; with `None`, for any worker.
    ready: VecDeque<(Option<usize>, B)>,
    /// Count of batches that were submitted and are not yet given back.
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
    /// Creates a flow in which `batches` circulate.
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

    /// Waits for a free batch. Returns `None` once `waits` returns false and no batch is free. [`Flow::recheck_waits`] makes
    /// the wait call `waits` again.
    ///
    /// # Errors
    /// [`FlowBroken`] once the flow is broken.
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

    /// Makes the threads in [`Flow::take_while`] check their condition again.
    pub(crate) fn recheck_waits(&self) {
        // The lock ensures that no thread is between the check of its condition and its sleep.
        drop(self.lock());
        self.freed.notify_all();
    }

    /// Returns a free batch without waiting. Returns `None` if no batch is free, or if the flow is broken.
    pub(crate) fn try_take(&self) -> Option<B> {
        let mut state = self.lock();
        if state.broken {
            return None;
        }
        state.free.pop()
    }

    /// Submits a filled batch to any worker.
    pub(crate) fn submit(&self, batch: B) {
        self.submit_to(None, batch);
    }

    /// Submits a filled batch to the worker with index `worker`; with `None`, to any worker.
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

    /// Waits for a batch that any worker may take. Returns `None` once the flow is broken, or has ended and no batch is ready.
    pub(crate) fn next(&self) -> Option<B> {
        self.next_of(None)
    }

    /// Waits for a batch like [`Flow::next`]. Also takes batches that are addressed to `worker`.
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

    /// Returns a free batch to the flow without submitting it.
    pub(crate) fn release(&self, batch: B) {
        self.lock().free.push(batch);
        self.freed.notify_one();
    }

    /// Returns a submitted batch to the flow, after a worker has written it.
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

    /// Ends the flow: workers stop once no batch is ready.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.readied.notify_all();
    }

    /// Breaks the flow after a failure: ends all present and later waits.
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
            flow.recheck_waits();
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
