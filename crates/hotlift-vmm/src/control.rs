//! Letting vCPU threads run, and waiting until none of them does.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What vCPU threads are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    /// Wait.
    Pause,
    /// Run the guest.
    Run,
    /// End.
    Stop,
}

#[derive(Debug)]
struct State {
    want: Want,
    running: usize,
}

/// Shared by the vCPU threads of a guest and by who commands them. Threads start parked.
#[derive(Debug)]
pub(crate) struct Control {
    state: Mutex<State>,
    changed: Condvar,
}

impl Control {
    pub fn new() -> Self {
        Self {
            state: Mutex::new(State {
                want: Want::Pause,
                running: 0,
            }),
            changed: Condvar::new(),
        }
    }

    /// Says what threads are to do, and calls `kick` before any of them can act on it, so that
    /// `kick` and what threads do in [`Control::park`] are in order.
    pub fn want(&self, want: Want, kick: impl FnOnce()) {
        let mut state = self.lock();
        state.want = want;
        kick();
        self.changed.notify_all();
    }

    /// Waits until no thread runs.
    pub fn wait_until_parked(&self) {
        let state = self.lock();
        drop(
            self.changed
                .wait_while(state, |state| state.running > 0)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Called by a thread that is not running: waits until it may run (true) or must end (false).
    /// `ready` is called in the same step as the thread counts as running. The thread runs as
    /// long as it keeps what it is given.
    pub fn park(&self, ready: impl FnOnce()) -> Option<Running<'_>> {
        let state = self.lock();
        let mut state = self
            .changed
            .wait_while(state, |state| state.want == Want::Pause)
            .unwrap_or_else(PoisonError::into_inner);
        if state.want == Want::Stop {
            return None;
        }
        state.running += 1;
        ready();
        Some(Running(self))
    }

    /// Called by a running thread: sleeps for `time`, less if it is to stop running.
    pub fn sleep(&self, time: Duration) {
        let state = self.lock();
        drop(
            self.changed
                .wait_timeout_while(state, time, |state| state.want == Want::Run)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that runs. It counts as parked as soon as this is dropped, by a panic too.
pub(crate) struct Running<'a>(&'a Control);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
        self.0.changed.notify_all();
    }
}
