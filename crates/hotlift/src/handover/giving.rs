//! What a migration's threads share of the source's side of the hand-over.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::source::{SourceSide, Verdict, Word};
use crate::error::MigrationError;
use crate::failure::Failure;

/// The state, and the first failure, which decides over each other.
#[derive(Debug, Default)]
pub(crate) struct Giving {
    side: Mutex<SourceSide>,
    pub failure: Failure,
}

impl Giving {
    fn side(&self) -> MutexGuard<'_, SourceSide> {
        self.side.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps `error` if it is the first; true if it ends the migration. After [`Giving::commit`] it does not: the
    /// destination may run the guest, what is open may bring its word, and what fails behind a refusal is not the
    /// reason.
    pub(crate) fn fail(&self, error: MigrationError) -> bool {
        let mut failure = self.failure.lock();
        let mut side = self.side();
        let ends = side.fail() || side.verdict() == Some(Verdict::Kept) || failure.is_set();
        if ends && !side.is_committed() {
            failure.keep(error);
            return true;
        }
        false
    }

    /// Keeps the error of whoever decides over the hand-over, before the commit or behind it; false if the destination
    /// may run the guest.
    pub(crate) fn end(&self, error: MigrationError) -> bool {
        let mut failure = self.failure.lock();
        let mut side = self.side();
        side.fail();
        failure.keep(error);
        !side.is_committed()
    }

    /// The point of no return, unless the migration has failed or `may` says no: from here on the guest is the
    /// destination's, and no lost connection brings it back to life here.
    pub(crate) fn commit(&self, may: impl FnOnce() -> bool) -> bool {
        let failure = self.failure.lock();
        !failure.is_set() && may() && self.side().commit()
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

    /// What became of the guest, by the destination's word or for want of one.
    pub(crate) fn settle(&self, word: Option<Word>) {
        let mut side = self.side();
        match word {
            Some(word) => side.hear(word),
            None => side.give_up(),
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

    /// How the hand-over has ended, if it has.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        self.side().verdict()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_the_guest_here_and_a_commit_keeps_failures_out() {
        let giving = Giving::default();
        assert!(giving.fail(MigrationError::Cancelled));
        assert_eq!(giving.verdict(), Some(Verdict::Kept));
        assert!(!giving.commit(|| true));

        let giving = Giving::default();
        assert!(!giving.commit(|| false));
        assert!(giving.commit(|| true));
        assert!(!giving.fail(MigrationError::Cancelled));
        giving.settle(Some(Word::Never));
        assert!(!giving.fail(MigrationError::Cancelled));
        assert!(!giving.failure.is_set());
        assert_eq!(giving.verdict(), Some(Verdict::Refused));
    }

    #[test]
    fn a_guest_that_was_offered_is_nobodys_after_a_failure() {
        let giving = Giving::default();
        assert!(giving.offer());
        assert!(giving.fail(MigrationError::Cancelled));
        assert_eq!(giving.verdict(), Some(Verdict::Refused));
        assert!(giving.fail(MigrationError::InDoubt), "a consequence");
        let first = giving.failure.take();
        assert!(matches!(first, Some(MigrationError::Cancelled)));
    }
}
