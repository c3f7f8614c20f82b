//! Errors of the commands: each has one line for the operator, the next step, and an exit code.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use hotlift::conversation::ConversationError;
use hotlift::guest::GuestError;
use hotlift::options::OptionError;
use hotlift::transport::TransportError;
use hotlift::{Address, MigrationError};
use hotlift_agent::error::AgentError;
use hotlift_agent::values::Ports;
use hotlift_command::error::{SharedError, after_handshake};
use hotlift_command::program::USAGE;
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

/// Placeholder in a command line for the source's QMP socket, which this host does not know.
const QMP_OF_THE_SOURCE: &str = "QMP-OF-THE-SOURCE";

/// Returns the next step after a migration with unknown result: the command to type at the source, whose QMP socket is `qmp`.
pub fn settle(qmp: &str) -> String {
    format!(
        "if the destination runs the guest, end the paused copy here: hotlift settle --qmp {qmp} --there; if it does not and \
         never will, run the guest here: hotlift settle --qmp {qmp} --here"
    )
}

/// Returns the next step if the destination's QEMU has the guest, but does not run it: the command to type at the source.
fn stopped(qmp: &str) -> String {
    format!(
        "the log of the destination's QEMU has the cause (such as a locked disk); end that QEMU, then run the guest at the \
         source: hotlift settle --qmp {qmp} --here"
    )
}

/// Exit code if the host that owns the guest is unknown, or the guest may be paused.
pub const GUEST_UNCERTAIN: u8 = 3;

/// Next step for a restore from a damaged file.
const SALVAGE: &str = "restore from another copy of the file, or replace its damaged pages with zero pages: --salvage, which \
                       lists them";

/// Source from which a resumed lazy restore loads the guest's missing pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingPagesFrom {
    /// The same file or server as before.
    There,
    /// An undamaged copy of the damaged file.
    Copy,
    /// The file of the first restore, which now has another name.
    OtherName,
}

/// Returns the next step for a guest without all its pages. `answers` is false if the guest's QEMU may have ended. `resume` is
/// the command that loads the remaining pages from `rest`.
fn resume(answers: bool, rest: MissingPagesFrom, resume: &str) -> String {
    let unless = match answers {
        true => "each vCPU of the guest waits at the first missing page that it needs",
        false => {
            "if the guest's QEMU has ended, the guest has ended too; otherwise it waits for the missing pages"
        }
    };
    let rest = match rest {
        MissingPagesFrom::There => "send the rest",
        MissingPagesFrom::Copy => {
            "send the rest from another copy of the file, or with --salvage, which replaces damaged pages with zero pages and \
             lists them"
        }
        MissingPagesFrom::OtherName => "send the rest from the file of the first restore",
    };
    format!("{unless}; {rest}: {resume}")
}

/// Returns the next step after listening failed with an error of `kind`; `None` if there is no advice.
fn not_listening(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::AddrInUse => {
            Some("choose another port, or end the process that listens there ('ss -ltnp' names it)")
        }
        ErrorKind::AddrNotAvailable => {
            Some("give an address of this host ('ip address' lists them)")
        }
        ErrorKind::PermissionDenied => {
            Some("give a port from 1024 on, or a folder in which this user may create a socket")
        }
        _ => None,
    }
}

/// Error with which a command ends.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    #[error(transparent)]
    Shared(SharedError),
    #[error("cannot measure the methods")]
    Measure(#[source] HostError),
    #[error("cannot create the guest")]
    Create(#[from] CreateError),
    #[error(transparent)]
    Address(#[from] TransportError),
    #[error("migration failed")]
    Migration(#[from] MigrationError),
    #[error("the guest failed")]
    Guest(#[from] GuestError),
    #[error("the check of the guest's memory failed")]
    Verify(#[from] VerifyError),
    #[error(transparent)]
    Accel(#[from] AccelError),
    #[error(transparent)]
    Certs(#[from] CertsError),
    #[error("relay failed")]
    Relay(#[source] MigrationError),
    #[error("QEMU at the destination received the guest, then failed: {reason}")]
    NotTaken { reason: String },
    #[error("QEMU received the guest, then ended: {how}")]
    EndedSince { how: String },
    #[error(
        "cannot determine whether the guest runs here: {reasons}; hotlift did not end its QEMU ({qemu})"
    )]
    NotKnown { reasons: String, qemu: String },
    #[error("QEMU has the guest, but does not run it: {reasons} ({qemu})")]
    NotRunning {
        reasons: String,
        qemu: String,
        /// True if QEMU's command `cont` may run the guest.
        can_run: bool,
        /// True if the guest came from another QEMU, which keeps a paused copy.
        has_source: bool,
    },
    #[error("the guest lacks some of its pages: {reasons} ({qemu})")]
    PagesMissing {
        reasons: String,
        qemu: String,
        /// True if QEMU answers on its QMP socket.
        answers: bool,
        rest: MissingPagesFrom,
        resume: String,
    },
    #[error("nothing was started; the guest still waits for its pages: {reasons}")]
    StillWaits { reasons: String },
    #[error("the guest was not saved: {reason}")]
    Save {
        reason: String,
        advice: Option<&'static str>,
    },
    #[error("the save file cannot be used: {reason}")]
    Show { reason: String },
    #[error("cannot serve files: {reason}")]
    Files { reason: String },
    #[error("the guest was not restored: {reasons}")]
    Restore { reasons: String },
    #[error("the guest was not restored: {reasons}")]
    Damaged { reasons: String },
    #[error("this QEMU has no guest to settle: {problem}")]
    NothingToSettle { problem: String },
    #[error(
        "the paused copy of the guest was ended here, as the destination has the guest ('quit' or 'hotlift settle \
         --there')"
    )]
    EndedCopy,
    #[error(
        "migration failed: the guest was continued here, as the destination does not have it ('cont' or 'hotlift settle \
         --here')"
    )]
    SettledHere,
    #[error(transparent)]
    Qemu(QemuError),
    /// QEMU refuses differences between the VMs; a table has already shown them, with their remedies.
    #[error("QEMU refuses {count} of the differences above, so a migration would fail")]
    Different { count: usize },
    /// 'hotlift serve' did not complete the pending step in time.
    #[error("'hotlift serve' at {address} failed after {limit:?}: {missing}")]
    ServeSilent {
        address: Address,
        missing: &'static str,
        limit: Duration,
        has_hello: bool,
    },
    /// The connection for messages was made, but the connection for pages failed.
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
    #[error("{0}; give a loopback address, or add --control-from-other-hosts")]
    OtherHosts(MonitorError),
    #[error(transparent)]
    Virsh(#[from] VirshError),
    #[error("with {flag}, --to is {expected}")]
    WrongTo {
        flag: &'static str,
        expected: &'static str,
    },
    #[error(
        "'{uri}' names no host, so the address of its agent is unknown; give --agent tcp:HOST:PORT"
    )]
    NoHost { uri: String },
    #[error(
        "no port of {ports} is free on loopback; give other ports that the destination's agent allows: --ports FIRST-LAST"
    )]
    NoPort { ports: Ports },
    #[error("this command does not copy disks; use 'virsh migrate', with an agent on both hosts")]
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
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("migration failed, and the domain stayed here: {reason}")]
    DomainStayed { reason: String },
    #[error("migration failed, and the domain needs a check on both hosts: {reason}")]
    DomainInDoubt { reason: String },
    #[error("the domain ended before the move, so neither host has it: {reason}")]
    DomainEnded { reason: String },
    #[error("{stayed} of {of} domains stayed here")]
    DomainsStayed { stayed: usize, of: usize },
    #[error(
        "{ended} of {of} domains ended before the move, so neither host has {}",
        if *ended == 1 { "it" } else { "them" }
    )]
    DomainsEnded { ended: usize, of: usize },
    #[error(
        "{domains} of the domains {} a check on both hosts, because {} on an unknown host or on both",
        if *domains == 1 { "needs" } else { "need" },
        if *domains == 1 { "it runs" } else { "they run" }
    )]
    DomainsInDoubt { domains: usize },
    #[error("--incoming=defer needs --control or --monitor, which receive 'migrate-incoming'")]
    Deferred,
}

impl CommandError {
    /// Returns the error and its causes in one line.
    pub fn line(&self) -> String {
        error_line(self)
    }

    /// Returns the next step for the operator; `None` if the message itself contains it.
    pub fn advice(&self) -> Option<String> {
        match self {
            Self::Qemu(QemuError::InDoubt { qmp, .. }) => Some(settle(qmp)),
            Self::Qemu(QemuError::StoppedThere { qmp, .. }) => Some(stopped(qmp)),
            Self::Qemu(QemuError::LeftPaused { qmp }) => Some(format!(
                "if no other QEMU has the guest, run it here first: hotlift settle --qmp {qmp} --here; if another QEMU has \
                 it, end this copy: hotlift settle --qmp {qmp} --there"
            )),
            Self::Qemu(QemuError::RunsTwice { qmp }) => Some(format!(
                "end one of the two guests at once; to end the guest here, send 'quit' to {qmp}"
            )),
            Self::NotRunning {
                can_run,
                has_source,
                ..
            } => Some(match (has_source, can_run) {
                (true, _) => stopped(QMP_OF_THE_SOURCE),
                (false, true) => "QEMU's log has the cause (such as a locked disk); remove the cause, then send 'cont' to \
                                  run the guest; or end this QEMU and restore the guest again"
                    .to_owned(),
                (false, false) => "QEMU's log has the cause (such as a locked disk); 'cont' cannot run this guest, so end this \
                                   QEMU and restore the guest into another"
                    .to_owned(),
            }),
            Self::Qemu(QemuError::Stalled { qmp, .. }) => Some(format!(
                "when QEMU answers again, run the guest here: hotlift settle --qmp {qmp} --here"
            )),
            Self::NotKnown { .. } => Some(format!(
                "send 'query-status' to this QEMU; if it does not run the guest, end it; {}",
                settle(QMP_OF_THE_SOURCE)
            )),
            Self::Relay(MigrationError::InDoubt) => Some(settle(QMP_OF_THE_SOURCE)),
            Self::Relay(MigrationError::Released { .. }) => Some(format!(
                "if the guest is paused at the source, run it there: hotlift settle --qmp {QMP_OF_THE_SOURCE} --here"
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

    /// Returns the next step of errors whose next step is a fixed text; `None` for other errors.
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
                Some("start the QEMU or the relay that listens there first")
            }
            Self::Certs(error) => error.advice(),
            Self::Agent(error) => error.advice(),
            Self::Address(TransportError::Listen { source, .. }) => not_listening(source.kind()),
            Self::Migration(MigrationError::Tls { source, .. })
            | Self::Relay(MigrationError::Tls { source, .. }) => after_handshake(source),
            Self::EndedSince { .. } => {
                Some("read the output or the log of that QEMU, which has the reason")
            }
            Self::StillWaits { .. } => {
                Some("remove the cause, then run 'hotlift restore --lazy --resume' again")
            }
            Self::DomainStayed { .. } => Some(
                "remove the cause, then run the same command again; the domain keeps running here",
            ),
            Self::ServeSilent {
                has_hello: false, ..
            } => Some(
                "that process may be stopped, or may serve another source; check it on the destination host, or restart it",
            ),
            Self::ServeSilent {
                has_hello: true, ..
            } => Some(
                "that QEMU may wait for a disk, for memory or for another QMP client; check the output of 'hotlift serve'",
            ),
            Self::Different { .. } => Some(
                "start the destination's QEMU as the lines below the table describe; 'hotlift migrate --ignore-differences' leaves \
                 the decision to QEMU",
            ),
            Self::Save { advice, .. } => *advice,
            Self::AgentSilent { .. } => {
                Some("read the agent's log on that host: journalctl -u hotlift-agent")
            }
            Self::Virsh(VirshError::Refused { output, .. })
                if output.contains("connect to the hypervisor") =>
            {
                Some(
                    "check that libvirt runs there, and that this user may use it: virsh --connect URI list",
                )
            }
            Self::DataPort(_) => Some(
                "pages use a second port, which the firewall must allow too; 'hotlift serve --data-port PORT' sets it",
            ),
            // QEMU's message for a disk that another process has locked.
            Self::Qemu(QemuError::Failed { reasons })
                if reasons.contains("Failed to get") && reasons.contains("lock") =>
            {
                Some(
                    "another process uses a disk of this VM; end that process, and migrate again; QEMU's log names the file",
                )
            }
            // QEMU's message for guest RAM in a file on disk.
            Self::Qemu(QemuError::NoPostcopy { message }) if message.contains("TMPFS") => Some(
                "give that QEMU its RAM in anonymous memory, memfd, tmpfs or hugetlbfs; or restore without --lazy",
            ),
            Self::Qemu(QemuError::NoPostcopy { .. }) => Some(
                "if QEMU's log names userfaultfd: 'sysctl vm.unprivileged_userfaultfd=1', or give QEMU's user read and write access \
                 to /dev/userfaultfd (Linux 6.1 and newer)",
            ),
            Self::Qemu(QemuError::Busy { status }) if status == "postcopy-active" => Some(
                "a lazy restore or a postcopy migration still sends pages to this guest; wait until it has all of them",
            ),
            Self::Qemu(QemuError::Busy { status }) if status == "postcopy-paused" => Some(
                "the guest waits for pages. After a lazy restore: hotlift restore --lazy --resume FILE --qmp ADDRESS. \
                 After a postcopy migration: 'migrate-recover' here, then 'migrate' with resume=true at its source",
            ),
            Self::Qemu(QemuError::Busy { .. }) => {
                Some("wait for the end of that migration, or cancel it with 'migrate_cancel'")
            }
            Self::Qemu(QemuError::Blocked { .. }) => {
                Some("remove the device or change the setting that QEMU names")
            }
            Self::Qemu(QemuError::NotWaiting { migration, .. })
                if migration == "postcopy-paused" =>
            {
                Some(
                    "this QEMU has a guest that waits for pages; resume its lazy restore: hotlift restore --lazy --resume",
                )
            }
            Self::Qemu(QemuError::NotWaiting { .. }) => {
                Some("start a new QEMU with '-incoming defer'")
            }
            Self::NotTaken { .. } => Some(QEMUS_OWN_WORDS),
            Self::Damaged { .. } => Some(SALVAGE),
            Self::Relay(MigrationError::PagesMissing { .. }) => Some(
                "start both relays again; when both QEMUs report 'postcopy-paused', send 'migrate-recover' to the \
                 destination, then 'migrate' with resume=true to the source",
            ),
            Self::Relay(MigrationError::GivenBack { .. }) => Some(
                "end the destination's QEMU if it still runs; when the source's 'query-status' is 'running', migrate again",
            ),
            Self::NoAgentHere { .. } | Self::NoAgent { .. } => Some(
                "check that the agent runs (systemctl status hotlift-agent) and that you may open its socket; if its \
                 configuration names another socket, give --control PATH",
            ),
            Self::Virsh(VirshError::Run(_)) => {
                Some("install libvirt's clients (Debian: libvirt-clients)")
            }
            Self::DomainsStayed { .. } => {
                Some("run the same command again to move the remaining domains")
            }
            Self::NoDomain { .. } | Self::NoGuest { .. } => {
                Some("nothing was moved; 'virsh list --all' lists the domains of this host")
            }
            Self::DomainEnded { .. } | Self::DomainsEnded { .. } => Some(
                "if the guest was not shut down on purpose, read its QEMU's log in /var/log/libvirt/qemu on both hosts",
            ),
            Self::NoAgentThere { .. } => {
                Some("start 'hotlift agent run' on that host, with certificates of the same CA")
            }
            Self::DomainInDoubt { .. } | Self::DomainsInDoubt { .. } => Some(
                "run 'virsh list --all' on both hosts; if the domain is paused here and runs on neither host, 'virsh resume' \
                 it; if it runs on both hosts, 'virsh destroy' one of them at once",
            ),
            Self::NothingToSettle { .. } => Some(
                "'hotlift settle' accepts only a guest that a migration left paused; check 'query-status' and 'query-migrate'",
            ),
            Self::Qemu(error) => error.advice(),
            _ => None,
        }
    }

    /// Returns the exit code of the command:
    ///
    /// - 0 if the guest is at its target in spite of the error
    /// - 1 for other errors
    /// - 2 for an invalid command line
    /// - 3 if the owner of the guest is unknown, or the guest may be paused
    /// - 130 after a signal, as shells do
    pub fn exit_code(&self) -> u8 {
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
            | Self::EndedCopy => GUEST_UNCERTAIN,
            // The guest runs at its target; only a later step failed.
            Self::Qemu(QemuError::MovedAnyway { .. }) => 0,
            Self::Migration(MigrationError::Cancelled)
            | Self::Relay(MigrationError::Cancelled)
            | Self::Terminal(TerminalError::Interrupted) => 130,
            _ if self.is_usage() => USAGE,
            _ => 1,
        }
    }

    /// Returns true if the command line is invalid, and nothing was started.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Shared(error) => error.is_usage(),
            Self::Certs(error) => error.is_usage(),
            Self::WrongTo { .. } | Self::NoHost { .. } | Self::DiskCopies => true,
            _ => false,
        }
    }
}

/// Implements conversions of the causes of a [`SharedError`] to a [`CommandError`].
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
    mod page;

    use super::*;

    fn of(error: impl Into<CommandError>) -> (String, String) {
        let error = error.into();
        (error.line(), error.advice().unwrap_or_default())
    }

    #[test]
    fn a_port_in_use_is_not_reported_as_a_bad_address_and_has_a_hint() {
        let in_use = TransportError::Listen {
            uri: "tcp::4445".to_owned(),
            source: ErrorKind::AddrInUse.into(),
        };
        let (line, advice) = of(QemuError::Address(in_use));
        assert_eq!(line, "cannot listen on 'tcp::4445': address in use");
        assert!(advice.starts_with("choose another port"), "{advice}");
    }

    #[test]
    fn an_error_with_a_paused_guest_or_missing_pages_prints_the_next_command() {
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
    fn hints_name_the_sysctl_for_postcopy_and_the_option_for_a_blocked_port() {
        let message = "Postcopy is not supported".to_owned();
        let (line, advice) = of(QemuError::NoPostcopy { message });
        assert!(line.ends_with("cannot use postcopy: Postcopy is not supported"));
        assert!(advice.contains("vm.unprivileged_userfaultfd=1"), "{advice}");
        let reasons = "its QEMU: Failed to get \"write\" lock".to_owned();
        let (_, advice) = of(QemuError::Failed { reasons });
        assert!(advice.contains("another process uses a disk"), "{advice}");
        let message = "Host backend files need to be TMPFS or HUGETLBFS only".to_owned();
        let (_, advice) = of(QemuError::NoPostcopy { message });
        assert!(advice.contains("without --lazy"), "{advice}");
        let reasons = "cannot connect to 'tcp:b:40123'".to_owned();
        let blocked = CommandError::DataPort(QemuError::Failed { reasons });
        assert_eq!(
            blocked.line(),
            "migration failed: cannot connect to 'tcp:b:40123'"
        );
        assert!(blocked.advice().unwrap().contains("--data-port"));
    }
}
