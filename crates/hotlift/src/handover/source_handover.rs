//! The source's side of the handover, as a migration's threads share it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::source::{DestinationStatement, SourceOutcome, SourceSide};
use crate::error::MigrationError;
use crate::life::Life;
use crate::life::failure::Failure;

/// The source's side and the first failure. They are locked together: a failure prevents the commit, and after the commit a
/// failure does not end the migration.
#[derive(Debug)]
pub(crate) struct SourceHandover {
    side: Mutex<SourceSide>,
    /// First failure of the lifetime.
    pub failure: Failure,
}

impl SourceHandover {
    pub(crate) fn new(life: &Life) -> Self {
        Self {
            side: Mutex::default(),
            failure: life.failure().clone(),
        }
    }

    fn side(&self) -> MutexGuard<'_, SourceSide> {
        self.side.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores `error` if it is the first failure. Returns true if the migration has failed.
    ///
    /// Returns false after [`SourceHandover::commit`]: the destination may run the guest, and its statement may still arrive on
    /// another connection. Also returns false if the destination has refused the guest, because `error` is not the cause then.
    pub(crate) fn fail(&self, error: MigrationError) -> bool {
        let mut failure = self.failure.lock();
        let mut side = self.side();
        let ends = side.fail() || side.outcome() == Some(SourceOutcome::Kept) || failure.is_set();
        if ends && !side.is_committed() {
            failure.keep(error);
            return true;
        }
        false
    }

    /// Stores the error of the thread that decides the handover, before or after the commit. Returns false if the destination
    /// may run the guest.
    pub(crate) fn end(&self, error: MigrationError) -> bool {
        let mut failure = self.failure.lock();
        let mut side = self.side();
        side.fail();
        failure.keep(error);
        !side.is_committed()
    }

    /// Records the commit, and returns true. Returns false if the migration has failed, or if `may` returns false. After the
    /// commit the guest belongs to the destination: a lost connection does not make it run at the source again.
    pub(crate) fn commit(&self, may: impl FnOnce() -> bool) -> bool {
        self.give(may, SourceSide::commit)
    }

    /// Records the commit of a postcopy. Returns as [`SourceHandover::commit`]; see [`SourceSide::serve`].
    pub(crate) fn serve(&self, may: impl FnOnce() -> bool) -> bool {
        self.give(may, SourceSide::serve)
    }

    fn give(&self, may: impl FnOnce() -> bool, step: fn(&mut SourceSide) -> bool) -> bool {
        let failure = self.failure.lock();
        !failure.is_set() && may() && step(&mut self.side())
    }

    /// See [`SourceSide::all_pages_arrived`].
    pub(crate) fn all_pages_arrived(&self) {
        self.side().all_pages_arrived();
    }

    /// Returns true if the guest of a postcopy is known to run at the destination, which may still lack pages.
    pub(crate) fn is_known_to_run(&self) -> bool {
        *self.side() == SourceSide::Serving { runs: true }
    }

    /// See [`SourceSide::offer`].
    pub(crate) fn offer(&self) -> bool {
        self.side().offer()
    }

    /// See [`SourceSide::released`].
    pub(crate) fn released(&self) {
        self.side().released();
    }

    /// See [`SourceSide::taken_back`].
    pub(crate) fn taken_back(&self) {
        self.side().taken_back();
    }

    /// Sets the outcome from the destination's statement. `None` means that the wait ended without a statement.
    pub(crate) fn settle(&self, statement: Option<DestinationStatement>) {
        let mut side = self.side();
        match statement {
            Some(statement) => side.receive(statement),
            None => side.end_wait(),
        };
    }

    /// See [`SourceSide::is_offered`].
    pub(crate) fn is_offered(&self) -> bool {
        self.side().is_offered()
    }

    /// See [`SourceSide::is_committed`].
    pub(crate) fn is_committed(&self) -> bool {
        self.side().is_committed()
    }

    /// Returns the outcome of the handover, once there is one.
    pub(crate) fn outcome(&self) -> Option<SourceOutcome> {
        self.side().outcome()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_prevents_the_commit_and_a_commit_prevents_failures() {
        let source_handover = SourceHandover::new(&Life::default());
        assert!(source_handover.fail(MigrationError::Cancelled));
        assert_eq!(source_handover.outcome(), Some(SourceOutcome::Kept));
        assert!(!source_handover.commit(|| true));

        let source_handover = SourceHandover::new(&Life::default());
        assert!(!source_handover.commit(|| false));
        assert!(source_handover.commit(|| true));
        assert!(!source_handover.fail(MigrationError::Cancelled));
        source_handover.settle(Some(DestinationStatement::Never));
        assert!(!source_handover.fail(MigrationError::Cancelled));
        assert!(!source_handover.failure.is_set());
        assert_eq!(source_handover.outcome(), Some(SourceOutcome::Refused));
    }

    #[test]
    fn the_guest_of_a_postcopy_returns_only_if_it_has_not_run_at_the_destination() {
        for (words, verdict) in [
            (
                &[DestinationStatement::Never][..],
                Some(SourceOutcome::Refused),
            ),
            (
                &[DestinationStatement::Runs, DestinationStatement::Never],
                None,
            ),
        ] {
            let source_handover = SourceHandover::new(&Life::default());
            assert!(source_handover.serve(|| true));
            assert!(
                !source_handover.fail(MigrationError::Cancelled),
                "a lost connection"
            );
            words
                .iter()
                .for_each(|statement| source_handover.settle(Some(*statement)));
            assert_eq!(source_handover.outcome(), verdict, "{words:?}");
        }

        let source_handover = SourceHandover::new(&Life::default());
        assert!(source_handover.serve(|| true));
        source_handover.settle(Some(DestinationStatement::Runs));
        assert!(source_handover.is_committed(), "its pages are still here");
        source_handover.settle(None);
        assert_eq!(source_handover.outcome(), Some(SourceOutcome::PagesLost));
    }

    #[test]
    fn an_offered_guest_has_no_owner_after_a_failure() {
        let source_handover = SourceHandover::new(&Life::default());
        assert!(source_handover.offer());
        assert!(source_handover.fail(MigrationError::Cancelled));
        assert_eq!(source_handover.outcome(), Some(SourceOutcome::Refused));
        assert!(
            source_handover.fail(MigrationError::InDoubt),
            "a consequence"
        );
        let first = source_handover.failure.take();
        assert!(matches!(first, Some(MigrationError::Cancelled)));
    }
}
