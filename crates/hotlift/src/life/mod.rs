//! Lifetime of a migration: its end, and waits that the end wakes.
//!
//! | module | subject |
//! |---|---|
//! | [`wait_mutex`] | state that threads wait for |
//! | [`wake_fd`] | a descriptor that wakes a poll |
//! | [`failure`] | the first error, which ends the lifetime |
//! | [`threads`] | named threads: a panic is an error of the migration, CPU time is recorded |
//!
//! Three functions end a lifetime:
//!
//! - [`Life::cancel`] asks the migration to end.
//! - [`Life::fail`] records the first error, then closes the lifetime.
//! - [`Life::close`] ends every wait.
//!
//! Of the engine's other modules, this module uses only `error`, `figures` and `lock`. It uses no QEMU stream, option or
//! status.

pub(crate) mod failure;
pub(crate) mod threads;
pub(crate) mod wait_mutex;
pub(crate) mod wake_fd;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::error::MigrationError;
use crate::life::failure::Failure;
use crate::life::wait_mutex::WaitMutex;
use crate::lock::lock;

/// Time limit of a wait that needs no timeout, because an event or a change of the lifetime ends it.
pub(crate) const LONG: Duration = Duration::from_secs(3600);

/// Handle of a lifetime. All clones refer to the same lifetime.
#[derive(Clone)]
pub(crate) struct Life {
    shared: Arc<Shared>,
    /// Mutex that [`Life::sleep_while`] waits on.
    sleepers: Arc<WaitMutex<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    cancelled: AtomicBool,
    closed: AtomicBool,
    failure: Failure,
    /// Count of changes of the lifetime. At each change, every wait checks its condition.
    changes: AtomicU64,
    waits: Mutex<Vec<Weak<dyn Wake>>>,
    clock: Clock,
}

/// Error: the lifetime is closed, so the wait must end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Closed;

/// A wait that is woken by each change of a lifetime.
pub(crate) trait Wake: Send + Sync + std::fmt::Debug {
    /// Called after each change of the lifetime. `is_closed` is true once the lifetime is closed.
    fn wake(&self, is_closed: bool);
}

/// Count of a lifetime's changes and its list of waits, without the right to change the lifetime.
#[derive(Debug, Clone)]
struct Changes(Arc<Shared>);

impl Changes {
    fn count(&self) -> u64 {
        self.0.changes.load(Ordering::Acquire)
    }

    fn now(&self) -> Instant {
        self.0.clock.now()
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
        let sleepers = WaitMutex::of_changes(Changes(Arc::clone(&shared)), ());
        Self {
            shared,
            sleepers: Arc::new(sleepers),
        }
    }
}

impl Life {
    /// Asks the migration to end, and ends all sleeps. The thread that decides where the guest runs then closes the lifetime.
    /// It ignores a cancel that comes too late.
    pub(crate) fn cancel(&self) {
        self.shared.cancelled.store(true, Ordering::Release);
        self.wake();
    }

    /// Records `error` if it is the first error, then ends every wait.
    pub(crate) fn fail(&self, error: MigrationError) {
        self.shared.failure.keep(error);
        self.close();
    }

    /// Returns the storage of the migration's first error.
    pub(crate) fn failure(&self) -> &Failure {
        &self.shared.failure
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

    /// Ends every present wait. Later waits return at once.
    pub(crate) fn close(&self) {
        self.shared.closed.store(true, Ordering::Release);
        self.wake();
    }

    /// Returns true once [`Life::close`] was called.
    fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// Returns true once [`Life::close`] or [`Life::cancel`] was called. Then every sleep ends.
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_closed() || self.is_cancelled()
    }

    /// Returns [`Closed`] as an error once [`Life::close`] was called.
    pub(crate) fn check_open(&self) -> Result<(), Closed> {
        match self.is_closed() {
            true => Err(Closed),
            false => Ok(()),
        }
    }

    /// Wakes `wait` at each later change of this lifetime, until `wait` is dropped.
    pub(crate) fn register(&self, wait: &Arc<impl Wake + 'static>) {
        let wait: Arc<dyn Wake> = Arc::clone(wait) as _;
        Changes(Arc::clone(&self.shared)).register(Arc::downgrade(&wait));
        // A closed lifetime sends no further change.
        if self.is_closed() {
            wait.wake(true);
        }
    }

    /// Returns the time of this lifetime's clock. Tests can set the clock.
    pub(crate) fn now(&self) -> Instant {
        self.shared.clock.now()
    }

    /// Makes all waits check their conditions again. The caller must not hold the lock of a [`WaitMutex`].
    pub(crate) fn wake(&self) {
        self.shared.changes.fetch_add(1, Ordering::AcqRel);
        let waits = lock(&self.shared.waits).clone();
        for wait in waits.iter().filter_map(Weak::upgrade) {
            wait.wake(self.is_closed());
        }
    }

    /// Sleeps until the time `until`. Returns earlier if `waits` returns false, or if the lifetime is cancelled or closed.
    pub(crate) fn sleep_while(&self, until: Instant, waits: impl Fn() -> bool) {
        let over = || match self.is_stopped() || !waits() {
            true => Err(()),
            false => Ok(()),
        };
        let _ = self.sleepers.wait_until(Some(until), over, |()| None::<()>);
    }
}

/// Clock of a lifetime: the system's clock, which tests can set forward.
#[derive(Debug, Default)]
struct Clock {
    #[cfg(test)]
    ahead: Mutex<Duration>,
    /// Time at which a test stopped the clock; `None` while the clock runs.
    #[cfg(test)]
    stopped: Mutex<Option<Instant>>,
}

impl Clock {
    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "a test's clock has a state")]
    fn now(&self) -> Instant {
        Instant::now()
    }

    #[cfg(test)]
    fn now(&self) -> Instant {
        lock(&self.stopped).unwrap_or_else(Instant::now) + *lock(&self.ahead)
    }
}

#[cfg(test)]
impl Life {
    /// Stops the clock for a test. Afterwards only [`Life::advance`] sets it forward.
    pub(crate) fn stop_clock(&self) {
        *lock(&self.shared.clock.stopped) = Some(Instant::now());
    }

    /// Sets the clock forward, and wakes all waits.
    pub(crate) fn advance(&self, time: Duration) {
        *lock(&self.shared.clock.ahead) += time;
        self.wake();
    }
}
