//! Errors of the command: one line for the operator, the next step, and the exit code.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use hotlift::conversation::ConversationError;
use hotlift::guest::GuestError;
use hotlift::options::OptionError;
use hotlift::transport::TransportError;
use hotlift::{Address, MigrationError};
use hotlift_agent::error::AgentError;
use hotlift_agent::values::Ports;
use hotlift_command::error::SharedError;
use hotlift_host::accel::AccelError;
use hotlift_host::error::HostError;
use hotlift_monitor::MonitorError;
use hotlift_qemu::error::{QEMUS_OWN_WORDS, QemuError, at_source};
use hotlift_qmp::QmpError;
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_vmm::CreateError;
use hotlift_vmm::fill::FillError;
use hotlift_vmm::layout::LayoutError;
use hotlift_vmm::verify::VerifyError;

use crate::certs::error::CertsError;
use crate::libvirt::virsh::VirshError;

/// Placeholder in a command line for a value that is unknown here.
const QMP_OF_THE_SOURCE: &str = "QMP-OF-THE-SOURCE";

/// Returns the command to type at the source when the owner of the guest is unknown here.
pub fn settle(qmp: &str) -> String {
    format!(
        "if the destination runs the guest, end the copy: hotlift settle --qmp {qmp} --there; if it does not and never \
         will, let it run here: hotlift settle --qmp {qmp} --here"
    )
}

/// Returns the command to type at the source of a guest that the destination's QEMU has, but does not run.
fn stopped(qmp: &str) -> String {
    format!(
        "the log of the destination's QEMU says why (a disk that is locked, for one); end that QEMU, then let the guest run \
         at the source: hotlift settle --qmp {qmp} --here"
    )
}

/// Exit code if the owner of the guest is unknown, or the guest may be paused.
pub const STANDS_STILL: u8 = 3;

/// Next step for a damaged file.
const SALVAGE: &str = "restore from another copy of the file; or go on without what is damaged of its pages: --salvage puts \
                       zero pages in their place, and names each";

/// Location of the guest's missing pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestFrom {
    /// The original location.
    There,
    /// An undamaged copy of the file.
    Copy,
    /// The file, which has another name now.
    OtherName,
}

/// Returns the next step for the guest of a QEMU that may have ended.
fn resume(answers: bool, rest: RestFrom, resume: &str) -> String {
    let unless = match answers {
        true => "the guest stands still where it needs one of them",
        false => "if its QEMU has ended, the guest has ended, too; otherwise it waits for them",
    };
    let rest = match rest {
        RestFrom::There => "bring it the rest",
        RestFrom::Copy => {
            "bring it the rest from another copy of the file, or with --salvage, which puts zero pages in the place of what is \
             damaged, and names each"
        }
        RestFrom::OtherName => "bring it the rest from the file that it was begun with",
    };
    format!("{unless}; {rest}: {resume}")
}

/// A failed command.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    #[error(transparent)]
    Shared(SharedError),
    #[error("cannot measure the methods")]
    Measure(#[source] HostError),
    #[error("cannot make the guest")]
    Create(#[from] CreateError),
    #[error(transparent)]
    Address(#[from] TransportError),
    #[error("migration failed")]
    Migration(#[from] MigrationError),
    #[error("the guest failed")]
    Guest(#[from] GuestError),
    #[error("the guest's memory is not what it must be")]
    Verify(#[from] VerifyError),
    #[error(transparent)]
    Accel(#[from] AccelError),
    #[error(transparent)]
    Certs(#[from] CertsError),
    #[error("relay failed")]
    Relay(#[source] MigrationError),
    #[error("QEMU at the destination has taken the guest, and has failed since: {reason}")]
    NotTaken { reason: String },
    #[error("QEMU had the guest, and has ended since: {how}")]
    EndedSince { how: String },
    #[error(
        "it is not known whether the guest runs here: {reasons}; its QEMU was left as it is ({qemu})"
    )]
    NotKnown { reasons: String, qemu: String },
    #[error("QEMU has the guest, and does not run it: {reasons} ({qemu})")]
    NotRunning {
        reasons: String,
        qemu: String,
        /// True if a `cont` may run the guest.
        can_run: bool,
        /// True if it came from another QEMU, which keeps it paused.
        has_source: bool,
    },
    #[error("the guest has not all of its pages: {reasons} ({qemu})")]
    PagesMissing {
        reasons: String,
        qemu: String,
        /// True if QEMU answers.
        answers: bool,
        rest: RestFrom,
        resume: String,
    },
    #[error("nothing was begun, and a guest that waits for its pages still does: {reasons}")]
    StillWaits { reasons: String },
    #[error("the guest was not saved: {reason}")]
    Save {
        reason: String,
        advice: Option<&'static str>,
    },
    #[error("the save file cannot be used: {reason}")]
    Show { reason: String },
    #[error("cannot hand out files: {reason}")]
    Files { reason: String },
    #[error("the guest was not restored: {reasons}")]
    Restore { reasons: String },
    #[error("the guest was not restored: {reasons}")]
    Damaged { reasons: String },
    #[error("this QEMU has no guest to settle: {problem}")]
    NothingToSettle { problem: String },
    #[error("the guest was taken to be at the destination, and its paused copy here was ended")]
    EndedCopy,
    #[error("migration failed: the guest was taken not to be at the destination, and went on here")]
    SettledHere,
    #[error(transparent)]
    Qemu(QemuError),
    /// Differences already shown in a table, with their remedies.
    #[error("QEMU refuses {count} of the differences above: a migration would fail")]
    Different { count: usize },
    /// 'hotlift serve' makes no progress.
    #[error("'hotlift serve' at {address} failed: {missing} within {limit:?}")]
    ServeSilent {
        address: Address,
        missing: &'static str,
        limit: Duration,
        has_hello: bool,
    },
    /// The connection for pages failed, although the one for messages was made.
    #[error(transparent)]
    DataPort(QemuError),
    #[error(transparent)]
    Monitor(MonitorError),
    #[error(transparent)]
    Agent(Box<AgentError>),
    #[error("no agent listens at {}", control.display())]
    NoAgentHere {
        control: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot ask the agent at {}", control.display())]
    NoAgent {
        control: PathBuf,
        #[source]
        source: QmpError,
    },
    #[error("the agent refuses: {reason}")]
    AgentRefuses { reason: String },
    #[error("{0}: give a loopback address, or --control-from-other-hosts too")]
    OtherHosts(MonitorError),
    #[error(transparent)]
    Virsh(#[from] VirshError),
    #[error("with {flag}, --to is {expected}")]
    WrongTo {
        flag: &'static str,
        expected: &'static str,
    },
    #[error("'{uri}' names no host whose agent could be asked: give --agent tcp:HOST:PORT")]
    NoHost { uri: String },
    #[error(
        "no port of {ports} is free on loopback: give others that the agent there allows, --ports FIRST-LAST"
    )]
    NoPort { ports: Ports },
    #[error("disks are not copied this way: they need 'virsh migrate' and an agent on both hosts")]
    DiskCopies,
    #[error("{domain} does not run at {uri}")]
    NoGuest { domain: String, uri: String },
    #[error("no domain is named {typed}, neither here nor at a destination")]
    NoDomain { typed: String },
    #[error("the agent of the destination sent no answer within {limit:?}")]
    AgentSilent { limit: Duration },
    #[error("cannot reach the agent at {agent}")]
    NoAgentThere {
        agent: Address,
        #[source]
        source: Box<SharedError>,
    },
    #[error("migration failed, and the domain stayed here: {reason}")]
    DomainStayed { reason: String },
    #[error("migration failed, and it is not certain where the domain runs: {reason}")]
    DomainInDoubt { reason: String },
    #[error("the domain ended before it could move, and is on neither host: {reason}")]
    DomainEnded { reason: String },
    #[error("{stayed} of {of} domains stayed here")]
    DomainsStayed { stayed: usize, of: usize },
    #[error("{ended} of {of} domains ended before they could move, and are on neither host")]
    DomainsEnded { ended: usize, of: usize },
    #[error("it is not certain where {domains} of the domains run")]
    DomainsInDoubt { domains: usize },
    #[error("--incoming=defer needs --qmp or --monitor: somebody has to say 'migrate-incoming'")]
    Deferred,
}

impl CommandError {
    /// Returns the error and its causes in one line.
    pub fn line(&self) -> String {
        error_line(self)
    }

    /// Returns the next step, where the error does not show it.
    pub fn advice(&self) -> Option<String> {
        match self {
            Self::Qemu(QemuError::InDoubt { qmp, .. }) => Some(settle(qmp)),
            Self::Qemu(QemuError::StoppedThere { qmp, .. }) => Some(stopped(qmp)),
            Self::Qemu(QemuError::LeftPaused { qmp }) => Some(format!(
                "if no other QEMU has the guest, let it run here first: hotlift settle --qmp {qmp} --here; if one has it, end this \
                 copy: hotlift settle --qmp {qmp} --there"
            )),
            Self::Qemu(QemuError::RunsTwice { qmp }) => Some(format!(
                "end one of them at once; the copy here: 'quit' at {qmp}"
            )),
            Self::NotRunning {
                can_run,
                has_source,
                ..
            } => Some(match (has_source, can_run) {
                (true, _) => stopped(QMP_OF_THE_SOURCE),
                (false, true) => "its log says why (a disk that is locked, for one); once the cause is gone, 'cont' runs the \
                                  guest; or end this QEMU, and restore the guest again"
                    .to_owned(),
                (false, false) => "its log says why (a disk that is locked, for one); no 'cont' runs the guest: end this QEMU, and \
                                   restore the guest into another"
                    .to_owned(),
            }),
            Self::Qemu(QemuError::Stalled { qmp, .. }) => Some(format!(
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
            Self::PagesMissing {
                answers,
                rest,
                resume: line,
                ..
            } => Some(resume(*answers, *rest, line)),
            _ => self.fixed_advice().map(str::to_owned),
        }
    }

    /// Returns the next step of errors for which it is constant.
    fn fixed_advice(&self) -> Option<&'static str> {
        match self {
            Self::Shared(error) => error.advice(),
            Self::Create(CreateError::Kvm(_)) => {
                Some("use --guest threads on a host without /dev/kvm, or --guest auto")
            }
            Self::Migration(MigrationError::Transport(TransportError::Connect { .. })) => Some(
                "start 'hotlift guest run --incoming URI' with the same --guest, --ram and --vcpus first",
            ),
            Self::Relay(MigrationError::Transport(TransportError::Connect { .. })) => {
                Some("start the QEMU or the relay that is to listen there first")
            }
            Self::Certs(error) => error.advice(),
            Self::Agent(error) => error.advice(),
            Self::Address(TransportError::Listen { source, .. })
                if source.kind() == ErrorKind::AddrInUse =>
            {
                Some(
                    "choose another port, or end the process that listens there ('ss -ltnp' names it)",
                )
            }
            Self::ServeSilent {
                has_hello: false, ..
            } => Some(
                "that process may be stopped, or serve another source: look at it on the destination host, or start it again",
            ),
            Self::ServeSilent {
                has_hello: true, ..
            } => Some(
                "its QEMU may wait for a disk, for memory or for another QMP client: look at the output of 'hotlift serve'",
            ),
            Self::Different { .. } => Some(
                "start the destination's QEMU as the lines below the table describe; 'hotlift migrate --ignore-differences' leaves \
                 the decision to QEMU",
            ),
            Self::Save { advice, .. } => *advice,
            Self::AgentSilent { .. } => {
                Some("its log on that host names the reason: journalctl -u hotlift-agent")
            }
            Self::Virsh(VirshError::Refused { said, .. })
                if said.contains("connect to the hypervisor") =>
            {
                Some(
                    "check that libvirt runs there, and that this user may use it: virsh --connect URI list",
                )
            }
            Self::DataPort(_) => Some(
                "the pages go to a port of their own, which a firewall must let pass too: 'hotlift serve --data-port PORT' sets it",
            ),
            // QEMU's message for a disk that another process has locked.
            Self::Qemu(QemuError::Failed { reasons })
                if reasons.contains("Failed to get") && reasons.contains("lock") =>
            {
                Some(
                    "another process uses a disk of this VM: end it, and migrate again; QEMU's own log names the file",
                )
            }
            // QEMU's message for RAM in a file on disk.
            Self::Qemu(QemuError::NoPostcopy { said }) if said.contains("TMPFS") => Some(
                "give that QEMU its RAM in anonymous memory, memfd, tmpfs or hugetlbfs; or restore without --lazy",
            ),
            Self::Qemu(QemuError::NoPostcopy { .. }) => Some(
                "if QEMU's log names userfaultfd: 'sysctl vm.unprivileged_userfaultfd=1', or give QEMU's user read and write access \
                 to /dev/userfaultfd (Linux 6.1 and newer)",
            ),
            Self::Qemu(QemuError::Busy { status }) if status == "postcopy-active" => Some(
                "a lazy restore or a postcopy brings this guest its pages: wait until it has all of them",
            ),
            Self::Qemu(QemuError::Busy { status }) if status == "postcopy-paused" => Some(
                "the guest waits for pages; those of a lazy restore come with: hotlift restore --lazy --resume FILE --qmp ADDRESS; \
                 those of a postcopy: end it by 'migrate-recover', and 'migrate' with resume=true at its source",
            ),
            Self::Qemu(QemuError::Busy { .. }) => {
                Some("wait for the end of what is under way, or 'migrate_cancel' it")
            }
            Self::Qemu(QemuError::Blocked { .. }) => {
                Some("remove the device, or change the setting, that QEMU names")
            }
            Self::Qemu(QemuError::NotWaiting { migration, .. })
                if migration == "postcopy-paused" =>
            {
                Some(
                    "its guest is there, and waits for pages; those of a lazy restore come with: hotlift restore --lazy --resume",
                )
            }
            Self::Qemu(QemuError::NotWaiting { .. }) => {
                Some("start a new QEMU with '-incoming defer'")
            }
            Self::NotTaken { .. } => Some(QEMUS_OWN_WORDS),
            Self::Damaged { .. } => Some(SALVAGE),
            Self::Relay(MigrationError::PagesMissing { .. }) => Some(
                "start both relays again; once both QEMUs say 'postcopy-paused': 'migrate-recover' at the destination, then \
                 'migrate' with resume=true at the source",
            ),
            Self::Relay(MigrationError::GivenBack { .. }) => Some(
                "end the destination's QEMU if it has not ended by itself; once the source's 'query-status' is 'running', \
                 migrate again",
            ),
            Self::NoAgentHere { .. } | Self::NoAgent { .. } => Some(
                "is it running, and may you open its socket? systemctl status hotlift-agent; if its configuration has \
                 another one: --control PATH",
            ),
            Self::Virsh(VirshError::Run(_)) => {
                Some("install libvirt's clients (Debian: libvirt-clients)")
            }
            Self::DomainsStayed { .. } => {
                Some("the same command again goes on with those that are left")
            }
            Self::NoDomain { .. } => {
                Some("nothing was moved; 'virsh list --all' has the names of this host's domains")
            }
            Self::DomainEnded { .. } | Self::DomainsEnded { .. } => Some(
                "if its guest was not shut down: its QEMU's last words are in /var/log/libvirt/qemu on both hosts",
            ),
            Self::NoAgentThere { .. } => {
                Some("start 'hotlift agent' there, with certificates of the same CA")
            }
            Self::DomainInDoubt { .. } | Self::DomainsInDoubt { .. } => Some(
                "ask libvirt on both hosts: virsh list --all; one that is paused here and runs nowhere else goes on by 'virsh \
                 resume'; of one that runs on both hosts end one at once: virsh destroy",
            ),
            Self::NothingToSettle { .. } => Some(
                "only a guest that a migration has left paused is settled: see 'query-status' and 'query-migrate'",
            ),
            Self::Qemu(error) => error.advice(),
            _ => None,
        }
    }

    /// Returns 1; 2 for invalid options, as for any usage error; 3 if the owner of the guest is unknown, or it may be paused;
    /// 130 after a signal, as shells do.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Migration(MigrationError::InDoubt | MigrationError::PagesMissing { .. })
            | Self::Relay(MigrationError::InDoubt | MigrationError::PagesMissing { .. })
            | Self::Qemu(
                QemuError::InDoubt { .. }
                | QemuError::Stalled { .. }
                | QemuError::StoppedThere { .. }
                | QemuError::RunsTwice { .. },
            )
            | Self::NotKnown { .. }
            | Self::NotRunning {
                has_source: true, ..
            }
            | Self::NotRunning { can_run: true, .. }
            | Self::DomainInDoubt { .. }
            | Self::DomainsInDoubt { .. }
            | Self::PagesMissing { .. }
            | Self::StillWaits { .. }
            | Self::EndedCopy => ExitCode::from(STANDS_STILL),
            // The guest is at its target.
            Self::Qemu(QemuError::MovedAnyway { .. }) => ExitCode::SUCCESS,
            Self::Migration(MigrationError::Cancelled)
            | Self::Relay(MigrationError::Cancelled)
            | Self::Terminal(TerminalError::Interrupted) => ExitCode::from(130),
            _ if self.is_usage() => ExitCode::from(2),
            _ => ExitCode::FAILURE,
        }
    }

    /// Returns true if the command line is wrong, and nothing was started.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Shared(error) => error.is_usage(),
            Self::Certs(error) => error.is_usage(),
            Self::WrongTo { .. } | Self::NoHost { .. } | Self::DiskCopies => true,
            _ => false,
        }
    }
}

/// Converts the parts of [`SharedError`] to errors of a command.
macro_rules! shared_errors {
    ($($error:ty),*) => {
        $(
            impl From<$error> for CommandError {
                fn from(error: $error) -> Self {
                    SharedError::from(error).into()
                }
            }
        )*
    };
}

shared_errors!(OptionError, LayoutError, FillError, ConversationError);

impl From<SharedError> for CommandError {
    fn from(error: SharedError) -> Self {
        match error {
            SharedError::Terminal(error) => Self::Terminal(error),
            error => Self::Shared(error),
        }
    }
}

impl From<HostError> for CommandError {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Qmp(error) => at_source(error).into(),
            error => Self::Measure(error),
        }
    }
}

impl From<MonitorError> for CommandError {
    fn from(error: MonitorError) -> Self {
        match error {
            MonitorError::Terminal(error) => Self::Terminal(error),
            error @ MonitorError::OtherHosts { .. } => Self::OtherHosts(error),
            error => Self::Monitor(error),
        }
    }
}

impl From<QemuError> for CommandError {
    fn from(error: QemuError) -> Self {
        match error {
            QemuError::Terminal(error) => Self::Terminal(error),
            QemuError::Address(error) => Self::Address(error),
            error => Self::Qemu(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(error: impl Into<CommandError>) -> (String, String) {
        let error = error.into();
        (error.line(), error.advice().unwrap_or_default())
    }

    #[test]
    fn a_port_in_use_is_no_bad_address_and_has_an_advice() {
        let in_use = TransportError::Listen {
            uri: "tcp::4445".to_owned(),
            source: ErrorKind::AddrInUse.into(),
        };
        let (line, advice) = of(QemuError::Address(in_use));
        assert_eq!(line, "failed to listen on 'tcp::4445': address in use");
        assert!(advice.starts_with("choose another port"), "{advice}");
    }

    #[test]
    fn a_guest_that_was_left_paused_or_waits_for_pages_has_a_command_to_type() {
        let qmp = "unix:/q".to_owned();
        let (line, advice) = of(QemuError::LeftPaused { qmp });
        assert!(line.contains("earlier migration or save"), "{line}");
        for command in [
            "hotlift settle --qmp unix:/q --here",
            "hotlift settle --qmp unix:/q --there",
        ] {
            assert!(advice.contains(command), "{advice}");
        }
        let busy = |status: &str| QemuError::Busy {
            status: status.to_owned(),
        };
        assert!(of(busy("postcopy-paused")).1.contains("--lazy --resume"));
        assert!(of(busy("postcopy-active")).1.contains("lazy restore"));
        assert!(of(busy("active")).1.contains("'migrate_cancel'"));
    }

    #[test]
    fn a_qemu_without_postcopy_has_the_sysctl_and_a_blocked_port_its_option() {
        let said = "Postcopy is not supported".to_owned();
        let (line, advice) = of(QemuError::NoPostcopy { said });
        assert!(line.ends_with("(postcopy): Postcopy is not supported"));
        assert!(advice.contains("vm.unprivileged_userfaultfd=1"), "{advice}");
        let reasons = "its QEMU: Failed to get \"write\" lock".to_owned();
        let (_, advice) = of(QemuError::Failed { reasons });
        assert!(advice.contains("another process uses a disk"), "{advice}");
        let said = "Host backend files need to be TMPFS or HUGETLBFS only".to_owned();
        let (_, advice) = of(QemuError::NoPostcopy { said });
        assert!(advice.contains("without --lazy"), "{advice}");
        let reasons = "cannot reach the other side".to_owned();
        let blocked = CommandError::DataPort(QemuError::Failed { reasons });
        assert_eq!(
            blocked.line(),
            "migration failed: cannot reach the other side"
        );
        assert!(blocked.advice().unwrap().contains("--data-port"));
    }
}
