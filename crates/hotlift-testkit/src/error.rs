//! Why something could not be set up or asked.

use std::io;
use std::time::Duration;

use hotlift_qmp::QmpError;
use hotlift_vmm::fill::FillError;

/// A failure of the machinery, or of what it looks at.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KitError {
    /// The system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A tool of the system failed.
    #[error("'{command}' failed: {said}")]
    Tool {
        /// Its command line.
        command: String,
        /// What it said on stderr.
        said: String,
    },
    /// A process did not say or do what it was waited for.
    #[error("{process} has not {what} within {waited:?}; it said: {said}")]
    Late {
        /// Name of the process.
        process: String,
        /// What was waited for.
        what: String,
        /// For how long.
        waited: Duration,
        /// Its last words.
        said: String,
    },
    /// A conversation over QMP failed.
    #[error("QMP: {0}")]
    Qmp(#[from] QmpError),
    /// The content of a guest's RAM could not be made.
    #[error("cannot make the content of RAM: {0}")]
    Fill(#[from] FillError),
    /// A guest's memory is not what its writes make of it.
    #[error("the guest's memory is wrong: {problem}")]
    Memory {
        /// What differs.
        problem: String,
    },
}

impl KitError {
    /// For `map_err`: the system refused `what`.
    pub fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        |source| Self::System { what, source }
    }
}
