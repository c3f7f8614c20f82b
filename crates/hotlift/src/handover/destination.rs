//! The destination's side of the handover, and the state that a migration's threads share.

use std::convert::Infallible;
use std::sync::MutexGuard;
use std::time::Instant;

use hotlift_wire::settle::{GuestActivity, Outcome};

use crate::life::Life;
use crate::life::wait_mutex::WaitMutex;

/// State of the destination's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum DestinationSide {
    /// Pages and device state arrive; the source owns the guest.
    #[default]
    Loading,
    /// Everything is loaded. The source may know this, and may commit.
    Loaded,
    /// The source has committed, and the guest is being started.
    Starting,
    /// The guest runs here.
    Runs,
    /// The guest does not run here, and never will.
    Never,
    /// The thread or QEMU that had to start the guest ended without a report. The guest may run, and the destination makes no
    /// statement.
    Unsure,
}

impl DestinationSide {
    /// Records that everything was loaded. Called before the source is informed. Returns false if the migration was abandoned.
    pub(crate) fn loaded(&mut self) -> bool {
        self.step(&[Self::Loading], Self::Loaded)
    }

    /// Records the source's commit. Returns true for the one caller that must start the guest.
    pub(crate) fn commit(&mut self) -> bool {
        self.step(&[Self::Loaded], Self::Starting)
    }

    /// Records that the guest runs.
    pub(crate) fn record_run(&mut self) -> bool {
        self.step(&[Self::Starting, Self::Unsure], Self::Runs)
    }

    /// Records that the guest could not be started, and never will be.
    pub(crate) fn refused(&mut self) -> bool {
        self.step(&[Self::Starting, Self::Unsure], Self::Never)
    }

    /// Records that the thread that had to start the guest panicked, or that its QEMU does not answer any more.
    pub(crate) fn unsure(&mut self) -> bool {
        self.step(&[Self::Starting], Self::Unsure)
    }

    /// Records a failure, a cancel or a panic, which abandons the migration. Returns false if the source has already committed.
    pub(crate) fn abandon(&mut self) -> bool {
        self.step(&[Self::Loading, Self::Loaded], Self::Never)
    }

    /// Answers the source's outcome query, which the source sends only after its commit. If the commit has not arrived yet, the
    /// answer is "never", and the commit is ignored when it arrives.
    pub(crate) fn ask(&mut self) -> Outcome {
        self.abandon();
        match self {
            Self::Runs => Outcome::Runs,
            Self::Never => Outcome::Never,
            Self::Loading | Self::Loaded | Self::Starting | Self::Unsure => Outcome::Undecided,
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

/// State of the destination's side, shared by the threads of a migration. Threads can wait for the decision.
#[derive(Debug)]
pub(crate) struct DestinationHandover {
    state: WaitMutex<State>,
    life: Life,
}

#[derive(Debug)]
struct State {
    side: DestinationSide,
    /// Run state of the guest at the destination, which is reported to the source.
    activity: GuestActivity,
    /// Number of connections on which the source's commit can still arrive.
    open: usize,
    /// True once the source may have been informed that everything is loaded. From then on it may send outcome queries.
    source_may_ask: bool,
    /// Postcopy only: true if all pages have arrived.
    has_all: bool,
    /// True if the source has confirmed that it knows the outcome.
    is_confirmed: bool,
    run_since: Option<Instant>,
}

impl DestinationHandover {
    /// Creates the state of a migration with this number of connections.
    pub(crate) fn new(connections: usize, life: &Life) -> Self {
        let state = State {
            side: DestinationSide::default(),
            activity: GuestActivity::default(),
            open: connections,
            source_may_ask: false,
            has_all: false,
            is_confirmed: false,
            run_since: None,
        };
        Self {
            state: WaitMutex::new(life, state),
            life: life.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Performs a step of the state machine, and wakes the waiting threads.
    fn step<T>(&self, step: impl FnOnce(&mut DestinationSide) -> T) -> T {
        let (outcome, is_new) = self.state.change(|state| {
            let before = state.side;
            let outcome = step(&mut state.side);
            if state.side == DestinationSide::Runs {
                state.run_since.get_or_insert_with(|| self.life.now());
            }
            (outcome, state.side != before)
        });
        if is_new {
            // Wakes the reader of main, which then checks whether another connection has brought the source's commit.
            self.life.wake();
        }
        outcome
    }

    pub(crate) fn side(&self) -> DestinationSide {
        self.lock().side
    }

    /// Returns the time at which the guest began to run here; `None` before.
    pub(crate) fn run_since(&self) -> Option<Instant> {
        self.lock().run_since
    }

    /// Records that the source may send outcome queries from now on. In postcopy this is early, because the source commits
    /// before it sends the devices.
    pub(crate) fn expect_questions(&self) {
        self.lock().source_may_ask = true;
    }

    /// See [`DestinationSide::loaded`].
    pub(crate) fn loaded(&self) -> bool {
        self.expect_questions();
        self.step(DestinationSide::loaded)
    }

    /// Records that all pages of a postcopy have arrived. Resets the source's earlier confirmation, which was only that the
    /// guest runs.
    pub(crate) fn all_pages_arrived(&self) {
        let mut state = self.lock();
        state.has_all = true;
        state.is_confirmed = false;
    }

    /// See [`DestinationSide::commit`].
    pub(crate) fn commit(&self) -> bool {
        self.step(DestinationSide::commit)
    }

    /// See [`DestinationSide::record_run`].
    pub(crate) fn record_run(&self) {
        self.step(DestinationSide::record_run);
    }

    /// Sets the guest's run state, which is reported to the source. Must be called before [`DestinationHandover::record_run`].
    pub(crate) fn record_activity(&self, activity: GuestActivity) {
        self.lock().activity = activity;
    }

    /// Returns the guest's run state for the report to the source.
    pub(crate) fn activity(&self) -> GuestActivity {
        self.lock().activity
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

    /// See [`DestinationSide::ask`]. In postcopy, the answer also states whether all pages have arrived.
    pub(crate) fn ask(&self) -> Outcome {
        match self.step(DestinationSide::ask) {
            Outcome::Runs if self.lock().has_all => Outcome::HasAll,
            outcome => outcome,
        }
    }

    /// Records the source's confirmation that it knows the outcome.
    pub(crate) fn record_confirmation(&self) {
        self.lock().is_confirmed = true;
    }

    /// Returns true if a source may still send outcome queries: everything is loaded, and the source has not confirmed the
    /// outcome.
    pub(crate) fn may_be_asked(&self) -> bool {
        let state = self.lock();
        state.source_may_ask && !state.is_confirmed
    }

    /// Records the end of a connection. The source's commit cannot arrive on this connection any more.
    pub(crate) fn connection_ended(&self) {
        self.state.change(|state| state.open -= 1);
    }

    /// Waits for the decision whether the guest runs here, and returns true if it runs. Abandons the migration if everything is
    /// loaded, but all connections have ended or `is_cancelled` returns true before the source's commit.
    pub(crate) fn wait_for_decision(&self, is_cancelled: impl Fn() -> bool) -> bool {
        let keep_waiting = || Ok::<_, Infallible>(());
        let Ok(runs) = self.state.wait_until(None, keep_waiting, |state| {
            if state.side == DestinationSide::Loaded && (state.open == 0 || is_cancelled()) {
                state.side.abandon();
            }
            match state.side {
                DestinationSide::Loaded | DestinationSide::Starting => None,
                side => Some(side == DestinationSide::Runs),
            }
        });
        runs.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_run_commands_starts_the_guest_and_no_success_is_sent_before() {
        let destination_handover = DestinationHandover::new(4, &Life::default());
        assert!(!destination_handover.commit(), "nothing is loaded");
        assert!(destination_handover.loaded());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| destination_handover.wait_for_decision(|| true));
            // Either the cancelled wait or this thread wins, never both of them.
            if !destination_handover.commit() {
                assert!(!waiting.join().unwrap());
                assert_eq!(destination_handover.ask(), Outcome::Never);
                return;
            }
            assert!(!destination_handover.commit());
            assert!(!destination_handover.abandon(), "the source has committed");
            assert_eq!(destination_handover.ask(), Outcome::Undecided);
            (0..4).for_each(|_| destination_handover.connection_ended());
            assert_eq!(destination_handover.side(), DestinationSide::Starting);
            destination_handover.record_run();
            assert!(waiting.join().unwrap());
            assert!(destination_handover.run_since().is_some());
        });
    }

    #[test]
    fn a_source_that_knows_of_the_run_still_learns_that_all_pages_arrived() {
        let destination_handover = DestinationHandover::new(1, &Life::default());
        destination_handover.expect_questions();
        assert!(
            destination_handover.may_be_asked(),
            "before anything is loaded"
        );
        assert!(destination_handover.loaded() && destination_handover.commit());
        destination_handover.record_run();
        assert_eq!(destination_handover.ask(), Outcome::Runs);
        destination_handover.record_confirmation();
        assert!(!destination_handover.may_be_asked());
        destination_handover.all_pages_arrived();
        assert!(destination_handover.may_be_asked());
        assert_eq!(destination_handover.ask(), Outcome::HasAll);
        destination_handover.record_confirmation();
        assert!(!destination_handover.may_be_asked());
    }

    #[test]
    fn a_guest_never_runs_here_without_a_connection() {
        let destination_handover = DestinationHandover::new(2, &Life::default());
        assert!(destination_handover.loaded());
        destination_handover.connection_ended();
        destination_handover.connection_ended();
        assert!(!destination_handover.wait_for_decision(|| false));
        assert!(!destination_handover.commit());
    }

    #[test]
    fn a_cancel_ends_the_wait_for_a_silent_source() {
        let destination_handover = DestinationHandover::new(2, &Life::default());
        assert!(destination_handover.loaded());
        assert!(!destination_handover.wait_for_decision(|| true));
        assert_eq!(destination_handover.ask(), Outcome::Never);
    }

    #[test]
    fn a_query_before_the_commit_is_answered_never_and_prevents_the_commit() {
        let destination_handover = DestinationHandover::new(1, &Life::default());
        assert!(destination_handover.loaded());
        assert_eq!(destination_handover.ask(), Outcome::Never);
        assert!(
            !destination_handover.commit(),
            "it answered that it never will"
        );
    }
}
