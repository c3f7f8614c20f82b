//! Where the migration thread and the channel threads meet: one job at a time, for all of them.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What all channel threads do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Job {
    /// Work through the round's chunks, then send a SYNC packet.
    Round,
    /// Send a SYNC packet.
    Sync,
    /// Return.
    Exit,
}

/// The meeting point.
pub(crate) struct Gate {
    state: Mutex<State>,
    started: Condvar,
    finished: Condvar,
    channels: usize,
}

struct State {
    generation: u64,
    job: Job,
    finished: usize,
    broken: bool,
}

impl Gate {
    pub(crate) fn new(channels: usize) -> Self {
        Self {
            state: Mutex::new(State {
                generation: 0,
                job: Job::Exit,
                finished: channels,
                broken: false,
            }),
            started: Condvar::new(),
            finished: Condvar::new(),
            channels,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `job` to every channel thread.
    pub(crate) fn start(&self, job: Job) {
        let mut state = self.lock();
        state.generation += 1;
        state.job = job;
        state.finished = 0;
        self.started.notify_all();
    }

    /// Waits up to `timeout` for all channel threads; true when they have finished the job or when
    /// the gate is broken.
    pub(crate) fn wait_finished(&self, timeout: Duration) -> bool {
        let (state, _) = self
            .finished
            .wait_timeout_while(self.lock(), timeout, |state| {
                state.finished < self.channels && !state.broken
            })
            .unwrap_or_else(PoisonError::into_inner);
        state.finished >= self.channels || state.broken
    }

    /// The channel thread's side: waits for the job after `generation`, which it moves on.
    pub(crate) fn next_job(&self, generation: &mut u64) -> Job {
        let state = self
            .started
            .wait_while(self.lock(), |state| {
                state.generation == *generation && !state.broken
            })
            .unwrap_or_else(PoisonError::into_inner);
        *generation = state.generation;
        if state.broken { Job::Exit } else { state.job }
    }

    /// The channel thread's side: its part of the job is done.
    pub(crate) fn finish(&self) {
        let mut state = self.lock();
        state.finished += 1;
        if state.finished == self.channels {
            self.finished.notify_all();
        }
    }

    /// Ends all waiting: the migration has failed.
    pub(crate) fn break_up(&self) {
        self.lock().broken = true;
        self.started.notify_all();
        self.finished.notify_all();
    }
}
