//! The barrier between rounds: SYNC on every multifd channel pairs with one multifd flush on main.
//!
//! A channel that reads SYNC stops reading until all channels have, and main has reached its flush;
//! no page of a later round can then be overtaken by one of an earlier round.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a wait looks whether it was called off.
const TICK: Duration = Duration::from_millis(100);

/// One side of the barrier is the main thread, the other the channel threads.
pub(crate) struct Barrier {
    channels: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Channels that wait at the present barrier.
    arrived: usize,
    /// Channels that have ended, between packets, and will arrive nowhere.
    ended: usize,
    /// Barriers passed.
    passed: u64,
    broken: bool,
}

impl Barrier {
    pub(crate) fn new(channels: usize) -> Self {
        Self {
            channels,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A channel has read SYNC: waits for the others and for main. False if the migration failed.
    pub(crate) fn channel_arrives(&self) -> bool {
        let mut state = self.lock();
        state.arrived += 1;
        let here = state.passed;
        self.changed.notify_all();
        let state = self
            .changed
            .wait_while(state, |state| state.passed == here && !state.broken)
            .unwrap_or_else(PoisonError::into_inner);
        state.passed != here
    }

    /// A channel has ended.
    pub(crate) fn channel_ends(&self) {
        self.lock().ended += 1;
        self.changed.notify_all();
    }

    /// Main has read its multifd flush: waits for every channel and lets all go on. False if the migration
    /// failed, a channel has ended, or `called_off` says so.
    pub(crate) fn main_arrives(&self, called_off: impl Fn() -> bool) -> bool {
        self.wait_for_channels(called_off) && {
            self.pass();
            true
        }
    }

    /// The first half of [`Barrier::main_arrives`]: all channels stand still when it returns true.
    pub(crate) fn wait_for_channels(&self, called_off: impl Fn() -> bool) -> bool {
        let mut state = self.lock();
        while state.arrived < self.channels {
            if state.ended > 0 || state.broken || called_off() {
                return false;
            }
            (state, _) = self
                .changed
                .wait_timeout(state, TICK)
                .unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    /// The second half: all channels go on.
    pub(crate) fn pass(&self) {
        let mut state = self.lock();
        state.arrived = 0;
        state.passed += 1;
        self.changed.notify_all();
    }

    /// Ends all waiting, now and later.
    pub(crate) fn break_up(&self) {
        self.lock().broken = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn nobody_passes_before_all_have_arrived() {
        let barrier = Barrier::new(3);
        let before = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 1..=100 {
                        before.fetch_add(1, Ordering::SeqCst);
                        assert!(barrier.channel_arrives());
                        assert!(before.load(Ordering::SeqCst) >= 3 * round);
                    }
                });
            }
            for round in 1..=100 {
                assert!(barrier.main_arrives(|| false));
                assert!(before.load(Ordering::SeqCst) >= 3 * round);
            }
        });
    }

    #[test]
    fn a_failure_frees_everybody_who_waits() {
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            let channel = scope.spawn(|| barrier.channel_arrives());
            let main = scope.spawn(|| barrier.main_arrives(|| false));
            barrier.break_up();
            assert!(!channel.join().unwrap());
            assert!(!main.join().unwrap());
        });
    }
}
