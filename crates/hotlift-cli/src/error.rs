//! Why the command failed: one line for the operator, what to do next, and the exit code.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use hotlift::MigrationError;
use hotlift::guest::GuestError;
use hotlift::options::OptionError;
use hotlift::transport::TransportError;
use hotlift_idxd::SysfsError;
use hotlift_qmp::QmpError;
use hotlift_qmp::server::Refusal;
use hotlift_vmm::CreateError;
use hotlift_vmm::fill::FillError;
use hotlift_vmm::layout::LayoutError;
use hotlift_vmm::verify::VerifyError;

use crate::advise::error::AdviseError;
use crate::args::error_line;
use crate::qemu::control::ControlError;

/// In a line to type, what is not known here.
const QMP_OF_THE_SOURCE: &str = "QMP-OF-THE-SOURCE";

/// What to type at the source when nobody here knows who has the guest.
pub fn settle(qmp: &str) -> String {
    format!(
        "if the destination runs the guest, end the copy: hotlift settle --qmp {qmp} --there; if it does not and never \
         will, let it run here: hotlift settle --qmp {qmp} --here"
    )
}

/// A failed command.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("cannot advise")]
    Advise(#[from] AdviseError),
    #[error("bad option")]
    Option(#[from] OptionError),
    #[error("there is no such guest")]
    Layout(#[from] LayoutError),
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
    #[error("cannot look at {}", path.display())]
    Look {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the driver idxd says something unexpected")]
    Idxd(#[from] SysfsError),
    #[error("cannot write the result")]
    Output(#[source] std::io::Error),
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
    #[error("relay failed")]
    Relay(#[source] MigrationError),
    #[error("QEMU at the {side}")]
    Qmp {
        side: &'static str,
        #[source]
        source: QmpError,
    },
    #[error("this QEMU cannot begin a migration: it is in state '{status}'")]
    Busy { status: String },
    #[error(
        "QEMU at the destination does not wait for a migration: it is in state '{status}', and its \
         migration in state '{migration}'"
    )]
    NotWaiting { status: String, migration: String },
    #[error("QEMU at the destination has taken the guest, and has failed since: {reason}")]
    NotTaken { reason: String },
    #[error(
        "it is not known whether the guest runs here: {reasons}; its QEMU was left as it is ({qemu})"
    )]
    NotKnown { reasons: String, qemu: String },
    #[error("the guest was not restored: {reasons}")]
    Restore { reasons: String },
    #[error("no QEMU was given")]
    NoQemu,
    #[error("bad QEMU command line: {problem}")]
    QemuCommand { problem: String },
    #[error("QEMU ended before it could be asked for anything ({status})")]
    QemuEnded { status: std::process::ExitStatus },
    #[error("QEMU ended before it could be asked for anything ({status}): {words}")]
    QemuGaveUp {
        status: std::process::ExitStatus,
        words: String,
    },
    #[error("talking to 'hotlift serve' failed")]
    Control(#[from] ControlError),
    #[error("cannot reach 'hotlift bench --serve'")]
    NoFar(#[source] ControlError),
    #[error("cannot reach 'hotlift serve'")]
    NoServe {
        #[source]
        source: TransportError,
    },
    #[error("{flag} takes tcp:HOST:PORT")]
    OnlyTcp { flag: &'static str },
    #[error("more than {most} have connected, and it has said nothing for longest")]
    Crowd { most: usize },
    #[error("another survey is under way")]
    Surveying,
    #[error("the other side said nothing for {waited:?}")]
    Silent { waited: Duration },
    #[error("{what} differs: the source has {source_has}, the destination has {destination_has}")]
    Differs {
        what: &'static str,
        source_has: String,
        destination_has: String,
    },
    #[error(
        "migration failed, and the source's QEMU has ended or does not answer; the destination does \
         not run the guest: {reasons}"
    )]
    Gone { reasons: String },
    #[error("the guest is at the destination, though not all went well: {reasons}")]
    MovedAnyway { reasons: String },
    #[error("the destination refuses: {reason}")]
    Refused { reason: String },
    #[error("migration failed: {reasons}")]
    Moving { reasons: String },
    #[error(
        "nobody knows whether the destination runs the guest, so it is left paused here: {reasons}"
    )]
    InDoubt { reasons: String, qmp: String },
    #[error(
        "the destination does not run the guest and never will, but it may be paused here, as QEMU does not answer: \
         {reasons}"
    )]
    Stalled { reasons: String, qmp: String },
    #[error("this QEMU has no guest to settle: {problem}")]
    NothingToSettle { problem: String },
    #[error("the guest was taken to be at the destination, and its paused copy here was ended")]
    EndedCopy,
    #[error("migration failed: the guest was taken not to be at the destination, and went on here")]
    SettledHere,
    #[error("cannot serve {address}")]
    Serve {
        address: String,
        #[source]
        source: std::io::Error,
    },
    #[error("the guest has not come: {reason}")]
    Incoming { reason: String },
    #[error(transparent)]
    Monitor(#[from] Refusal),
    #[error("--incoming=defer needs --qmp or --monitor: somebody has to say 'migrate-incoming'")]
    Deferred,
    #[error("the rows of suite {suite} set {option} themselves: leave out --with {option}")]
    SuiteSets {
        suite: &'static str,
        option: &'static str,
    },
    #[error("no link as asked for: {problem}")]
    Link { problem: String },
    #[error("interrupted")]
    Interrupted,
}

impl CommandError {
    /// An error of the QEMU at one side.
    pub fn qmp(side: &'static str, source: QmpError) -> Self {
        Self::Qmp { side, source }
    }

    /// The error and its causes, in one line.
    pub fn line(&self) -> String {
        error_line(self)
    }

    /// What to do next, where that is not plain from the error.
    pub fn advice(&self) -> Option<String> {
        match self {
            Self::InDoubt { qmp, .. } => Some(settle(qmp)),
            Self::Stalled { qmp, .. } => Some(format!(
                "when QEMU answers again, let the guest run here: hotlift settle --qmp {qmp} --here"
            )),
            Self::NotKnown { .. } => Some(format!(
                "ask this QEMU's 'query-status' whether it runs the guest; if it does not, end it; {}",
                settle(QMP_OF_THE_SOURCE)
            )),
            Self::Relay(MigrationError::InDoubt) => Some(settle(QMP_OF_THE_SOURCE)),
            Self::Relay(MigrationError::Released { .. }) => Some(format!(
                "let it run there: hotlift settle --qmp {QMP_OF_THE_SOURCE} --here"
            )),
            _ => self.fixed_advice().map(str::to_owned),
        }
    }

    /// The same, where it is always the same.
    fn fixed_advice(&self) -> Option<&'static str> {
        match self {
            Self::Create(CreateError::Kvm(_)) => {
                Some("use --guest threads on a host without /dev/kvm, or --guest auto")
            }
            Self::Migration(MigrationError::Transport(TransportError::Connect { .. })) => Some(
                "start 'hotlift guest run --incoming URI' with the same --guest, --ram and --vcpus first",
            ),
            Self::Relay(MigrationError::Transport(TransportError::Connect { .. })) => {
                Some("start the QEMU or the relay that is to listen there first")
            }
            Self::Qmp {
                source: QmpError::Connect { .. },
                ..
            } => Some("give the path of '-qmp unix:PATH,server=on,wait=off' of a running QEMU"),
            Self::Qmp {
                source: QmpError::Timeout { .. },
                ..
            } => Some("a QMP socket serves one client at a time: see whether another one holds it"),
            Self::Busy { .. } => {
                Some("wait for the end of what is under way, or 'migrate_cancel' it")
            }
            Self::NotWaiting { .. } => Some("start a new QEMU with '-incoming defer'"),
            Self::QemuEnded { .. } | Self::NotTaken { .. } => {
                Some("its own words are on the terminal that it was started from")
            }
            Self::NoServe { .. } => Some("start 'hotlift serve' on the destination host first"),
            Self::NothingToSettle { .. } => Some(
                "only a guest that a migration has left paused is settled: see 'query-status' and 'query-migrate'",
            ),
            _ => None,
        }
    }

    /// 1; 2 if options are not what they can be, as for any usage; 3 if nobody knows who has the guest, or it may stand still;
    /// 130 if a signal ended it, as shells have it.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Migration(MigrationError::InDoubt)
            | Self::Relay(MigrationError::InDoubt)
            | Self::InDoubt { .. }
            | Self::Stalled { .. }
            | Self::NotKnown { .. }
            | Self::EndedCopy => ExitCode::from(3),
            // The guest is where it was to go.
            Self::MovedAnyway { .. } => ExitCode::SUCCESS,
            Self::Migration(MigrationError::Cancelled)
            | Self::Relay(MigrationError::Cancelled)
            | Self::Interrupted => ExitCode::from(130),
            _ if self.is_usage() => ExitCode::from(2),
            _ => ExitCode::FAILURE,
        }
    }

    /// Whether the command line is to blame, and nothing was begun.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Option(OptionError::NoAccelerator { .. }) => false,
            Self::Option(_) | Self::Layout(_) => true,
            _ => false,
        }
    }
}
