//! The one place for the error that ends a migration.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::MigrationError;
use crate::lock::lock;

/// The first error of a migration, whichever thread met it. Later errors are its consequences. Clones are the same place.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<First>>);

#[derive(Debug, Default)]
pub(crate) struct First {
    error: Option<MigrationError>,
    /// Why the destination gave up, in its words.
    reason: Option<String>,
}

impl Failure {
    /// For what must not come between a look and a step.
    pub(crate) fn lock(&self) -> MutexGuard<'_, First> {
        lock(&self.0)
    }

    /// Keeps `error` if it is the first.
    pub(crate) fn keep(&self, error: MigrationError) {
        self.lock().keep(error);
    }

    /// Keeps what the destination says about a failure, if it is the first that it says.
    pub(crate) fn explain(&self, reason: String) {
        self.lock().reason.get_or_insert(reason);
    }

    /// Whether there is an error.
    pub(crate) fn is_set(&self) -> bool {
        self.lock().is_set()
    }

    /// Takes the error out, to be returned: what the destination has said in place of what its going away looked like
    /// from here. (After a time-out here it only says that it was left.)
    pub(crate) fn take(&self) -> Option<MigrationError> {
        let mut first = std::mem::take(&mut *self.lock());
        first.apply_reason();
        first.error
    }

    /// Returns the reason to send to the source: of a destination that gave up its own words, since the source's message begins
    /// with that.
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
    fn the_reason_stands_for_a_lost_connection_and_for_nothing_else() {
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
