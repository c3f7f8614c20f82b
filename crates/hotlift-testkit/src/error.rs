//! Errors of the test machinery: setup and queries.

use std::io;
use std::time::Duration;

use hotlift_qmp::QmpError;
use hotlift_vmm::fill::FillError;

/// A failure of the test machinery, or of the tested program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KitError {
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The action that was attempted.
        what: String,
        /// The error that the system returned.
        #[source]
        source: io::Error,
    },
    /// A system tool failed, such as `ip` or `nft`.
    #[error("'{command}' failed: {output}")]
    Tool {
        /// Command line of the tool.
        command: String,
        /// Standard error of the tool.
        output: String,
    },
    /// A process did not print or do what was expected within the timeout.
    #[error("{process} has not {what} within {waited:?}; its output: {output}")]
    Late {
        /// Name of the process.
        process: String,
        /// The expected event.
        what: String,
        /// Timeout of the wait.
        waited: Duration,
        /// Last output lines of the process.
        output: String,
    },
    /// A QMP connection or command failed.
    #[error("QMP: {0}")]
    Qmp(#[from] QmpError),
    /// The content of a guest's RAM could not be created.
    #[error("cannot make the content of RAM: {0}")]
    Fill(#[from] FillError),
    /// The memory of a guest does not match its writes.
    #[error("the guest's memory is wrong: {problem}")]
    Memory {
        /// The difference that was found.
        problem: String,
    },
}

impl KitError {
    /// Returns a function for `map_err` that makes an error of the action `what`.
    pub fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        |source| Self::System { what, source }
    }
}
