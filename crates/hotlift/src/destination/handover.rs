//! How far the hand-over of the guest has come, on the destination.
//!
//! ```text
//! Loading --all loaded--> Loaded --first word that the source lets go--> Taking --it runs--> Taken
//!    |                      |                                              |
//!    +----- failure --------+--- cancel, or no connection is left ---------+--> Refused
//! ```
//!
//! Only the thread that moves Loaded to Taking makes the guest run, and it reaches Taken after it has
//! said so on every socket: whoever waits for the decision cannot close them under it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A state of the hand-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Pages and device state are arriving; the guest is the source's.
    Loading,
    /// Everything is in place; the source decides.
    Loaded,
    /// The source has let go; the guest is being made to run.
    Taking,
    /// It runs here.
    Taken,
    /// It will not run here.
    Refused,
}

/// The state, and who waits for it to be decided.
pub(super) struct Handover {
    state: Mutex<State>,
    decided: Condvar,
}

struct State {
    phase: Phase,
    /// Connections that can still bring the source's word.
    open: usize,
    taken_at: Option<Instant>,
}

impl Handover {
    pub(super) fn new(connections: usize) -> Self {
        Self {
            state: Mutex::new(State {
                phase: Phase::Loading,
                open: connections,
                taken_at: None,
            }),
            decided: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves from one of `from` to `to`; false if it is elsewhere.
    fn step(&self, from: &[Phase], to: Phase) -> bool {
        let mut state = self.lock();
        let may = from.contains(&state.phase);
        if may {
            state.phase = to;
            if to == Phase::Taken {
                state.taken_at = Some(Instant::now());
            }
            self.decided.notify_all();
        }
        may
    }

    pub(super) fn phase(&self) -> Phase {
        self.lock().phase
    }

    /// When the guest ran here.
    pub(super) fn taken_at(&self) -> Option<Instant> {
        self.lock().taken_at
    }

    /// Everything has been loaded.
    pub(super) fn loaded(&self) -> bool {
        self.step(&[Phase::Loading], Phase::Loaded)
    }

    /// The source has let go; true for the one caller that is to make the guest run.
    pub(super) fn begin_taking(&self) -> bool {
        self.step(&[Phase::Loaded], Phase::Taking)
    }

    /// The guest runs, and every socket has been told.
    pub(super) fn taken(&self) {
        self.step(&[Phase::Taking], Phase::Taken);
    }

    /// The guest could not be made to run.
    pub(super) fn refused(&self) {
        self.step(&[Phase::Taking], Phase::Refused);
    }

    /// Gives up, unless the source has let go already.
    pub(super) fn abandon(&self) -> bool {
        self.step(&[Phase::Loading, Phase::Loaded], Phase::Refused)
    }

    /// A connection can bring no word any more.
    pub(super) fn connection_ended(&self) {
        self.lock().open -= 1;
        self.decided.notify_all();
    }

    /// Waits until the guest runs here, or cannot any more; true if it runs.
    pub(super) fn wait_for_decision(&self) -> bool {
        let mut state = self
            .decided
            .wait_while(self.lock(), |state| match state.phase {
                Phase::Loaded => state.open > 0,
                Phase::Taking => true,
                Phase::Loading | Phase::Taken | Phase::Refused => false,
            })
            .unwrap_or_else(PoisonError::into_inner);
        if state.phase == Phase::Loaded {
            state.phase = Phase::Refused;
        }
        state.phase == Phase::Taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_many_words_makes_the_guest_run_and_nobody_is_told_before_it_does() {
        let handover = Handover::new(4);
        assert!(!handover.begin_taking(), "nothing is loaded");
        assert!(handover.loaded());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| handover.wait_for_decision());
            assert!(handover.begin_taking());
            assert!(!handover.begin_taking());
            assert!(!handover.abandon(), "the source has let go");
            (0..4).for_each(|_| handover.connection_ended());
            assert_eq!(handover.phase(), Phase::Taking);
            handover.taken();
            assert!(waiting.join().unwrap());
        });
        assert!(handover.taken_at().is_some());
    }

    #[test]
    fn without_a_connection_the_guest_never_runs_here() {
        let handover = Handover::new(2);
        assert!(handover.loaded());
        handover.connection_ended();
        handover.connection_ended();
        assert!(!handover.wait_for_decision());
        assert!(!handover.begin_taking());
    }
}
