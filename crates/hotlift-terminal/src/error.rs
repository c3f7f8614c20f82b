//! Errors that several commands share.

use std::io;

use hotlift_mem::FileError;
pub use hotlift_mem::error_line;

/// Error that several commands of `hotlift` share.
#[derive(Debug, thiserror::Error)]
pub enum TerminalError {
    /// A file or folder could not be read, or a result file could not be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Standard output could not be written.
    #[error("cannot write the result")]
    Output(#[source] io::Error),
    /// The system refused a process or another resource.
    #[error("cannot run '{what}'")]
    Process {
        /// Name of the resource.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The command was ended by a signal.
    #[error("interrupted")]
    Interrupted,
}

impl TerminalError {
    /// Returns a function that converts the system's error to an error about the resource `what`.
    pub fn process(what: &'static str) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Process { what, source }
    }

    /// Formats the error and its causes in one line.
    pub fn line(&self) -> String {
        error_line(self)
    }
}
