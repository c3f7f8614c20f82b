//! The request that the monitored process ends.

use std::sync::{Arc, Mutex};

use crate::error::MonitorError;
use hotlift_mem::lock;

/// Asks the process to end: a client's `quit`, or a failure that is to end it. Clones are the same request.
#[derive(Debug, Clone, Default)]
pub struct ShutdownRequest(Arc<Mutex<Option<Result<(), MonitorError>>>>);

impl ShutdownRequest {
    /// Makes the request, with the `outcome` to end with; the first is kept.
    pub fn make(&self, outcome: Result<(), MonitorError>) {
        let mut made = lock(&self.0);
        made.get_or_insert(outcome);
    }

    /// The outcome to end with, once it was requested; given out once.
    #[must_use]
    pub fn take(&self) -> Option<Result<(), MonitorError>> {
        lock(&self.0).take()
    }
}
