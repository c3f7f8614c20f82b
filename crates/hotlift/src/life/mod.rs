//! One lifetime of a migration: what ends it, and the waits that its end ends.
//!
//! | module | subject |
//! |---|---|
//! | [`threads`] | named threads, whose panic is an error of the migration |
//!
//! It depends on nothing but errors: no stream, no option and no status is known here.

pub(crate) mod threads;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::lock::lock;

/// A handle on one lifetime. Clones are the same lifetime.
#[derive(Debug, Clone, Default)]
pub(crate) struct Life(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    cancelled: AtomicBool,
    /// Set once by what ends the migration before its time.
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl Life {
    /// Asks the migration to end, and ends all sleeps.
    pub(crate) fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
        self.stop();
    }

    /// Returns true once [`Life::cancel`] was called.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }

    /// Ends all sleeps, now and later.
    pub(crate) fn stop(&self) {
        *lock(&self.0.stopped) = true;
        self.0.changed.notify_all();
    }

    /// Returns true once [`Life::stop`] was called.
    pub(crate) fn is_stopped(&self) -> bool {
        *lock(&self.0.stopped)
    }

    /// Makes all sleepers look whether they still have to sleep.
    pub(crate) fn wake(&self) {
        // With the lock that they look under: none of them is between its look and its sleep.
        let _stopped = lock(&self.0.stopped);
        self.0.changed.notify_all();
    }

    /// Sleeps until `until`, for as long as `waits` is true and the lifetime is not stopped.
    pub(crate) fn sleep_while(&self, until: Instant, waits: impl Fn() -> bool) {
        let mut stopped = lock(&self.0.stopped);
        while !*stopped && waits() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            stopped = self
                .0
                .changed
                .wait_timeout(stopped, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
