//! Keeps the error that ends a migration: the first error of any thread.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::MigrationError;
use crate::lock::lock;

/// First error of a migration. Later errors are consequences of the first error. All clones share the same error.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<First>>);

#[derive(Debug, Default)]
pub(crate) struct First {
    error: Option<MigrationError>,
    /// First error message that the destination sent.
    reason: Option<String>,
}

impl Failure {
    /// Locks the first error. Until the lock is released, no thread can record an error.
    pub(crate) fn lock(&self) -> MutexGuard<'_, First> {
        lock(&self.0)
    }

    /// Records `error`; ignores `error` if there already is one.
    pub(crate) fn keep(&self, error: MigrationError) {
        self.lock().keep(error);
    }

    /// Records the destination's error message; ignores all messages after the first one.
    pub(crate) fn explain(&self, reason: String) {
        self.lock().reason.get_or_insert(reason);
    }

    /// Returns true if an error was recorded.
    pub(crate) fn is_set(&self) -> bool {
        self.lock().is_set()
    }

    /// Takes the error; returns `None` if there is none. A lost or closed connection is replaced by the destination's error
    /// message, if there is one; the loss is then the cause of that error. A timeout here is not replaced: after the timeout,
    /// the destination only reports that the source disconnected.
    pub(crate) fn take(&self) -> Option<MigrationError> {
        let mut first = std::mem::take(&mut *self.lock());
        first.apply_reason();
        first.error
    }

    /// Returns the error message to send to the source; `None` without an error. An error that the destination reported is sent
    /// without its prefix, because the source adds the same prefix.
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
