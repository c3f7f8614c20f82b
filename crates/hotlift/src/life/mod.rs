//! One lifetime of a migration: what ends it, and the waits that its end ends.
//!
//! | module | subject |
//! |---|---|
//! | [`gate`] | state that threads wait for |
//! | [`bell`] | what a poll waits for beside its sockets |
//! | [`threads`] | named threads, whose panic is an error of the migration |
//!
//! It depends on nothing but errors: no stream, no option and no status is known here.

pub(crate) mod bell;
pub(crate) mod gate;
pub(crate) mod threads;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::error::MigrationError;
use crate::life::gate::Gate;
use crate::lock::lock;

/// A wait that an event or a change of the lifetime ends.
pub(crate) const LONG: Duration = Duration::from_secs(3600);

/// A handle on one lifetime. Clones are the same lifetime.
#[derive(Clone)]
pub(crate) struct Life {
    shared: Arc<Shared>,
    /// What [`Life::sleep_while`] sleeps at.
    sleepers: Arc<Gate<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    cancelled: AtomicBool,
    stopped: AtomicBool,
    /// Counts the changes that a wait has to look at.
    changes: AtomicU64,
    waits: Mutex<Vec<Weak<dyn Wake>>>,
}

/// A wait that changes of a lifetime wake.
trait Wake: Send + Sync + std::fmt::Debug {
    fn wake(&self);
}

/// The changes of a lifetime, for what waits in it.
#[derive(Debug, Clone)]
struct Changes(Arc<Shared>);

impl Changes {
    fn count(&self) -> u64 {
        self.0.changes.load(Ordering::Acquire)
    }

    fn register(&self, wait: Weak<dyn Wake>) {
        let mut waits = lock(&self.0.waits);
        waits.retain(|wait| wait.strong_count() > 0);
        waits.push(wait);
    }
}

impl std::fmt::Debug for Life {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.shared.fmt(f)
    }
}

impl Default for Life {
    fn default() -> Self {
        let shared = Arc::new(Shared::default());
        let sleepers = Gate::of_changes(Changes(Arc::clone(&shared)), ());
        Self {
            shared,
            sleepers: Arc::new(sleepers),
        }
    }
}

impl Life {
    /// Asks the migration to end, and ends all sleeps.
    pub(crate) fn cancel(&self) {
        self.shared.cancelled.store(true, Ordering::Release);
        self.stop();
    }

    /// Returns true once [`Life::cancel`] was called.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.shared.cancelled.load(Ordering::Acquire)
    }

    /// Returns an error once [`Life::cancel`] was called.
    ///
    /// # Errors
    /// [`MigrationError::Cancelled`].
    pub(crate) fn check(&self) -> Result<(), MigrationError> {
        match self.is_cancelled() {
            true => Err(MigrationError::Cancelled),
            false => Ok(()),
        }
    }

    /// Ends all sleeps, now and later, and makes all waits look whether they go on.
    pub(crate) fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Release);
        self.wake();
    }

    /// Returns true once [`Life::stop`] was called.
    pub(crate) fn is_stopped(&self) -> bool {
        self.shared.stopped.load(Ordering::Acquire)
    }

    /// Makes all waits look whether they go on. Must not be called with the lock of a [`Gate`].
    pub(crate) fn wake(&self) {
        self.shared.changes.fetch_add(1, Ordering::AcqRel);
        let waits = lock(&self.shared.waits).clone();
        for wait in waits.iter().filter_map(Weak::upgrade) {
            wait.wake();
        }
    }

    /// Sleeps until `until`, for as long as `waits` is true and the lifetime is not stopped.
    pub(crate) fn sleep_while(&self, until: Instant, waits: impl Fn() -> bool) {
        let over = || match self.is_stopped() || !waits() {
            true => Err(()),
            false => Ok(()),
        };
        let _ = self.sleepers.wait_until(Some(until), over, |()| None::<()>);
    }
}
