//! The one place for the error that ends a migration.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::MigrationError;
use crate::lock::lock;

/// The first error of a migration, from any thread. Later errors are its consequences. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<First>>);

#[derive(Debug, Default)]
pub(crate) struct First {
    error: Option<MigrationError>,
    /// The destination's error message.
    reason: Option<String>,
}

impl Failure {
    /// Locks the first error, so that none arrives between a check and the step after it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, First> {
        lock(&self.0)
    }

    /// Keeps `error` if it is the first.
    pub(crate) fn keep(&self, error: MigrationError) {
        self.lock().keep(error);
    }

    /// Keeps the destination's first reason for a failure.
    pub(crate) fn explain(&self, reason: String) {
        self.lock().reason.get_or_insert(reason);
    }

    /// Returns true if there is an error.
    pub(crate) fn is_set(&self) -> bool {
        self.lock().is_set()
    }

    /// Takes the error. If a connection was lost or closed, the destination's reason replaces the error, as its cause. (It does
    /// not replace a timeout here: after that, the destination only reports that this side has left.)
    pub(crate) fn take(&self) -> Option<MigrationError> {
        let mut first = std::mem::take(&mut *self.lock());
        first.apply_reason();
        first.error
    }

    /// Returns the reason to send to the source. For an error of the destination this is its message alone, because the
    /// source's own error begins with the same prefix.
    pub(crate) fn for_the_source(&self) -> Option<String> {
        let mut first = self.lock();
        first.apply_reason();
        Some(match first.error.as_ref()? {
            MigrationError::Destination { reason } => reason.clone(),
            error => error.chain(),
        })
    }
}

impl First {
    pub(crate) fn is_set(&self) -> bool {
        self.error.is_some()
    }

    pub(crate) fn keep(&mut self, error: MigrationError) {
        self.error.get_or_insert(error);
    }

    fn apply_reason(&mut self) {
        if let (
            Some(error @ (MigrationError::Connection { .. } | MigrationError::Closed { .. })),
            Some(reason),
        ) = (&mut self.error, &self.reason)
        {
            let reason = reason.clone();
            *error = MigrationError::Destination { reason };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Channel;

    #[test]
    fn a_recorded_reason_replaces_only_a_lost_connection() {
        let reason = || "no memory".to_owned();
        let failure = Failure::default();
        failure.explain(reason());
        assert!(!failure.is_set());
        failure.keep(MigrationError::Closed {
            channel: Channel::Main,
        });
        failure.keep(MigrationError::Cancelled);
        assert_eq!(failure.for_the_source().unwrap(), "no memory");
        let taken = failure.take().unwrap();
        assert!(matches!(taken, MigrationError::Destination { reason } if reason == "no memory"));

        failure.keep(MigrationError::Destination { reason: reason() });
        assert_eq!(failure.for_the_source().unwrap(), "no memory");
        failure.take();

        failure.keep(MigrationError::Cancelled);
        failure.explain(reason());
        assert!(matches!(failure.take(), Some(MigrationError::Cancelled)));
    }
}
