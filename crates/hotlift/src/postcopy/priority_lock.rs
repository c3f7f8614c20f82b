//! Lock with priority: a thread that sends a requested page gets the lock before background threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::lock::lock;

/// Lock around a value, with priority for urgent threads.
pub(crate) struct PriorityLock<T> {
    it: Mutex<T>,
    /// Count of urgent threads that wait for the lock.
    urgent: AtomicUsize,
    /// Signals that no urgent thread waits for the lock any more.
    passed: Condvar,
}

/// Guard of the lock; dropping it releases the lock.
pub(crate) type PriorityLockGuard<'a, T> = MutexGuard<'a, T>;

impl<T> PriorityLock<T> {
    pub(crate) fn new(it: T) -> Self {
        Self {
            it: Mutex::new(it),
            urgent: AtomicUsize::new(0),
            passed: Condvar::new(),
        }
    }

    /// Waits for the lock, without regard to priority.
    pub(crate) fn take(&self) -> PriorityLockGuard<'_, T> {
        lock(&self.it)
    }

    /// Takes the lock without waiting. Returns `None` if the lock is not free, or if an urgent thread waits.
    pub(crate) fn try_take(&self) -> Option<PriorityLockGuard<'_, T>> {
        if self.urgent.load(Ordering::Acquire) > 0 {
            return None;
        }
        match self.it.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Waits until no urgent thread waits, then for the lock.
    pub(crate) fn take_after_urgent(&self) -> PriorityLockGuard<'_, T> {
        let waits = |_: &mut T| self.urgent.load(Ordering::Acquire) > 0;
        let turn = self.passed.wait_while(lock(&self.it), waits);
        turn.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lock as an urgent thread: before threads in [`PriorityLock::take_after_urgent`].
    pub(crate) fn take_urgently(&self) -> PriorityLockGuard<'_, T> {
        self.urgent.fetch_add(1, Ordering::AcqRel);
        let turn = lock(&self.it);
        if self.urgent.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.passed.notify_all();
        }
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn an_urgent_thread_precedes_those_that_waited_longer() {
        let turns = PriorityLock::new(Vec::new());
        let (started, starts) = mpsc::channel();
        thread::scope(|scope| {
            let mut first = turns.take();
            first.push("first");
            for _ in 0..3 {
                let (turns, started) = (&turns, started.clone());
                scope.spawn(move || {
                    started.send(()).unwrap();
                    turns.take_after_urgent().push("background");
                });
            }
            (0..3).for_each(|_| starts.recv().unwrap());
            scope.spawn(|| turns.take_urgently().push("urgent"));
            while turns.urgent.load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            assert!(turns.try_take().is_none());
            drop(first);
        });
        assert_eq!(turns.try_take().unwrap()[..2], ["first", "urgent"]);
        assert_eq!(turns.take().len(), 5);
    }
}
