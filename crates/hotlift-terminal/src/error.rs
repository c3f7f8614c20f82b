//! Errors that several commands share.

use std::io;

use hotlift_mem::FileError;
pub use hotlift_mem::error_line;

/// Error that more than one command can have.
#[derive(Debug, thiserror::Error)]
pub enum TerminalError {
    /// An input file or folder, or a result file, failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Standard output failed.
    #[error("cannot write the result")]
    Output(#[source] io::Error),
    /// A process or another system resource failed.
    #[error("cannot run '{what}'")]
    Process {
        /// Name of the resource.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A signal ended the command.
    #[error("interrupted")]
    Interrupted,
}

impl TerminalError {
    /// Returns a function that turns the system's error into an error of the resource `what`.
    pub fn process(what: &'static str) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Process { what, source }
    }

    /// Returns the error and its causes in one line.
    pub fn line(&self) -> String {
        error_line(self)
    }
}
