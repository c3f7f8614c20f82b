//! Barrier between rounds: SYNC on every multifd channel together with one multifd flush on main.
//!
//! A channel that reads SYNC pauses until all channels have read SYNC and main has reached its flush. So no page of an earlier
//! round can overtake a page of a later round.

use crate::life::Life;
use crate::life::wait_mutex::WaitMutex;

/// Barrier between the main thread and the channel threads. The end of the migration's lifetime ends all waits.
pub(crate) struct Barrier {
    channels: usize,
    state: WaitMutex<State>,
    life: Life,
}

#[derive(Default)]
struct State {
    /// Count of channels that wait at the current barrier.
    arrived: usize,
    /// Count of channels that have ended between packets and will not arrive.
    ended: usize,
    /// Count of barriers that all channels have passed.
    passed: u64,
}

impl Barrier {
    /// Creates a barrier for `channels` channels.
    pub(crate) fn new(channels: usize, life: &Life) -> Self {
        Self {
            channels,
            state: WaitMutex::new(life, State::default()),
            life: life.clone(),
        }
    }

    /// Records that a channel has read SYNC. Waits until main releases all channels. Returns false if the migration has failed.
    pub(crate) fn channel_arrives(&self) -> bool {
        let here = self.state.change(|state| {
            state.arrived += 1;
            state.passed
        });
        self.wait(|state| (state.passed != here).then_some(true))
    }

    /// Records that a channel has ended and will not read another SYNC.
    pub(crate) fn channel_ends(&self) {
        self.state.change(|state| state.ended += 1);
    }

    /// Called by the main thread at its multifd flush. Waits until every channel has arrived. Returns false if the migration
    /// has failed, a channel has ended, or `is_cancelled` returns true.
    pub(crate) fn wait_for_channels(&self, is_cancelled: impl Fn() -> bool) -> bool {
        self.wait(|state| match state.arrived < self.channels {
            true if state.ended > 0 || is_cancelled() => Some(false),
            true => None,
            false => Some(true),
        })
    }

    fn wait(&self, done: impl FnMut(&mut State) -> Option<bool>) -> bool {
        let outcome = self.state.wait_until(None, || self.life.check_open(), done);
        outcome == Ok(Some(true))
    }

    /// Releases all waiting channels, and prepares the next barrier.
    pub(crate) fn pass(&self) {
        self.state.change(|state| {
            state.arrived = 0;
            state.passed += 1;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn no_thread_passes_before_all_have_arrived() {
        let barrier = Barrier::new(3, &Life::default());
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
                assert!(barrier.wait_for_channels(|| false));
                assert!(before.load(Ordering::SeqCst) >= 3 * round);
                barrier.pass();
            }
        });
    }

    #[test]
    fn a_failure_releases_all_waiting_threads() {
        let life = Life::default();
        let barrier = Barrier::new(2, &life);
        std::thread::scope(|scope| {
            let channel = scope.spawn(|| barrier.channel_arrives());
            let main = scope.spawn(|| barrier.wait_for_channels(|| false));
            life.close();
            assert!(!channel.join().unwrap());
            assert!(!main.join().unwrap());
        });
    }
}
