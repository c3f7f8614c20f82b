//! Watching and stopping a migration from outside: state, cancel, and the way every thread of it
//! learns that it is over.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::figures::JobFigures;
use crate::ran::Ran;

/// State of a migration; QEMU's names (`MigrationStatus`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Not started.
    None,
    /// Connecting and sending the list of RAM blocks.
    Setup,
    /// Sending rounds while the guest runs.
    Active,
    /// The guest stands still; the rest of its state is on its way.
    Device,
    /// The guest runs on the destination.
    Completed,
    /// It failed; the guest runs on the source.
    Failed,
    /// A cancel was asked for.
    Cancelling,
    /// It was cancelled; the guest runs on the source.
    Cancelled,
}

impl Status {
    const ALL: [Self; 8] = [
        Self::None,
        Self::Setup,
        Self::Active,
        Self::Device,
        Self::Completed,
        Self::Failed,
        Self::Cancelling,
        Self::Cancelled,
    ];

    /// QEMU's name of the state.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Setup => "setup",
            Self::Active => "active",
            Self::Device => "device",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A handle on one migration, shared by its threads and by whoever steers it. Clones are the same
/// migration.
#[derive(Debug, Clone, Default)]
pub struct Control(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    status: AtomicU8,
    cancelled: AtomicBool,
    ran: Ran,
    /// Set once by whatever ends the migration before its time.
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl Control {
    /// A migration that has not started.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The present state.
    #[must_use]
    pub fn status(&self) -> Status {
        Status::ALL[usize::from(self.0.status.load(Ordering::Acquire)) % Status::ALL.len()]
    }

    pub(crate) fn set_status(&self, status: Status) {
        self.0.status.store(status as u8, Ordering::Release);
    }

    /// What has done the work of the method so far, on this side.
    #[must_use]
    pub fn jobs(&self) -> JobFigures {
        self.0.ran.read()
    }

    /// What has looked for zero pages so far, if devices were to.
    #[must_use]
    pub fn zero_jobs(&self) -> JobFigures {
        self.0.ran.read_zero()
    }

    pub(crate) fn ran(&self) -> &Ran {
        &self.0.ran
    }

    /// Asks the migration to end; the guest goes on where it is. Too late once the source has
    /// handed the guest over: then the migration completes.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
        self.stop();
    }

    /// True once [`Control::cancel`] was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }

    /// Ends all sleeps, now and later.
    pub(crate) fn stop(&self) {
        *self
            .0
            .stopped
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.0.wake.notify_all();
    }

    /// True once the migration is to end before its time.
    pub(crate) fn is_stopped(&self) -> bool {
        *self
            .0
            .stopped
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until `until` or until the migration is stopped.
    pub(crate) fn sleep_until(&self, until: Instant) {
        let mut stopped = self
            .0
            .stopped
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        while !*stopped {
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                return;
            };
            if left.is_zero() {
                return;
            }
            stopped = self
                .0
                .wake
                .wait_timeout(stopped, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
