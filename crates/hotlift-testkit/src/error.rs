//! Errors of setup and queries.

use std::io;
use std::time::Duration;

use hotlift_qmp::QmpError;
use hotlift_vmm::fill::FillError;

/// A failure of the machinery, or of its subject.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KitError {
    /// The system refused a call.
    #[error("cannot {what}: {source}")]
    System {
        /// The attempted action.
        what: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A system tool failed.
    #[error("'{command}' failed: {said}")]
    Tool {
        /// Its command line.
        command: String,
        /// Its stderr.
        said: String,
    },
    /// A process did not print or do the expected in time.
    #[error("{process} has not {what} within {waited:?}; its output: {said}")]
    Late {
        /// Name of the process.
        process: String,
        /// The expected event.
        what: String,
        /// The timeout.
        waited: Duration,
        /// Its last lines.
        said: String,
    },
    /// A QMP exchange failed.
    #[error("QMP: {0}")]
    Qmp(#[from] QmpError),
    /// The content of a guest's RAM could not be created.
    #[error("cannot make the content of RAM: {0}")]
    Fill(#[from] FillError),
    /// A guest's memory does not match its writes.
    #[error("the guest's memory is wrong: {problem}")]
    Memory {
        /// The difference.
        problem: String,
    },
}

impl KitError {
    /// Returns a function for `map_err`: the system refused `what`.
    pub fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        |source| Self::System { what, source }
    }
}
