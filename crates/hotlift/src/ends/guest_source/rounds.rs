//! Synchronises the migration thread and the channel threads: all work on the same round.

use std::time::{Duration, Instant};

use crate::error::MigrationError;
use crate::life::Life;
use crate::life::wait_mutex::WaitMutex;

/// State of a migration's rounds, which the migration thread and the channel threads share.
pub(crate) struct Rounds {
    state: WaitMutex<State>,
    channels: usize,
}

#[derive(Default)]
struct State {
    /// Current round.
    round: u64,
    /// Number of channels that have finished the current round.
    finished: usize,
    /// True once no further round will begin.
    over: bool,
}

impl Rounds {
    /// Creates the rounds of a migration with `channels` channels.
    pub(crate) fn new(channels: usize, life: &Life) -> Self {
        Self {
            state: WaitMutex::new(life, State::default()),
            channels,
        }
    }

    /// Begins the next round, and wakes the channel threads.
    pub(crate) fn start(&self) {
        self.state.change(|state| {
            state.round += 1;
            state.finished = 0;
        });
    }

    /// Waits until all channel threads have finished the round. Calls `doing` at least once per interval `every`, and when the
    /// lifetime changes.
    ///
    /// # Errors
    /// An error of `doing`, which ends the wait.
    pub(crate) fn await_channels(
        &self,
        every: Duration,
        mut doing: impl FnMut() -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let mut ended = None;
        while ended.is_none() {
            let until = Instant::now() + every;
            ended = self.state.wait_until(Some(until), &mut doing, |state| {
                (state.over || state.finished == self.channels).then_some(())
            })?;
        }
        Ok(())
    }

    /// Waits in a channel's thread for the round after `round`. Stores the number of the new round in `round`; returns false if
    /// there is none.
    pub(crate) fn next(&self, round: &mut u64) -> bool {
        let keep_waiting = || Ok::<_, std::convert::Infallible>(());
        let Ok(next) = self.state.wait_until(None, keep_waiting, |state| {
            let is_next = state.round != *round;
            (state.over || is_next).then_some((state.round, !state.over))
        });
        let (next, begins) = next.unwrap_or_default();
        *round = next;
        begins
    }

    /// Records that a channel's thread has finished its part of the round.
    pub(crate) fn finish(&self) {
        let mut state = self.state.lock();
        state.finished += 1;
        if state.finished == self.channels {
            drop(state);
            self.state.notify();
        }
    }

    /// Ends all waits; no other round begins.
    pub(crate) fn end(&self) {
        self.state.change(|state| state.over = true);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::life::LONG;

    #[test]
    fn every_channel_handles_every_round_and_ends_with_the_last() {
        let rounds = Rounds::new(3, &Life::default());
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut round = 0;
                    while rounds.next(&mut round) {
                        done.fetch_add(round, Ordering::SeqCst);
                        rounds.finish();
                    }
                });
            }
            for expected in [3, 9, 18] {
                rounds.start();
                rounds.await_channels(LONG, || Ok(())).unwrap();
                assert_eq!(done.load(Ordering::SeqCst), expected);
            }
            rounds.end();
        });
    }

    #[test]
    fn a_lifetime_change_ends_the_wait_for_stalled_channels() {
        let life = Life::default();
        let rounds = Rounds::new(1, &life);
        rounds.start();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| rounds.await_channels(LONG, || life.check()));
            life.cancel();
            let ended = waits.join().unwrap();
            assert!(matches!(ended, Err(MigrationError::Cancelled)));
        });
    }
}
