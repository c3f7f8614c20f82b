//! Request to end the monitored process.

use std::sync::{Arc, Mutex};

use crate::error::MonitorError;
use hotlift_mem::lock;

/// A request to end the process, made by a client's `quit` or a fatal failure. Clones share the request.
#[derive(Debug, Clone, Default)]
pub struct ShutdownRequest(Arc<Mutex<Option<Result<(), MonitorError>>>>);

impl ShutdownRequest {
    /// Makes the request, with the final `outcome`; the first one wins.
    pub fn make(&self, outcome: Result<(), MonitorError>) {
        let mut made = lock(&self.0);
        made.get_or_insert(outcome);
    }

    /// Takes the outcome of the request, if it was made; returns it only once.
    #[must_use]
    pub fn take(&self) -> Option<Result<(), MonitorError>> {
        lock(&self.0).take()
    }
}
