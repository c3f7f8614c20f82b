//! Why a QEMU could not be steered, and where its guest is after a migration that did not succeed.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use hotlift::transport::TransportError;
use hotlift_qmp::QmpError;
use hotlift_terminal::error::TerminalError;

/// A QEMU that does not do what it is asked for, or a migration of one that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// What several commands can fail with.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// The program of a QEMU that is to be started.
    #[error("cannot run QEMU as '{}'", program.display())]
    Program {
        /// As it was given.
        program: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// QMP.
    #[error("QEMU at the {side}")]
    Qmp {
        /// Which QEMU.
        side: &'static str,
        /// Its error.
        #[source]
        source: QmpError,
    },
    /// An empty command line of a QEMU.
    #[error("no QEMU was given")]
    NoQemu,
    /// A command line that QEMU does not take.
    #[error("bad QEMU command line: {problem}")]
    Command {
        /// Why.
        problem: String,
    },
    /// A QEMU that was started.
    #[error("QEMU ended before it could be asked for anything ({status})")]
    EndedAtStart {
        /// How.
        status: ExitStatus,
    },
    /// A socket for the stream.
    #[error(transparent)]
    Address(#[from] TransportError),
    /// A source that does something else.
    #[error("this QEMU cannot begin a migration: it is in state '{status}'")]
    Busy {
        /// QEMU's name of its state, or of that of its migration.
        status: String,
    },
    /// A source whose guest an earlier migration or save has left paused.
    #[error(
        "an earlier migration or save has left the guest of this QEMU paused (state 'postmigrate'), and QEMU does not migrate it \
         again as it is"
    )]
    LeftPaused {
        /// Address of the source's QMP socket.
        qmp: String,
    },
    /// A source with a device or a setting that does not migrate.
    #[error("QEMU at the source does not migrate this VM: {reasons}")]
    Blocked {
        /// QEMU's reasons, in one line.
        reasons: String,
    },
    /// A destination that cannot wait for pages.
    #[error(
        "QEMU at the destination cannot run a guest before its pages are there (postcopy): {said}"
    )]
    NoPostcopy {
        /// QEMU's words.
        said: String,
    },
    /// A destination that does something else.
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
    /// It has no guest that waits for pages.
    #[error(
        "QEMU has no guest that waits for pages: it is in state '{status}', and its migration in state \
         '{migration}', not 'postcopy-paused'{refusal}"
    )]
    NotPaused {
        /// QEMU's name of its state.
        status: String,
        /// QEMU's name of the state of its migration.
        migration: String,
        /// QEMU's refusal of 'migrate-recover' behind a colon; empty where it was not asked.
        refusal: String,
    },
    /// It waits for pages of another file.
    #[error("the guest of this QEMU waits for pages of another file than this one")]
    OtherFile,
    /// A QEMU that was started here, with what it has said.
    #[error("QEMU ended before it could be asked for anything ({status}): {errors}")]
    Ended {
        /// How.
        status: ExitStatus,
        /// Its last errors, in one line.
        errors: String,
    },
    /// VMs with differences that QEMU refuses.
    #[error("{differences}; --ignore-differences leaves the decision to QEMU")]
    Differs {
        /// Each of them with both values and the remedy, in one line.
        differences: String,
    },
    /// A capability or parameter that the command refuses.
    #[error(
        "QEMU has the migration {what} '{name}' at '{value}', and nothing was begun: {reason} (set it to '{remedy}')"
    )]
    Setting {
        /// A capability, or a parameter.
        what: &'static str,
        /// QEMU's name.
        name: String,
        /// Its value.
        value: String,
        /// Why it is refused.
        reason: &'static str,
        /// The value that is accepted.
        remedy: String,
    },
    /// Another command has changed the settings of this QEMU, and has not ended.
    #[error(
        "another hotlift command (process {process}) uses this QEMU: wait for its end, or end it"
    )]
    InUse {
        /// Its process id.
        process: u32,
    },
    /// RAM that is to stay in files that both QEMUs map.
    #[error("cannot leave RAM in shared files (--ignore-shared): {problem}")]
    Shared {
        /// Why not.
        problem: String,
    },
    /// The guest stayed at the source.
    #[error("migration failed: {reasons}")]
    Failed {
        /// Why, in one line.
        reasons: String,
    },
    /// The guest is lost.
    #[error(
        "migration failed, and the source's QEMU has ended or does not answer; the destination does \
         not run the guest: {reasons}"
    )]
    Gone {
        /// Why, in one line.
        reasons: String,
    },
    /// The guest has ended, and its QEMU.
    #[error(
        "{how} during the migration, and its QEMU has ended; no other QEMU and no file has the guest"
    )]
    GuestEnded {
        /// How, as a clause.
        how: String,
    },
    /// The guest is where it was to go.
    #[error("the guest is at the destination, though not all went well: {reasons}")]
    MovedAnyway {
        /// What did not go well, in one line.
        reasons: String,
    },
    /// Nobody knows whether the guest is at the destination.
    #[error(
        "nobody knows whether the destination runs the guest, so it is left paused here: {reasons}"
    )]
    InDoubt {
        /// Why, in one line.
        reasons: String,
        /// Where the source's QEMU is spoken to.
        qmp: String,
    },
    /// The destination's QEMU has the guest, and does not run it.
    #[error(
        "the destination's QEMU has the guest, and does not run it; it is left paused here: {reasons}"
    )]
    StoppedThere {
        /// Both states, and why, in one line.
        reasons: String,
        /// Where the source's QEMU is spoken to.
        qmp: String,
    },
    /// Both QEMUs run the guest.
    #[error(
        "the guest runs at the destination, and in this QEMU, too, since somebody has continued it here"
    )]
    RunsTwice {
        /// Where the source's QEMU is spoken to.
        qmp: String,
    },
    /// The guest is at the source, whose QEMU does not answer.
    #[error(
        "the destination does not run the guest and never will, but it may be paused here, as QEMU does not answer: \
         {reasons}"
    )]
    Stalled {
        /// Why, in one line.
        reasons: String,
        /// Where the source's QEMU is spoken to.
        qmp: String,
    },
}

impl QemuError {
    /// What to do next, where that is not plain from the error.
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
                "QEMU may be stopped; or another client holds this QMP socket, which serves one at a time: a 'hotlift restore' or \
                 'hotlift serve' at work, for example",
            ),
            Self::EndedAtStart { .. } => Some(QEMUS_OWN_WORDS),
            Self::Program { .. } => Some("give the name or the path of an installed QEMU"),
            _ => None,
        }
    }
}

/// Where the errors of a QEMU are that was started.
pub const QEMUS_OWN_WORDS: &str = "its own words are on the terminal that it was started from";

/// Which of the two QEMUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one whose guest leaves.
    Source,
    /// The one that gets a guest.
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

/// An error of the source's QEMU.
#[must_use]
pub fn at_source(source: QmpError) -> QemuError {
    let side = "source";
    QemuError::Qmp { side, source }
}

/// An error of the destination's QEMU.
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
