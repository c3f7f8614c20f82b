//! When and how a monitored process ends.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::CommandError;

/// Somebody has asked the process to end. Clones are the same wish.
#[derive(Clone, Default)]
pub struct Leaving(Arc<Mutex<Option<Result<(), CommandError>>>>);

impl Leaving {
    /// Asks it to end with `outcome`; the first who asks is heard.
    pub fn ask(&self, outcome: Result<(), CommandError>) {
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        asked.get_or_insert(outcome);
    }

    /// What was asked for; once.
    pub fn take(&self) -> Option<Result<(), CommandError>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
