//! The destination's side of the hand-over, and what a migration's threads share of it.

use std::convert::Infallible;
use std::sync::MutexGuard;
use std::time::Instant;

use hotlift_wire::settle::{Doing, Outcome};

use crate::life::Life;
use crate::life::gate::Gate;

/// How far the destination's side has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum DestinationSide {
    /// Pages and device state are arriving; the guest is the source's.
    #[default]
    Loading,
    /// Everything is in place, and the source may know it: the source decides.
    Loaded,
    /// The source has committed; the guest is being made to run.
    Taking,
    /// It runs here.
    Taken,
    /// It does not run here, and never will.
    Never,
    /// Whoever was to make it run has ended without a word: it may run. Nothing is said of it.
    Unsure,
}

impl DestinationSide {
    /// Everything has arrived and was loaded. Called before the source is told.
    pub(crate) fn loaded(&mut self) -> bool {
        self.step(&[Self::Loading], Self::Loaded)
    }

    /// The source has committed; true for the one caller that is to make the guest run.
    pub(crate) fn commit(&mut self) -> bool {
        self.step(&[Self::Loaded], Self::Taking)
    }

    /// The guest runs.
    pub(crate) fn taken(&mut self) -> bool {
        self.step(&[Self::Taking, Self::Unsure], Self::Taken)
    }

    /// The guest could not be made to run, for good.
    pub(crate) fn refused(&mut self) -> bool {
        self.step(&[Self::Taking, Self::Unsure], Self::Never)
    }

    /// Whoever was to make the guest run panicked, or is not heard any more.
    pub(crate) fn unsure(&mut self) -> bool {
        self.step(&[Self::Taking], Self::Unsure)
    }

    /// A failure, a cancel or a panic: gives up, unless the source has committed already.
    pub(crate) fn abandon(&mut self) -> bool {
        self.step(&[Self::Loading, Self::Loaded], Self::Never)
    }

    /// The source asks what became of the guest. It asks only after it has committed, so that what did not
    /// reach this side by now never will do any more: the answer is made true here.
    pub(crate) fn ask(&mut self) -> Outcome {
        self.abandon();
        match self {
            Self::Taken => Outcome::Runs,
            Self::Never => Outcome::Never,
            Self::Loading | Self::Loaded | Self::Taking | Self::Unsure => Outcome::Undecided,
        }
    }

    fn step(&mut self, from: &[Self], to: Self) -> bool {
        let may = from.contains(self);
        if may {
            *self = to;
        }
        may
    }
}

/// The state, and who waits for it to be decided.
#[derive(Debug)]
pub(crate) struct Taking {
    state: Gate<State>,
    life: Life,
}

#[derive(Debug)]
struct State {
    side: DestinationSide,
    /// What the guest does here.
    doing: Doing,
    /// Connections that can still bring the source's word.
    open: usize,
    /// The source was, or may have been, told that all is loaded: it may ask.
    source_may_ask: bool,
    /// Of postcopy: all pages are here.
    has_all: bool,
    /// The source has said that it knows the outcome.
    heard: bool,
    taken_at: Option<Instant>,
}

impl Taking {
    /// Of a migration with so many connections.
    pub(crate) fn new(connections: usize, life: &Life) -> Self {
        let state = State {
            side: DestinationSide::default(),
            doing: Doing::default(),
            open: connections,
            source_may_ask: false,
            has_all: false,
            heard: false,
            taken_at: None,
        };
        Self {
            state: Gate::new(life, state),
            life: life.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Does a step of the machine, and wakes whoever waits.
    fn step<T>(&self, step: impl FnOnce(&mut DestinationSide) -> T) -> T {
        let (outcome, is_new) = self.state.change(|state| {
            let before = state.side;
            let outcome = step(&mut state.side);
            if state.side == DestinationSide::Taken {
                state.taken_at.get_or_insert_with(|| self.life.now());
            }
            (outcome, state.side != before)
        });
        if is_new {
            // What waits for more of main looks whether another connection has brought the source's commit.
            self.life.wake();
        }
        outcome
    }

    pub(crate) fn side(&self) -> DestinationSide {
        self.lock().side
    }

    /// When the guest ran here.
    pub(crate) fn taken_at(&self) -> Option<Instant> {
        self.lock().taken_at
    }

    /// The source of a postcopy may ask from here on: it commits before it sends the devices.
    pub(crate) fn expect_questions(&self) {
        self.lock().source_may_ask = true;
    }

    /// See [`DestinationSide::loaded`].
    pub(crate) fn loaded(&self) -> bool {
        self.expect_questions();
        self.step(DestinationSide::loaded)
    }

    /// Of postcopy: all pages are here. Who has heard that the guest runs does not know that.
    pub(crate) fn has_all(&self) {
        let mut state = self.lock();
        state.has_all = true;
        state.heard = false;
    }

    /// See [`DestinationSide::commit`].
    pub(crate) fn commit(&self) -> bool {
        self.step(DestinationSide::commit)
    }

    /// See [`DestinationSide::taken`].
    pub(crate) fn taken(&self) {
        self.step(DestinationSide::taken);
    }

    /// The source may know what the guest does here. Called before [`Taking::taken`].
    pub(crate) fn note_doing(&self, doing: Doing) {
        self.lock().doing = doing;
    }

    /// What the guest does here, as far as the source may know it.
    pub(crate) fn doing(&self) -> Doing {
        self.lock().doing
    }

    /// See [`DestinationSide::refused`].
    pub(crate) fn refused(&self) {
        self.step(DestinationSide::refused);
    }

    /// See [`DestinationSide::unsure`].
    pub(crate) fn unsure(&self) {
        self.step(DestinationSide::unsure);
    }

    /// See [`DestinationSide::abandon`].
    pub(crate) fn abandon(&self) -> bool {
        self.step(DestinationSide::abandon)
    }

    /// See [`DestinationSide::ask`].
    pub(crate) fn ask(&self) -> Outcome {
        match self.step(DestinationSide::ask) {
            Outcome::Runs if self.lock().has_all => Outcome::HasAll,
            outcome => outcome,
        }
    }

    /// The source knows the outcome.
    pub(crate) fn note_heard(&self) {
        self.lock().heard = true;
    }

    /// Whether a source may still ask: it may know that all is loaded, and has not said that it knows the
    /// outcome.
    pub(crate) fn may_be_asked(&self) -> bool {
        let state = self.lock();
        state.source_may_ask && !state.heard
    }

    /// A connection can bring no word any more.
    pub(crate) fn connection_ended(&self) {
        self.state.change(|state| state.open -= 1);
    }

    /// Waits until the guest runs here, or cannot any more; true if it runs. `called_off` ends the wait for a
    /// source that has not committed, and none else.
    pub(crate) fn wait_for_decision(&self, called_off: impl Fn() -> bool) -> bool {
        let goes_on = || Ok::<_, Infallible>(());
        let Ok(taken) = self.state.wait_until(None, goes_on, |state| {
            if state.side == DestinationSide::Loaded && (state.open == 0 || called_off()) {
                state.side.abandon();
            }
            match state.side {
                DestinationSide::Loaded | DestinationSide::Taking => None,
                side => Some(side == DestinationSide::Taken),
            }
        });
        taken.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_many_words_makes_the_guest_run_and_nobody_is_told_before_it_does() {
        let taking = Taking::new(4, &Life::default());
        assert!(!taking.commit(), "nothing is loaded");
        assert!(taking.loaded());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| taking.wait_for_decision(|| true));
            // One that is called off at once, or this one: never both.
            if !taking.commit() {
                assert!(!waiting.join().unwrap());
                assert_eq!(taking.ask(), Outcome::Never);
                return;
            }
            assert!(!taking.commit());
            assert!(!taking.abandon(), "the source has committed");
            assert_eq!(taking.ask(), Outcome::Undecided);
            (0..4).for_each(|_| taking.connection_ended());
            assert_eq!(taking.side(), DestinationSide::Taking);
            taking.taken();
            assert!(waiting.join().unwrap());
            assert!(taking.taken_at().is_some());
        });
    }

    #[test]
    fn whoever_knows_that_the_guest_runs_is_still_told_that_it_has_all_its_pages() {
        let taking = Taking::new(1, &Life::default());
        taking.expect_questions();
        assert!(taking.may_be_asked(), "before anything is loaded");
        assert!(taking.loaded() && taking.commit());
        taking.taken();
        assert_eq!(taking.ask(), Outcome::Runs);
        taking.note_heard();
        assert!(!taking.may_be_asked());
        taking.has_all();
        assert!(taking.may_be_asked());
        assert_eq!(taking.ask(), Outcome::HasAll);
        taking.note_heard();
        assert!(!taking.may_be_asked());
    }

    #[test]
    fn without_a_connection_the_guest_never_runs_here() {
        let taking = Taking::new(2, &Life::default());
        assert!(taking.loaded());
        taking.connection_ended();
        taking.connection_ended();
        assert!(!taking.wait_for_decision(|| false));
        assert!(!taking.commit());
    }

    #[test]
    fn a_cancel_ends_the_wait_for_a_source_that_says_nothing() {
        let taking = Taking::new(2, &Life::default());
        assert!(taking.loaded());
        assert!(!taking.wait_for_decision(|| true));
        assert_eq!(taking.ask(), Outcome::Never);
    }

    #[test]
    fn a_question_before_the_commit_is_answered_never_and_makes_it_so() {
        let taking = Taking::new(1, &Life::default());
        assert!(taking.loaded());
        assert_eq!(taking.ask(), Outcome::Never);
        assert!(!taking.commit(), "it said that it never will");
    }
}
