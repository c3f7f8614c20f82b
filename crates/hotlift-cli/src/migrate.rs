//! `hotlift migrate`: moves the guest of a running QEMU to a host where `hotlift serve` waits. Domains of libvirt: see
//! `domain`.

mod domain;

use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::Args;
use hotlift::conversation::{Conversation, ConversationError};
use hotlift::relay::{GuestActivity, Outgoing, RelayReport, RelaySettings};
use hotlift::transport::TransportError;
use hotlift::{Address, MigrationError};
use hotlift_command::connect::{CONNECT, connect};
use hotlift_command::error::SharedError;
use hotlift_command::migration_args::{RoleArgs, role};
use hotlift_command::security;
use hotlift_mem::wait_readable;
use hotlift_qemu::QemuError;
use hotlift_qemu::capabilities::Purpose;
use hotlift_qemu::compare::{Outcome, compare};
use hotlift_qemu::error::{Side, at_source};
use hotlift_qemu::outgoing::{self, OutgoingMigration};
use hotlift_qemu::run_state::state_clause;
use hotlift_qemu::source::{DestinationKnowledge, Source};
use hotlift_qemu::vm::{self, Vm};
use hotlift_qemu::{settings, shared_memory};
use hotlift_qmp::{QmpAddress, RunState, Uuid, Version};
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::warn;
use hotlift_terminal::signals::Interrupt;

use self::domain::DomainArgs;
use crate::differences;
use crate::error::CommandError;
use crate::output_args::OutputArgs;
use crate::peer::{Answer, Differences, Hello, SourceMessage};
use crate::ramp_args::RampArgs;
use crate::relay_report::Migration;

/// Longest wait for the destination to get ready after it has read the hello (the first message): it may start a QEMU first.
const READY: Duration = Duration::from_secs(90);

/// Longest wait for 'hotlift serve' to read the hello. As long as a relay's `handshake_timeout`, which suffices on a busy host.
const HELLO: Duration = Duration::from_secs(30);

/// Time without an answer after which the operator sees a line with the pending step. The same as for a silent host during a
/// migration (`REPORTED` of hotlift's liveness).
const SHOWN: Duration = Duration::from_secs(5);

/// After a failure, longest wait for the destination's QEMU to end, and for 'hotlift serve' to forward its output.
const EXPLANATION: Duration = Duration::from_secs(5);

/// Longest wait for a message that 'hotlift serve' has already sent.
const ARRIVAL_TIME: Duration = Duration::from_millis(50);

/// Flags of `migrate`.
#[derive(Debug, Args)]
pub struct MigrateArgs {
    /// QMP socket of the QEMU whose guest to move: PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS", required_unless_present = "domain")]
    qmp: Option<QmpAddress>,
    /// Name or UUID of the libvirt domain to move, instead of --qmp
    #[arg(long, value_name = "NAME", conflicts_with = "qmp")]
    domain: Option<String>,
    /// Address of 'hotlift serve', tcp:HOST:PORT; with --domain the destination's libvirt, qemu+ssh://HOST/system
    #[arg(long, value_name = "URI")]
    to: To,
    /// Do not send RAM that both QEMUs, on one host, map from the same files (QEMU's x-ignore-shared); give the flag to
    /// 'hotlift serve' too
    #[arg(long, conflicts_with = "domain")]
    ignore_shared: bool,
    /// Compare both VMs, print the differences, and move nothing; exit code 1 if QEMU refuses a difference
    #[arg(long, conflicts_with = "domain")]
    check: bool,
    /// Migrate even if the VMs differ, and let QEMU decide
    #[arg(long, conflicts_with_all = ["domain", "check"])]
    ignore_differences: bool,
    #[command(flatten)]
    ramp: RampArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    libvirt: DomainArgs,
    #[command(flatten)]
    migration: RoleArgs<role::Migrate>,
}

/// Value of `--to`: receiver of the guest.
#[derive(Debug, Clone)]
enum To {
    /// A `hotlift serve`, by its address.
    Serve(Address),
    /// A libvirt, by its URI.
    Libvirt(String),
}

impl FromStr for To {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        match text.contains("://") {
            true => Ok(Self::Libvirt(text.to_owned())),
            false => match Address::of_peer(text) {
                Ok(address @ Address::Tcp { .. }) => Ok(Self::Serve(address)),
                Ok(Address::Unix { .. }) | Err(TransportError::UnknownScheme { .. }) => {
                    Err(TransportError::UnknownScheme {
                        uri: text.to_owned(),
                        known: "tcp:HOST:PORT, or with --domain qemu+ssh://HOST/system".to_owned(),
                    })
                }
                Err(error) => Err(error),
            },
        }
    }
}

/// Runs `hotlift migrate`.
pub fn run(args: &MigrateArgs) -> Result<(), CommandError> {
    let settings = args.migration.relay_settings()?;
    match (&args.qmp, &args.domain, &args.to) {
        (Some(qmp), None, To::Serve(to)) => to_serve(args, qmp, to, settings),
        (None, Some(domain), To::Libvirt(uri)) => domain::run(
            &args.libvirt,
            domain,
            uri,
            (settings, &args.migration.values().tls),
            args.ramp.limit(args.migration.downtime_limit()),
            &args.output,
        ),
        (None, ..) => Err(CommandError::WrongTo {
            flag: "--domain",
            expected: "the destination's libvirt: qemu+ssh://HOST/system",
        }),
        (Some(_), ..) => Err(CommandError::WrongTo {
            flag: "--qmp",
            expected: "where 'hotlift serve' listens: tcp:HOST:PORT",
        }),
    }
}

/// Moves the guest of a QEMU to the host on which `hotlift serve` listens.
fn to_serve(
    args: &MigrateArgs,
    qmp: &QmpAddress,
    to: &Address,
    mut relay_settings: RelaySettings,
) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    let purpose = Purpose::Migrate {
        ignore_shared: args.ignore_shared,
    };
    let source = match args.check {
        true => Source::to_compare(qmp, purpose)?,
        false => Source::connect(qmp, purpose)?,
    };
    let tls = security::tls(&args.migration.values().tls, to)?;
    // Created before the connect: 'hotlift serve' waits 10 s for a hello, and QEMU on a busy host may need longer to describe
    // its VM.
    let hello = hello(&source, &relay_settings, args)?;
    let mut destination = connect(to, "--to", tls.as_deref())?;
    relay_settings.outgoing_tls = tls;
    relay_settings.uuid = Some(hello.vm.uuid.0);
    destination.send_hello(&hello)?;
    let (address, token, destination_qemu) = match ready(to, &mut destination, &interrupt)? {
        Ready::Compared(there) => return checked(args, &hello.vm, &there),
        Ready::Listens {
            address,
            token,
            qemu,
            vm,
        } => {
            differences::warn(&compare(&hello.vm, &vm));
            (address, token, qemu)
        }
    };
    relay_settings.outgoing_pass = Some(destination.pass(token.0));
    let this = Move {
        args,
        purpose,
        interrupt: &interrupt,
        source: &source,
        settings: &relay_settings,
        address: &address,
    };
    let outcome = this.run(&mut destination, destination_qemu);
    source.restore_settings();
    let migration = outcome?;
    if let Some(how) = source.guest_end() {
        warn!("{how} during the migration");
    }
    // Printed on standard error: the operator must see the outcome even if no process reads the figures.
    warn!(
        "the guest {} at the destination; this QEMU keeps a paused copy and can be ended",
        state_clause(&migration.state)
    );
    Ok(args.output.print(&migration, || migration.table())?)
}

/// Prints the differences between the VMs of source and destination.
///
/// # Errors
/// If QEMU would refuse one of the differences.
fn checked(args: &MigrateArgs, here: &Vm, there: &Vm) -> Result<(), CommandError> {
    let rows = compare(here, there);
    args.output.print(&rows, || differences::table(&rows))?;
    match rows
        .iter()
        .filter(|row| row.outcome == Outcome::Refused)
        .count()
    {
        0 => Ok(()),
        count => Err(CommandError::Different { count }),
    }
}

fn hello(
    source: &Source,
    settings: &RelaySettings,
    args: &MigrateArgs,
) -> Result<Hello, CommandError> {
    let vm = source.vm()?.within(vm::MESSAGE_MAX);
    let mut qemu = source.qemu();
    let capabilities = qemu.query_capabilities().map_err(at_source)?;
    let shared_memory = match args.ignore_shared && !args.check {
        true => Some(shared_memory::of(&mut qemu, Side::Source)?),
        false => None,
    };
    Ok(Hello {
        qemu: qemu.version(),
        vm,
        differences: match (args.check, args.ignore_differences) {
            (true, _) => Differences::Show,
            (false, true) => Differences::Ignore,
            (false, false) => Differences::Refuse,
        },
        state: source.was().clone(),
        channels: settings.outgoing.channels(),
        alike: settings::alike(capabilities),
        shared_memory,
    })
}

/// Answer of the destination to a hello that was accepted.
enum Ready {
    /// The relay of the destination is ready for connections.
    Listens {
        /// Address of the destination's relay.
        address: Address,
        /// Token at the start of each connection to the destination's relay.
        token: Uuid,
        /// Version of the destination's QEMU.
        qemu: Version,
        /// Description of the destination's VM.
        vm: Box<Vm>,
    },
    /// Description of the destination's VM. Only a comparison was requested, and nothing was started.
    Compared(Box<Vm>),
}

/// Waits until the destination answers the hello. A refusal, a timeout and an interrupt are errors.
fn ready(
    to: &Address,
    destination: &mut Conversation,
    interrupt: &Interrupt,
) -> Result<Ready, CommandError> {
    let mut waiting = Waiting::new(Stage::Hello, Instant::now());
    loop {
        match destination.receive_until(&[interrupt.wake_fd()], Some(waiting.next_at()))? {
            Some(Answer::Compared { vm }) => return Ok(Ready::Compared(vm)),
            Some(Answer::Ready {
                port,
                token,
                qemu,
                vm,
            }) => {
                let address = match to {
                    Address::Tcp { host, .. } => Address::Tcp {
                        host: host.clone(),
                        port,
                    },
                    Address::Unix { .. } => {
                        return Err(SharedError::OnlyTcp { flag: "--to" }.into());
                    }
                };
                return Ok(Ready::Listens {
                    address,
                    token,
                    qemu,
                    vm,
                });
            }
            Some(Answer::Refused { reason } | Answer::Failed { reason, .. }) => {
                let reason = hotlift_qmp::one_line(&reason);
                return Err(SharedError::Refused { reason }.into());
            }
            Some(Answer::Progress { .. }) => waiting = Waiting::new(Stage::Ready, Instant::now()),
            Some(Answer::Completed { .. }) | None => {}
        }
        if interrupt.is_raised() {
            return Err(TerminalError::Interrupted.into());
        }
        let stage = waiting.stage;
        match waiting.next(Instant::now()) {
            DueAction::Nothing => {}
            DueAction::Line => warn!("waiting for 'hotlift serve' at {to}: {}", stage.missing()),
            DueAction::End => {
                return Err(CommandError::ServeSilent {
                    address: to.clone(),
                    missing: stage.missing(),
                    limit: stage.limit(),
                    has_hello: stage == Stage::Ready,
                });
            }
        }
    }
}

/// Timing of the wait for one stage: after some time a line for the operator, later the end.
struct Waiting {
    stage: Stage,
    since: Instant,
    is_shown: bool,
}

/// Action that is due while waiting.
#[derive(Debug, PartialEq, Eq)]
enum DueAction {
    Nothing,
    /// Print a line for the operator; once per stage.
    Line,
    /// End the wait with an error.
    End,
}

impl Waiting {
    fn new(stage: Stage, since: Instant) -> Self {
        Self {
            stage,
            since,
            is_shown: false,
        }
    }

    /// Returns the time of the next action.
    fn next_at(&self) -> Instant {
        let limit = self.stage.limit();
        self.since + if self.is_shown { limit } else { SHOWN }
    }

    fn next(&mut self, now: Instant) -> DueAction {
        let waited = now.duration_since(self.since);
        if waited >= self.stage.limit() {
            DueAction::End
        } else if waited >= SHOWN && !std::mem::replace(&mut self.is_shown, true) {
            DueAction::Line
        } else {
            DueAction::Nothing
        }
    }
}

/// Stage of 'hotlift serve' for which this command waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// 'hotlift serve' reads the hello.
    Hello,
    /// 'hotlift serve' prepares its QEMU.
    Ready,
}

impl Stage {
    fn limit(self) -> Duration {
        match self {
            Self::Hello => HELLO,
            Self::Ready => READY,
        }
    }

    /// Returns a description of what is missing in this stage, for the operator.
    fn missing(self) -> &'static str {
        match self {
            Self::Hello => "it accepted the connection, but does not answer",
            Self::Ready => "its QEMU is not ready",
        }
    }
}

/// Sends the reason of this host's failure to the destination. Send errors are ignored: the destination may have disconnected.
fn send_failure(destination: &mut Conversation, reason: String) {
    let _ = destination.send(&SourceMessage::Failed { reason });
}

/// Inputs of one migration to a destination that is ready.
struct Move<'a> {
    args: &'a MigrateArgs,
    purpose: Purpose,
    interrupt: &'a Interrupt,
    source: &'a Source,
    settings: &'a RelaySettings,
    address: &'a Address,
}

/// The destination's final message.
#[derive(Debug)]
enum FinalMessage {
    Completed {
        state: RunState,
        report: Box<RelayReport>,
    },
    Failed {
        reason: String,
        guest: DestinationKnowledge,
    },
    /// The connection was lost, so no message arrives any more.
    Lost { reason: String },
}

impl Move<'_> {
    /// Runs the relay and QEMU's migration until both have ended.
    fn run(
        &self,
        destination: &mut Conversation,
        destination_qemu: Version,
    ) -> Result<Migration, CommandError> {
        let moving = OutgoingMigration {
            source: self.source,
            interrupt: self.interrupt,
            settings: self.settings,
            outgoing: Outgoing::Address(self.address),
            quiet: self.args.output.quiet,
        };
        let mut final_message = None;
        let limit = self.args.ramp.limit(self.args.migration.downtime_limit());
        let (source, settings) = (self.source, self.settings);
        let changed = outgoing::change_settings(source, self.purpose, settings, limit);
        let relayed = changed.and_then(|limit| {
            moving.run(limit, &mut |wakes, until, control| {
                let received = self.receive(destination, &mut final_message, wakes, until);
                if received.is_err() {
                    // If the destination's host is lost, the relay's connections are lost, too: the relay checks them now.
                    control.suspect_peer();
                }
            })
        });
        let relayed = relayed.inspect_err(|error| send_failure(destination, error_line(error)))?;
        match relayed.outcome {
            Ok(report) => {
                let time = self.settle_time();
                let final_message = self.final_message(time, destination, final_message);
                let migration =
                    self.moved(final_message, relayed.activity, report, destination_qemu)?;
                Ok(Migration {
                    downtime_limit: relayed.downtime_limit,
                    ..migration
                })
            }
            Err(error) => {
                // Sent before `stayed` is called, which may wait for the destination's final message.
                match (&error, self.source.guest_end()) {
                    _ if self.interrupt.is_raised() => {
                        send_failure(destination, error_line(&TerminalError::Interrupted));
                    }
                    (_, Some(how)) => send_failure(destination, how),
                    // The destination itself reported this failure.
                    (MigrationError::Destination { .. }, None) => {}
                    (error, None) => send_failure(destination, error.chain()),
                }
                Err(self.stayed(destination, final_message, &error, relayed.may_run_there))
            }
        }
    }

    /// Receives messages of the destination until `until`, or until one of `others` is readable. Stores the final message.
    ///
    /// # Errors
    /// If the connection was lost; only the first time.
    fn receive(
        &self,
        destination: &mut Conversation,
        final_message: &mut Option<FinalMessage>,
        others: &[BorrowedFd<'_>],
        until: Instant,
    ) -> Result<(), ConversationError> {
        if final_message.is_some() {
            wait_readable(others, Some(until));
            return Ok(());
        }
        match destination.receive_until(others, Some(until)) {
            Ok(Some(Answer::Completed { state, report })) => {
                *final_message = Some(FinalMessage::Completed { state, report });
            }
            Ok(Some(Answer::Failed { reason, guest })) => {
                let reason = hotlift_qmp::one_line(&reason);
                *final_message = Some(FinalMessage::Failed { reason, guest });
            }
            Ok(_) => {}
            // The migration is not cancelled: the relays settle which host owns the guest without this connection.
            Err(error) => {
                let reason = error_line(&error);
                *final_message = Some(FinalMessage::Lost {
                    reason: format!("the connection to 'hotlift serve' failed: {reason}"),
                });
                return Err(error);
            }
        }
        Ok(())
    }

    /// Waits up to `time` for the destination's final message, and returns it; `None` without one. Returns at once if
    /// `final_message` already has one.
    fn final_message(
        &self,
        time: Duration,
        destination: &mut Conversation,
        mut final_message: Option<FinalMessage>,
    ) -> Option<FinalMessage> {
        let deadline = Instant::now() + time;
        while final_message.is_none() && Instant::now() < deadline {
            let _ = self.receive(destination, &mut final_message, &[], deadline);
        }
        final_message
    }

    /// Returns the longest wait for the final message. `serve` queries its QEMU for up to `settle-timeout`. Sending the message
    /// then may take as long as a connection.
    fn settle_time(&self) -> Duration {
        self.settings.limits.settle_timeout + CONNECT
    }

    /// Determines the result after the relay succeeded. The final message of 'hotlift serve' decides. Without a final message,
    /// the report of the destination's relay (`activity`) decides. Nothing else proves success: a QEMU that 'hotlift serve' did
    /// not start may have the guest without running it.
    fn moved(
        &self,
        final_message: Option<FinalMessage>,
        activity: GuestActivity,
        source: RelayReport,
        destination_qemu: Version,
    ) -> Result<Migration, CommandError> {
        let qmp = self.source.address().to_string();
        let in_doubt = |reasons: String| {
            let qmp = qmp.clone();
            Err(QemuError::InDoubt { reasons, qmp }.into())
        };
        // False also if the source's QEMU has ended or does not answer: then it runs no second copy.
        let runs_here = || {
            let here = self.source.run_state();
            here.is_ok_and(|here| here == RunState::Running)
        };
        let (state, destination) = match final_message {
            Some(FinalMessage::Completed { state, report }) => (state, *report),
            Some(FinalMessage::Failed {
                reason: reasons,
                guest: DestinationKnowledge::Stopped,
            }) => return Err(QemuError::StoppedThere { reasons, qmp }.into()),
            // The destination's QEMU ended, and never ran the guest.
            Some(FinalMessage::Failed {
                reason,
                guest: DestinationKnowledge::NotHere,
            }) => {
                let error = MigrationError::Destination { reason };
                let settled = self
                    .source
                    .settle(&error, true, || DestinationKnowledge::NotHere);
                return Err(settled.into_error(None, self.interrupt.is_raised()).into());
            }
            // The guest has run at the destination: after that, a failure does not return it to the source.
            Some(FinalMessage::Failed {
                reason: reasons,
                guest: DestinationKnowledge::Here,
            }) => return Err(QemuError::MovedAnyway { reasons }.into()),
            Some(FinalMessage::Failed { reason, .. }) => {
                return in_doubt(format!("the destination: {reason}"));
            }
            lost @ (Some(FinalMessage::Lost { .. }) | None) => {
                let lost = match lost {
                    Some(FinalMessage::Lost { reason }) => reason,
                    _ => "'hotlift serve' sent no final message".to_owned(),
                };
                let reasons =
                    |does: &str| format!("{lost}; its relay reported before: the guest {does}");
                return match activity {
                    GuestActivity::Runs if runs_here() => Err(QemuError::RunsTwice { qmp }.into()),
                    GuestActivity::Runs => Err(QemuError::MovedAnyway {
                        reasons: reasons("runs there"),
                    }
                    .into()),
                    GuestActivity::Rests => Err(QemuError::MovedAnyway {
                        reasons: reasons("does not run there, as expected, or has ended"),
                    }
                    .into()),
                    GuestActivity::Stopped => Err(QemuError::StoppedThere {
                        reasons: reasons("does not run there"),
                        qmp,
                    }
                    .into()),
                    GuestActivity::Unknown => in_doubt(lost),
                };
            }
        };
        if state == RunState::Running && runs_here() {
            return Err(QemuError::RunsTwice { qmp }.into());
        }
        Ok(Migration {
            // No figures if the source's QEMU has ended, which it may after the commit.
            qemu: self.source.poll().unwrap_or_default(),
            downtime_limit: None,
            source_qemu: self.source.qemu().version(),
            destination_qemu,
            running: state == RunState::Running,
            state,
            source,
            destination,
        })
    }

    /// Determines the error after the relay failed: checks that the guest runs on this host, and adds the destination's reason.
    fn stayed(
        &self,
        destination: &mut Conversation,
        final_message: Option<FinalMessage>,
        error: &MigrationError,
        may_run_there: bool,
    ) -> CommandError {
        let mut received = final_message;
        let settled = self.source.settle(error, may_run_there, || {
            received = self.final_message(self.settle_time(), destination, received.take());
            match &received {
                Some(FinalMessage::Completed { .. }) => DestinationKnowledge::Here,
                Some(FinalMessage::Failed { guest, .. }) => *guest,
                // The destination's relay refuses a guest only if its QEMU never ran the guest, and never will.
                Some(FinalMessage::Lost { .. }) | None => match error {
                    MigrationError::Destination { .. } => DestinationKnowledge::NotHere,
                    _ => DestinationKnowledge::Unknown,
                },
            }
        });
        // If the destination's relay reported the cause, a message with the output of its QEMU follows. Otherwise the cause is
        // known, and only a message that was already sent is read.
        let timeout = match error {
            MigrationError::Destination { .. } => EXPLANATION,
            _ => ARRIVAL_TIME,
        };
        let theirs = match self.final_message(timeout, destination, received) {
            Some(FinalMessage::Failed { reason, .. } | FinalMessage::Lost { reason }) => {
                Some(format!("the destination: {reason}"))
            }
            _ => None,
        };
        let is_unreachable = matches!(
            error,
            MigrationError::Transport(TransportError::Connect { .. })
        );
        match settled.into_error(theirs, self.interrupt.is_raised()) {
            error @ QemuError::Failed { .. } if is_unreachable => CommandError::DataPort(error),
            error => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serve_without_reply_is_shown_once_and_ends_the_wait_before_qemu_can_be_ready() {
        let begin = Instant::now();
        let mut waiting = Waiting::new(Stage::Hello, begin);
        let mut at = |seconds| waiting.next(begin + Duration::from_secs(seconds));
        assert_eq!([at(1), at(4)], [DueAction::Nothing, DueAction::Nothing]);
        assert_eq!([at(5), at(6)], [DueAction::Line, DueAction::Nothing]);
        assert_eq!([at(29), at(30)], [DueAction::Nothing, DueAction::End]);
        let mut waiting = Waiting::new(Stage::Ready, begin);
        let mut at = |seconds| waiting.next(begin + Duration::from_secs(seconds));
        assert_eq!(
            [at(30), at(89), at(90)],
            [DueAction::Line, DueAction::Nothing, DueAction::End]
        );
    }

    #[test]
    fn a_serve_without_reply_is_named_with_the_missing_message_and_the_next_step() {
        let silent = |stage: Stage| CommandError::ServeSilent {
            address: "tcp:b.example:4444".parse().unwrap(),
            missing: stage.missing(),
            limit: stage.limit(),
            has_hello: stage == Stage::Ready,
        };
        let error = silent(Stage::Hello);
        assert_eq!(
            error.line(),
            "'hotlift serve' at tcp:b.example:4444 failed after 30s: it accepted the connection, but does not answer"
        );
        assert!(error.advice().unwrap().contains("may be stopped"));
        let error = silent(Stage::Ready);
        assert!(
            error
                .line()
                .ends_with("failed after 90s: its QEMU is not ready")
        );
        assert!(
            error
                .advice()
                .unwrap()
                .contains("output of 'hotlift serve'")
        );
    }

    #[test]
    fn a_destination_is_an_address_of_tcp_or_a_libvirt() {
        assert!(matches!("tcp:b:4444".parse(), Ok(To::Serve(_))));
        assert!(matches!("qemu+ssh://b/system".parse(), Ok(To::Libvirt(_))));
        for text in ["unix:/run/vm.sock", "b:4444", "b"] {
            let error = text.parse::<To>().unwrap_err().to_string();
            assert!(
                error.contains("expected tcp:HOST:PORT, or with --domain"),
                "{error}"
            );
        }
    }
}
