//! The one place for the error that ends a migration.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::MigrationError;

/// The first error of a migration, whichever thread met it. What fails behind it is its consequence.
#[derive(Debug, Default)]
pub(crate) struct Failure(Mutex<Option<MigrationError>>);

impl Failure {
    /// For what must not come between a look and a step.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<MigrationError>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps `error` if it is the first.
    pub(crate) fn keep(&self, error: MigrationError) {
        self.lock().get_or_insert(error);
    }

    /// Whether there is one.
    pub(crate) fn is_set(&self) -> bool {
        self.lock().is_some()
    }

    /// Takes it out, to be returned.
    pub(crate) fn take(&self) -> Option<MigrationError> {
        self.lock().take()
    }

    /// It and its causes in one line.
    pub(crate) fn text(&self) -> Option<String> {
        self.lock().as_ref().map(MigrationError::chain)
    }
}
