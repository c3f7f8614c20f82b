//! A request to end the monitored process.

use std::sync::{Arc, Mutex};

use crate::error::MonitorError;
use hotlift_mem::lock;

/// A request to end the process: a client's `quit`, or a fatal failure. All clones share one request.
#[derive(Debug, Clone, Default)]
pub struct ShutdownRequest(Arc<Mutex<Option<Result<(), MonitorError>>>>);

impl ShutdownRequest {
    /// Makes the request. `outcome` is the result of the process. If a request exists, it does not change.
    pub fn make(&self, outcome: Result<(), MonitorError>) {
        let mut made = lock(&self.0);
        made.get_or_insert(outcome);
    }

    /// Returns the outcome of the request, only at the first call; `None` if no request was made.
    #[must_use]
    pub fn take(&self) -> Option<Result<(), MonitorError>> {
        lock(&self.0).take()
    }
}
