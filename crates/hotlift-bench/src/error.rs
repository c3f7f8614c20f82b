//! Why a bench failed.

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

/// A bench that could not be run, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// What several commands can fail with.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// Failures that the commands of migrations share.
    #[error(transparent)]
    Shared(#[from] SharedError),
    /// A QEMU.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// Whether this host has an accelerator.
    #[error(transparent)]
    Accel(#[from] AccelError),
    /// No `hotlift` to measure.
    #[error("no program 'hotlift' in the folder of this program or on PATH")]
    NoHotlift,
    /// A `hotlift` that does not start.
    #[error("cannot run {}", path.display())]
    RunHotlift {
        /// Its file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A program that is no `hotlift`.
    #[error("{} does not print the version of hotlift", path.display())]
    NotHotlift {
        /// Its file.
        path: PathBuf,
    },
    /// The host of `--to`.
    #[error("cannot reach 'hotlift-bench --serve'")]
    NoRemoteHost(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A flag for what the rows of a suite say.
    #[error("the rows of suite {suite} set {option} themselves: leave out {flag}")]
    SuiteSets {
        /// The suite's name.
        suite: String,
        /// What they set.
        option: &'static str,
        /// The flag, as it is typed.
        flag: String,
    },
    /// A relay between two QEMUs.
    #[error("relay {side}: {problem}")]
    Relay {
        /// Where it stood.
        side: &'static str,
        /// What it said last.
        problem: String,
    },
    /// The limit of `--link`.
    #[error("no link as asked for: {problem}")]
    Link {
        /// What cannot be made.
        problem: String,
    },
}

impl BenchError {
    /// An error of a QEMU.
    pub(crate) fn qmp(source: QmpError) -> Self {
        let side = "bench";
        QemuError::Qmp { side, source }.into()
    }

    /// The error and its causes, in one line.
    pub fn line(&self) -> String {
        error_line(self)
    }

    /// Returns the next step, where it is not plain from the error.
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

    /// 1; 2 for a bad command line; 130 if a signal ended it.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Terminal(TerminalError::Interrupted)
            | Self::Shared(SharedError::Terminal(TerminalError::Interrupted))
            | Self::Qemu(QemuError::Terminal(TerminalError::Interrupted)) => ExitCode::from(130),
            _ if self.is_usage() => ExitCode::from(USAGE),
            _ => ExitCode::FAILURE,
        }
    }

    /// True if the command line is to blame, and nothing was begun.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Shared(error) if error.is_usage())
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
