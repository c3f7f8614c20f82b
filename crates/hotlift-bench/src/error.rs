//! Errors of a bench.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use hotlift::options::OptionError;
use hotlift_command::error::SharedError;
use hotlift_command::program::USAGE;
use hotlift_host::accel::AccelError;
use hotlift_qemu::QemuError;
use hotlift_qmp::QmpError;
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_vmm::fill::FillError;

/// A bench that could not be started or completed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An error that several commands share.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// An error that the commands of migrations share.
    #[error(transparent)]
    Shared(#[from] SharedError),
    /// An error of a QEMU.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// An error of the search for accelerator devices.
    #[error(transparent)]
    Accel(#[from] AccelError),
    /// No `hotlift` command was found.
    #[error("no program 'hotlift' in the folder of this program or on PATH")]
    NoHotlift,
    /// The `hotlift` command cannot be started.
    #[error("cannot run {}", path.display())]
    RunHotlift {
        /// Path of the executable file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The program at this path is not `hotlift`.
    #[error("{} does not print the version of hotlift", path.display())]
    NotHotlift {
        /// Path of the executable file.
        path: PathBuf,
    },
    /// The host of flag `--to` cannot be reached.
    #[error("cannot reach 'hotlift-bench --serve'")]
    NoRemoteHost(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A flag sets an option that the rows of a suite set themselves.
    #[error("the rows of suite {suite} set {option} themselves; leave out {flag}")]
    SuiteSets {
        /// The suite's name.
        suite: String,
        /// The option.
        option: &'static str,
        /// The flag as typed on the command line.
        flag: String,
    },
    /// A relay between two QEMUs failed.
    #[error("relay {side}: {problem}")]
    Relay {
        /// Side of the relay: "source" or "destination".
        side: &'static str,
        /// The relay's last message.
        problem: String,
    },
    /// The limited link of flag `--link` cannot be created.
    #[error("cannot create the link of --link: {problem}")]
    Link {
        /// The reason.
        problem: String,
    },
}

impl BenchError {
    /// Wraps an error of a QMP connection.
    pub(crate) fn qmp(source: QmpError) -> Self {
        let side = "bench";
        QemuError::Qmp { side, source }.into()
    }

    /// Returns the error and its causes in one line.
    pub fn line(&self) -> String {
        error_line(self)
    }

    /// Returns advice about what to do next; `None` if the error message already contains it.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Shared(error) => error.advice(),
            Self::Qemu(error) => error.advice(),
            Self::NoHotlift | Self::RunHotlift { .. } | Self::NotHotlift { .. } => {
                Some("install package 'hotlift', or give the path of the command: --hotlift PATH")
            }
            _ => None,
        }
    }

    /// Returns the exit code: 2 for a wrong command line, 130 if a signal ended the bench, 1 for all other errors.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Terminal(TerminalError::Interrupted)
            | Self::Shared(SharedError::Terminal(TerminalError::Interrupted))
            | Self::Qemu(QemuError::Terminal(TerminalError::Interrupted)) => ExitCode::from(130),
            _ if self.is_usage() => ExitCode::from(USAGE),
            _ => ExitCode::FAILURE,
        }
    }

    /// Returns true if the command line is wrong. In that case nothing was started.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::SuiteSets { .. } => true,
            Self::Shared(error) => error.is_usage(),
            _ => false,
        }
    }
}

impl From<OptionError> for BenchError {
    fn from(error: OptionError) -> Self {
        SharedError::from(error).into()
    }
}

impl From<FillError> for BenchError {
    fn from(error: FillError) -> Self {
        SharedError::from(error).into()
    }
}
