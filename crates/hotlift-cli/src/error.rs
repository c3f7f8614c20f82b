//! Why the command failed: one line for the operator, what to do next, and the exit code.

use std::path::PathBuf;
use std::process::ExitCode;

use hotlift::MigrationError;
use hotlift::guest::GuestError;
use hotlift::options::OptionError;
use hotlift::transport::TransportError;
use hotlift_vmm::CreateError;
use hotlift_vmm::fill::FillError;
use hotlift_vmm::verify::VerifyError;

use crate::args::error_line;

/// A failed command.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("bad option")]
    Option(#[from] OptionError),
    #[error("cannot make the guest")]
    Create(#[from] CreateError),
    #[error("cannot fill the guest's memory")]
    Fill(#[from] FillError),
    #[error("bad address")]
    Address(#[from] TransportError),
    #[error("migration failed")]
    Migration(#[from] MigrationError),
    #[error("the guest failed")]
    Guest(#[from] GuestError),
    #[error("the guest's memory is not what it must be")]
    Verify(#[from] VerifyError),
    #[error("the guest is not well after the migration: {problem}")]
    NotWell { problem: String },
    #[error("{failed} of {runs} migrations failed")]
    Demo { failed: usize, runs: usize },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot run '{what}'")]
    Process {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("interrupted")]
    Interrupted,
}

impl CommandError {
    /// The error and its causes, in one line.
    pub fn line(&self) -> String {
        error_line(self)
    }

    /// What to do next, where that is not plain from the error.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Create(CreateError::Kvm(_)) => {
                Some("use --guest threads on a host without /dev/kvm, or --guest auto")
            }
            Self::Migration(MigrationError::Transport(TransportError::Connect { .. })) => Some(
                "start 'hotlift guest run --incoming URI' with the same --guest, --ram and --vcpus first",
            ),
            Self::Migration(MigrationError::InDoubt) => {
                Some("ask the other side whether it runs the guest before you do anything else")
            }
            _ => None,
        }
    }

    /// 1; 3 if nobody knows who has the guest; 130 if a signal ended it, as shells have it.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Migration(MigrationError::InDoubt) => ExitCode::from(3),
            Self::Migration(MigrationError::Cancelled) | Self::Interrupted => ExitCode::from(130),
            _ => ExitCode::FAILURE,
        }
    }
}
