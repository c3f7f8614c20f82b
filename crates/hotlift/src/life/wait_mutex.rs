//! State that threads wait for. A wait ends with a value, at a deadline, or with an error after a change of the lifetime.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::life::{Changes, Life, Wake};
use crate::lock::lock;

/// A mutex with a condition variable. Changes of a lifetime wake its waits, so no wait has to poll.
pub(crate) struct WaitMutex<T> {
    changes: Changes,
    inner: Arc<Inner<T>>,
}

struct Inner<T> {
    state: Mutex<T>,
    changed: Condvar,
}

impl<T> std::fmt::Debug for Inner<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WaitMutex").finish_non_exhaustive()
    }
}

impl<T> std::fmt::Debug for WaitMutex<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl<T: Send> Wake for Inner<T> {
    fn wake(&self, _: bool) {
        // A wait holds this lock from its check to its sleep: once it is free, no wait can miss the notification.
        drop(lock(&self.state));
        self.changed.notify_all();
    }
}

impl<T: Send + 'static> WaitMutex<T> {
    /// Creates a mutex with this state. Changes of `life` wake its waits.
    pub(crate) fn new(life: &Life, state: T) -> Self {
        Self::of_changes(Changes(Arc::clone(&life.shared)), state)
    }

    pub(super) fn of_changes(changes: Changes, state: T) -> Self {
        let inner = Arc::new(Inner {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let wait: Arc<dyn Wake> = inner.clone();
        changes.register(Arc::downgrade(&wait));
        Self { changes, inner }
    }

    /// Locks the state, to read or change it without waking any thread.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.inner.state)
    }

    /// Wakes all waits. Needed after a change of the state through [`WaitMutex::lock`].
    pub(crate) fn notify(&self) {
        self.inner.changed.notify_all();
    }

    /// Changes the state, and wakes all waits.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let outcome = change(&mut self.lock());
        self.notify();
        outcome
    }

    /// Returns the time of the lifetime's clock.
    pub(crate) fn now(&self) -> Instant {
        self.changes.now()
    }

    /// Waits as [`WaitMutex::wait_until`] does, with a timeout that restarts at each progress. Returns `None` if there was no
    /// progress for `timeout`. `latest` returns the time of the latest progress.
    ///
    /// # Errors
    /// The error of `keep_waiting`.
    pub(crate) fn wait_with_progress<R, E>(
        &self,
        timeout: Duration,
        latest: impl Fn(&T) -> Option<Instant>,
        mut keep_waiting: impl FnMut() -> Result<(), E>,
        mut done: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<Option<R>, E> {
        let mut deadline = self.now() + timeout;
        loop {
            let value = self.wait_until(Some(deadline), &mut keep_waiting, &mut done)?;
            if value.is_some() {
                return Ok(value);
            }
            match later(deadline, latest(&self.lock()), timeout) {
                Some(later) => deadline = later,
                None => return Ok(None),
            }
        }
    }

    /// Waits until `done` returns a value for the state. Returns `None` after `deadline`; without a deadline, waits forever. If
    /// `done` returns no value, calls `keep_waiting` without the lock: before the sleep, and at each change of the lifetime.
    ///
    /// # Errors
    /// The error of `keep_waiting`.
    pub(crate) fn wait_until<R, E>(
        &self,
        deadline: Option<Instant>,
        mut keep_waiting: impl FnMut() -> Result<(), E>,
        mut done: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<Option<R>, E> {
        loop {
            let seen = self.changes.count();
            if let Some(value) = done(&mut self.lock()) {
                return Ok(Some(value));
            }
            keep_waiting()?;
            let mut state = self.lock();
            while self.changes.count() == seen {
                if let Some(value) = done(&mut state) {
                    return Ok(Some(value));
                }
                let changed = &self.inner.changed;
                state = match deadline.map(|end| end.saturating_duration_since(self.changes.now()))
                {
                    Some(left) if left.is_zero() => return Ok(None),
                    Some(left) => {
                        let woken = changed.wait_timeout(state, left);
                        woken.unwrap_or_else(PoisonError::into_inner).0
                    }
                    None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                };
            }
        }
    }
}

/// Returns a later deadline: `timeout` after the latest progress. Returns `None` if that is not later than `deadline`.
fn later(deadline: Instant, latest: Option<Instant>, timeout: Duration) -> Option<Instant> {
    let later = latest.map(|latest| latest + timeout);
    later.filter(|later| *later > deadline)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::life::Closed;

    #[test]
    fn a_wait_ends_by_its_condition_deadline_or_lifetime() {
        let life = Life::default();
        let wait_mutex = WaitMutex::new(&life, 0);
        let is_one = |state: &mut i32| (*state == 1).then_some("one");
        let keep_waiting = || life.check_open();
        assert_eq!(
            wait_mutex.wait_until(Some(Instant::now()), keep_waiting, is_one),
            Ok(None)
        );
        thread::scope(|scope| {
            let waits = scope.spawn(|| wait_mutex.wait_until(None, keep_waiting, is_one));
            wait_mutex.change(|state| *state = 1);
            assert_eq!(waits.join().unwrap(), Ok(Some("one")));
            wait_mutex.change(|state| *state = 2);
            let waits = scope.spawn(|| wait_mutex.wait_until(None, keep_waiting, is_one));
            // A change that ends nothing is checked, and the wait continues.
            life.wake();
            life.close();
            assert_eq!(waits.join().unwrap(), Err(Closed));
        });
        wait_mutex.change(|state| *state = 1);
        assert_eq!(
            wait_mutex.wait_until(None, keep_waiting, is_one),
            Ok(Some("one"))
        );
    }

    #[test]
    fn a_deadline_moves_with_progress_to_the_millisecond() {
        let (timeout, ms) = (Duration::from_secs(60), Duration::from_millis(1));
        let begun = Instant::now();
        let deadline = begun + timeout;
        let later = |latest| later(deadline, latest, timeout);
        assert_eq!(later(None), None);
        assert_eq!(later(Some(begun - ms)), None);
        assert_eq!(later(Some(begun)), None);
        assert_eq!(later(Some(begun + ms)), Some(deadline + ms));
    }

    #[test]
    fn a_timeout_starts_at_the_latest_progress() {
        let timeout = Duration::from_secs(1 << 30);
        let life = &Life::default();
        let latest = life.now() + timeout / 2;
        let wait_mutex = &WaitMutex::new(life, Some(latest));
        let (calls, seen) = mpsc::channel();
        let looks = calls.clone();
        thread::scope(|scope| {
            let waits = scope.spawn(move || {
                let keep_waiting = || {
                    let _ = calls.send("continues");
                    life.check_open()
                };
                let latest = |it: &Option<Instant>| {
                    let _ = looks.send("latest");
                    *it
                };
                wait_mutex.wait_with_progress(timeout, latest, keep_waiting, |_| None::<()>)
            });
            assert_eq!(seen.recv(), Ok("continues"));
            life.advance(timeout);
            assert!(seen.iter().any(|call| call == "latest"));
            assert_eq!(seen.recv(), Ok("continues"));
            life.advance(timeout / 2);
            assert_eq!(waits.join().unwrap(), Ok(None));
        });
    }

    #[test]
    fn a_wait_that_sleeps_is_ended_by_its_lifetime() {
        let life = Life::default();
        let wait_mutex = Arc::new(WaitMutex::new(&life, 0));
        let (ended, ends) = mpsc::channel();
        let (open, waiting) = (life.clone(), Arc::clone(&wait_mutex));
        thread::spawn(move || {
            let asks = |asked: &mut i32| {
                *asked += 1;
                None::<()>
            };
            ended.send(waiting.wait_until(None, || open.check_open(), asks))
        });
        // The second call is under the lock that the sleep releases.
        while *wait_mutex.lock() < 2 {
            thread::yield_now();
        }
        life.close();
        assert_eq!(ends.recv_timeout(Duration::from_secs(60)), Ok(Err(Closed)));
    }

    #[test]
    fn a_deadline_is_one_of_the_lifetimes_clock() {
        let hours = Duration::from_secs(1 << 30);
        let life = &Life::default();
        let wait_mutex = WaitMutex::new(life, ());
        thread::scope(|scope| {
            let deadline = Some(life.now() + hours);
            let wait_mutex = &wait_mutex;
            let keep_waiting = || life.check_open();
            let waits =
                scope.spawn(move || wait_mutex.wait_until(deadline, keep_waiting, |()| None::<()>));
            life.advance(hours);
            assert_eq!(waits.join().unwrap(), Ok(None));
        });
    }
}
