//! What a migration's threads share of the source's side of the hand-over.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::source::{SourceSide, Verdict, Word};
use crate::error::MigrationError;
use crate::life::Life;
use crate::life::failure::Failure;

/// The state, and the first failure, which decides over each other.
#[derive(Debug)]
pub(crate) struct Giving {
    side: Mutex<SourceSide>,
    /// That of the lifetime.
    pub failure: Failure,
}

impl Giving {
    pub(crate) fn new(life: &Life) -> Self {
        Self {
            side: Mutex::default(),
            failure: life.failure().clone(),
        }
    }

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
        self.give(may, SourceSide::commit)
    }

    /// The same of a postcopy, see [`SourceSide::serve`].
    pub(crate) fn serve(&self, may: impl FnOnce() -> bool) -> bool {
        self.give(may, SourceSide::serve)
    }

    fn give(&self, may: impl FnOnce() -> bool, step: fn(&mut SourceSide) -> bool) -> bool {
        let failure = self.failure.lock();
        !failure.is_set() && may() && step(&mut self.side())
    }

    /// See [`SourceSide::has_all`].
    pub(crate) fn has_all(&self) {
        self.side().has_all();
    }

    /// Whether it is known that the guest runs at the destination, which may lack pages.
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
        let giving = Giving::new(&Life::default());
        assert!(giving.fail(MigrationError::Cancelled));
        assert_eq!(giving.verdict(), Some(Verdict::Kept));
        assert!(!giving.commit(|| true));

        let giving = Giving::new(&Life::default());
        assert!(!giving.commit(|| false));
        assert!(giving.commit(|| true));
        assert!(!giving.fail(MigrationError::Cancelled));
        giving.settle(Some(Word::Never));
        assert!(!giving.fail(MigrationError::Cancelled));
        assert!(!giving.failure.is_set());
        assert_eq!(giving.verdict(), Some(Verdict::Refused));
    }

    #[test]
    fn the_guest_of_a_postcopy_comes_back_only_if_it_has_not_run_there() {
        for (words, verdict) in [
            (&[Word::Never][..], Some(Verdict::Refused)),
            (&[Word::Runs, Word::Never], None),
        ] {
            let giving = Giving::new(&Life::default());
            assert!(giving.serve(|| true));
            assert!(!giving.fail(MigrationError::Cancelled), "a lost connection");
            words.iter().for_each(|word| giving.settle(Some(*word)));
            assert_eq!(giving.verdict(), verdict, "{words:?}");
        }

        let giving = Giving::new(&Life::default());
        assert!(giving.serve(|| true));
        giving.settle(Some(Word::Runs));
        assert!(giving.is_committed(), "its pages are still here");
        giving.settle(None);
        assert_eq!(giving.verdict(), Some(Verdict::Torn));
    }

    #[test]
    fn a_guest_that_was_offered_is_nobodys_after_a_failure() {
        let giving = Giving::new(&Life::default());
        assert!(giving.offer());
        assert!(giving.fail(MigrationError::Cancelled));
        assert_eq!(giving.verdict(), Some(Verdict::Refused));
        assert!(giving.fail(MigrationError::InDoubt), "a consequence");
        let first = giving.failure.take();
        assert!(matches!(first, Some(MigrationError::Cancelled)));
    }
}
