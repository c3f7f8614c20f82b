//! Why a bench failed.

use hotlift::options::OptionError;
use hotlift_command::error::SharedError;
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
    /// The host of `--to`.
    #[error("cannot reach 'hotlift bench --serve'")]
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
    pub(crate) fn line(&self) -> String {
        error_line(self)
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
