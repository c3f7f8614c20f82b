//! Errors of QEMU control, and the guest's location after a migration that failed.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use hotlift::transport::TransportError;
use hotlift_qmp::QmpError;
use hotlift_terminal::error::TerminalError;

/// Error of a request to a QEMU, or of a migration.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// An error that several commands share.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// The QEMU program cannot be started.
    #[error("cannot run QEMU as '{}'", program.display())]
    Program {
        /// The path on the command line.
        program: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// An error of a QMP connection or command.
    #[error("QEMU at the {side}")]
    Qmp {
        /// The side of the QEMU: source or destination.
        side: &'static str,
        /// The error.
        #[source]
        source: QmpError,
    },
    /// The QEMU command line is empty.
    #[error("no QEMU was given")]
    NoQemu,
    /// The QEMU command line cannot be used.
    #[error("invalid QEMU command line: {problem}")]
    Command {
        /// The problem.
        problem: String,
    },
    /// A QEMU that this process started has ended before its first answer, without an error message.
    #[error("QEMU ended before it answered over QMP ({status})")]
    EndedAtStart {
        /// Exit status of QEMU.
        status: ExitStatus,
    },
    /// The socket for the stream could not be created or opened.
    #[error(transparent)]
    Address(#[from] TransportError),
    /// The source's QEMU is in a state in which no migration can start.
    #[error("this QEMU cannot start a migration: it is in state '{status}'")]
    Busy {
        /// QEMU's name of the machine's state, or of the state of its active migration.
        status: String,
    },
    /// An earlier migration or save has left the source's guest paused.
    #[error(
        "an earlier migration or save left the guest of this QEMU paused (state 'postmigrate'); in this state QEMU does not \
         migrate a guest"
    )]
    LeftPaused {
        /// Address of the source's QMP socket.
        qmp: String,
    },
    /// The source's VM has a device or a setting that prevents migration.
    #[error("QEMU at the source cannot migrate this VM: {reasons}")]
    Blocked {
        /// QEMU's reasons, in one line.
        reasons: String,
    },
    /// The destination's QEMU refuses postcopy.
    #[error("QEMU at the destination cannot use postcopy: {message}")]
    NoPostcopy {
        /// QEMU's error message.
        message: String,
    },
    /// The destination's QEMU does not wait for a migration.
    #[error(
        "QEMU at the destination does not wait for a migration: it is in state '{status}', and its \
         migration in state '{migration}'"
    )]
    NotWaiting {
        /// QEMU's name of its state.
        status: String,
        /// QEMU's name of the state of its migration.
        migration: String,
    },
    /// QEMU has no guest that waits for pages.
    #[error(
        "QEMU has no guest that waits for pages: it is in state '{status}', and its migration in state \
         '{migration}', not 'postcopy-paused'{refusal}"
    )]
    NotPaused {
        /// QEMU's name of its state.
        status: String,
        /// QEMU's name of the state of its migration.
        migration: String,
        /// QEMU's refusal of 'migrate-recover' after a colon; empty if the command was not sent.
        refusal: String,
    },
    /// QEMU waits for pages of another file.
    #[error("the guest of this QEMU waits for pages of a different file")]
    OtherFile,
    /// A QEMU that this process started has ended before its first answer, with error messages.
    #[error("QEMU ended before it answered over QMP ({status}): {errors}")]
    Ended {
        /// Exit status of QEMU.
        status: ExitStatus,
        /// QEMU's last errors, in one line.
        errors: String,
    },
    /// The VMs have differences that QEMU refuses.
    #[error(
        "the two VMs differ; {differences}; --ignore-differences migrates nevertheless, and QEMU decides"
    )]
    Differs {
        /// The first differences with both values and the remedy, in one line.
        differences: String,
    },
    /// The command refuses the value of a capability or parameter.
    #[error(
        "cannot migrate while QEMU's migration {what} '{name}' is '{value}': {reason}; set it to '{remedy}'"
    )]
    Setting {
        /// "capability" or "parameter".
        what: &'static str,
        /// Name of the capability or parameter in QEMU.
        name: String,
        /// Current value of the capability or parameter.
        value: String,
        /// Reason for the refusal.
        reason: &'static str,
        /// The accepted value.
        remedy: String,
    },
    /// Another command, which is still active, has changed the settings of this QEMU.
    #[error(
        "another hotlift command (process {process}) uses this QEMU; wait until that command ends, or end it"
    )]
    InUse {
        /// Process id of that command.
        process: u32,
    },
    /// `--ignore-shared` cannot be used: RAM cannot stay in files that both QEMUs map.
    #[error("cannot leave RAM in shared files (--ignore-shared): {problem}")]
    Shared {
        /// The problem.
        problem: String,
    },
    /// The migration failed, and the guest is still at the source.
    #[error("migration failed: {reasons}")]
    Failed {
        /// The reasons, in one line.
        reasons: String,
    },
    /// The guest is lost: neither QEMU has it.
    #[error(
        "migration failed, the source's QEMU ended or does not answer, and the destination does not run the guest: {reasons}"
    )]
    Gone {
        /// The reasons, in one line.
        reasons: String,
    },
    /// The guest has ended during the migration, and its QEMU as well.
    #[error(
        "{how} during the migration, and the guest's QEMU ended; no other QEMU and no file has the guest"
    )]
    GuestEnded {
        /// How the guest ended, as a clause.
        how: String,
    },
    /// The guest is at the destination, but errors occurred.
    #[error("the guest is at the destination, but errors occurred: {reasons}")]
    MovedAnyway {
        /// The errors, in one line.
        reasons: String,
    },
    /// It is unknown if the destination has the guest. The guest is paused at the source.
    #[error(
        "cannot determine whether the destination runs the guest, so the guest is left paused here: {reasons}"
    )]
    InDoubt {
        /// The reasons, in one line.
        reasons: String,
        /// Address of the source's QMP socket.
        qmp: String,
    },
    /// The destination's QEMU has the guest and does not run it. The guest is also paused at the source.
    #[error(
        "the destination's QEMU has the guest, but does not run it; the copy here is left paused: {reasons}"
    )]
    StoppedThere {
        /// The guest's states at both sides, and the reason, in one line.
        reasons: String,
        /// Address of the source's QMP socket.
        qmp: String,
    },
    /// Both QEMUs run the guest, because another QMP client continued the guest at the source.
    #[error(
        "the guest runs at the destination and also in this QEMU, because another client continued it here"
    )]
    RunsTwice {
        /// Address of the source's QMP socket.
        qmp: String,
    },
    /// The guest is at the source, possibly paused: the source's QEMU does not answer.
    #[error(
        "the destination does not run the guest, and never will; the guest may be paused here, where QEMU does not answer: {reasons}"
    )]
    Stalled {
        /// The reasons, in one line.
        reasons: String,
        /// Address of the source's QMP socket.
        qmp: String,
    },
}

impl QemuError {
    /// Returns the next step for the operator; `None` if the error message itself names the next step.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Qmp {
                source: QmpError::Connect { .. },
                ..
            } => Some("give the path of '-qmp unix:PATH,server=on,wait=off' of a running QEMU"),
            Self::Qmp {
                source: QmpError::Timeout { .. },
                ..
            } => Some(
                "QEMU may be stopped; or another client, such as 'hotlift restore' or 'hotlift serve', is connected to this QMP \
                 socket, which serves one client at a time",
            ),
            Self::EndedAtStart { .. } => Some(QEMUS_OWN_WORDS),
            Self::Program { .. } => Some("give the name or path of an installed QEMU"),
            Self::Qmp {
                source: QmpError::Closed { .. } | QmpError::Io { .. },
                ..
            } => Some("QEMU has probably ended; read its output or its log"),
            Self::NotPaused { .. } => Some("restore without --resume, into a new QEMU"),
            Self::OtherFile => Some("give the file of the first restore"),
            Self::Shared { .. } => Some(
                "give both QEMUs '-object memory-backend-file,share=on' with the same mem-path, or migrate without --ignore-shared",
            ),
            Self::Gone { .. } => Some(
                "if the source's QEMU still runs, wait for its answer; if it ended, start the VM again",
            ),
            Self::GuestEnded { .. } => Some("start the VM again"),
            _ => None,
        }
    }
}

/// Replaces the failure reason if this process did not capture QEMU's error output.
pub const QEMUS_OWN_WORDS: &str = "QEMU printed the reason on the terminal that started it";

/// The side of a QEMU in a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The QEMU that sends the guest.
    Source,
    /// The QEMU that receives the guest.
    Destination,
}

impl Side {
    /// Adds this side to a QMP error.
    #[must_use]
    pub fn error(self, source: QmpError) -> QemuError {
        match self {
            Self::Source => at_source(source),
            Self::Destination => at_destination(source),
        }
    }
}

/// Converts a QMP error of the source's QEMU.
#[must_use]
pub fn at_source(source: QmpError) -> QemuError {
    let side = "source";
    QemuError::Qmp { side, source }
}

/// Converts a QMP error of the destination's QEMU.
#[must_use]
pub fn at_destination(source: QmpError) -> QemuError {
    let side = "destination";
    QemuError::Qmp { side, source }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_silent_qemu_has_a_next_step() {
        let silent = QemuError::Qmp {
            side: "source",
            source: QmpError::Timeout {
                command: "greeting".to_owned(),
                waited: Duration::from_secs(2),
            },
        };
        assert!(silent.advice().unwrap().contains("may be stopped"));
    }
}
