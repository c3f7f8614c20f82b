//! Why a command failed, where several commands can fail so.

use std::io;

use hotlift_mem::FileError;
pub use hotlift_mem::error_line;

/// What goes wrong in more than one command.
#[derive(Debug, thiserror::Error)]
pub enum TerminalError {
    /// A file or folder that is to be read, or a file for results.
    #[error(transparent)]
    File(#[from] FileError),
    /// Standard output.
    #[error("cannot write the result")]
    Output(#[source] io::Error),
    /// A process, or something else that the system is asked for.
    #[error("cannot run '{what}'")]
    Process {
        /// Which.
        what: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A signal.
    #[error("interrupted")]
    Interrupted,
}

impl TerminalError {
    /// Returns what makes the system's reason an error of what it was asked for.
    pub fn process(what: &'static str) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Process { what, source }
    }
}

impl TerminalError {
    /// The error and its causes, in one line.
    pub fn line(&self) -> String {
        error_line(self)
    }
}
