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
    /// Errors that several commands share.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// The QEMU program cannot be started.
    #[error("cannot run QEMU as '{}'", program.display())]
    Program {
        /// The path as given.
        program: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A QMP error.
    #[error("QEMU at the {side}")]
    Qmp {
        /// The side of the QEMU.
        side: &'static str,
        /// Its error.
        #[source]
        source: QmpError,
    },
    /// The QEMU command line is empty.
    #[error("no QEMU was given")]
    NoQemu,
    /// The QEMU command line cannot be used.
    #[error("invalid QEMU command line: {problem}")]
    Command {
        /// The reason.
        problem: String,
    },
    /// A started QEMU has ended.
    #[error("QEMU ended before it answered over QMP ({status})")]
    EndedAtStart {
        /// Its exit status.
        status: ExitStatus,
    },
    /// The socket for the stream has an error.
    #[error(transparent)]
    Address(#[from] TransportError),
    /// The source's QEMU is in another state.
    #[error("this QEMU cannot start a migration: it is in state '{status}'")]
    Busy {
        /// QEMU's name of its state, or of its migration's state.
        status: String,
    },
    /// An earlier migration or save has left the source's guest paused.
    #[error(
        "an earlier migration or save left the guest of this QEMU paused (state 'postmigrate'), and QEMU does not migrate it \
         in this state"
    )]
    LeftPaused {
        /// Address of the source's QMP socket.
        qmp: String,
    },
    /// The source has a device or a setting that does not migrate.
    #[error("QEMU at the source cannot migrate this VM: {reasons}")]
    Blocked {
        /// QEMU's reasons, in one line.
        reasons: String,
    },
    /// The destination does not support postcopy.
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
    /// A started QEMU has ended, with errors.
    #[error("QEMU ended before it answered over QMP ({status}): {errors}")]
    Ended {
        /// Its exit status.
        status: ExitStatus,
        /// Its last errors, in one line.
        errors: String,
    },
    /// The VMs have differences that QEMU refuses.
    #[error(
        "{differences}; --ignore-differences starts the migration nevertheless, and QEMU decides"
    )]
    Differs {
        /// All differences with both values and the remedy, in one line.
        differences: String,
    },
    /// The command refuses a capability or parameter.
    #[error(
        "cannot migrate while QEMU's migration {what} '{name}' is '{value}': {reason} (set it to '{remedy}')"
    )]
    Setting {
        /// "capability" or "parameter".
        what: &'static str,
        /// Name in QEMU.
        name: String,
        /// Its value.
        value: String,
        /// Reason for the refusal.
        reason: &'static str,
        /// The accepted value.
        remedy: String,
    },
    /// Another command has changed the settings of this QEMU, and still runs.
    #[error(
        "another hotlift command (process {process}) uses this QEMU: wait until it ends, or end it"
    )]
    InUse {
        /// Its process id.
        process: u32,
    },
    /// RAM cannot stay in files that both QEMUs map.
    #[error("cannot leave RAM in shared files (--ignore-shared): {problem}")]
    Shared {
        /// The reason.
        problem: String,
    },
    /// The guest stayed at the source.
    #[error("migration failed: {reasons}")]
    Failed {
        /// The reasons, in one line.
        reasons: String,
    },
    /// The guest is lost.
    #[error(
        "migration failed, the source's QEMU ended or does not answer, and the destination does not run the guest: {reasons}"
    )]
    Gone {
        /// The reasons, in one line.
        reasons: String,
    },
    /// The guest and its QEMU have ended.
    #[error(
        "{how} during the migration, and its QEMU ended; no other QEMU and no file has the guest"
    )]
    GuestEnded {
        /// The way it ended, as a clause.
        how: String,
    },
    /// The guest is at the destination, but errors occurred.
    #[error("the guest is at the destination, but errors occurred: {reasons}")]
    MovedAnyway {
        /// The errors, in one line.
        reasons: String,
    },
    /// The guest's presence at the destination is unknown.
    #[error(
        "cannot determine whether the destination runs the guest, so it is left paused here: {reasons}"
    )]
    InDoubt {
        /// The reasons, in one line.
        reasons: String,
        /// Address of the source's QMP socket.
        qmp: String,
    },
    /// The destination's QEMU has the guest and does not run it.
    #[error(
        "the destination's QEMU has the guest, but does not run it; it is left paused here: {reasons}"
    )]
    StoppedThere {
        /// Both states, and the reason, in one line.
        reasons: String,
        /// Address of the source's QMP socket.
        qmp: String,
    },
    /// Both QEMUs run the guest.
    #[error(
        "the guest runs at the destination and also in this QEMU, because another client continued it here"
    )]
    RunsTwice {
        /// Address of the source's QMP socket.
        qmp: String,
    },
    /// The guest is at the source, whose QEMU does not answer.
    #[error(
        "the destination does not run the guest, and never will; the guest may be paused here: QEMU does not answer: {reasons}"
    )]
    Stalled {
        /// The reasons, in one line.
        reasons: String,
        /// Address of the source's QMP socket.
        qmp: String,
    },
}

impl QemuError {
    /// Returns the next step for the operator, if the error itself does not name it.
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
                "QEMU may be stopped; or another client, such as 'hotlift restore' or 'hotlift serve', holds this QMP socket, \
                 which serves one client at a time",
            ),
            Self::EndedAtStart { .. } => Some(QEMUS_OWN_WORDS),
            Self::Program { .. } => Some("give the name or path of an installed QEMU"),
            Self::Qmp {
                source: QmpError::Closed { .. } | QmpError::Io { .. },
                ..
            } => Some("QEMU has probably ended: read its output or its log"),
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

/// Text for an error of QEMU that this process did not capture.
pub const QEMUS_OWN_WORDS: &str = "QEMU printed the reason on the terminal that started it";

/// One of the two QEMUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The QEMU that sends the guest.
    Source,
    /// The QEMU that receives the guest.
    Destination,
}

impl Side {
    /// Returns an error of this QEMU.
    #[must_use]
    pub fn error(self, source: QmpError) -> QemuError {
        match self {
            Self::Source => at_source(source),
            Self::Destination => at_destination(source),
        }
    }
}

/// Returns an error of the source's QEMU.
#[must_use]
pub fn at_source(source: QmpError) -> QemuError {
    let side = "source";
    QemuError::Qmp { side, source }
}

/// Returns an error of the destination's QEMU.
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
