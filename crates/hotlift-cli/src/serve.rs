//! `hotlift serve`: waits on the destination host for `hotlift migrate`, and prepares a QEMU. With `--files`, serves save
//! files.

mod files;

use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{ArgGroup, Args};
use hotlift::conversation::callers::Callers;
use hotlift::conversation::{Conversation, ConversationError};
use hotlift::relay::{self, Hooks, Incoming, Outgoing, RelayProgress, RelayReport, RelaySettings};
use hotlift::tls::Tls;
use hotlift::{Address, Control, Listener, MigrationError, Options};
use hotlift_command::error::SharedError;
use hotlift_command::migration_args::{LimitArgs, role};
use hotlift_command::security;
use hotlift_mem::{is_readable, wait_readable};
use hotlift_monitor::RelayMonitor;
use hotlift_qemu::capabilities::Purpose;
use hotlift_qemu::destination::{Destination, Statement};
use hotlift_qemu::error::Side;
use hotlift_qemu::process::{self, Custody};
use hotlift_qemu::run_state::state_clause;
use hotlift_qemu::source::DestinationKnowledge;
use hotlift_qemu::vm::{self, Vm};
use hotlift_qemu::{QemuError, compare, incoming, shared_memory};
use hotlift_qmp::server::{Commands, Events};
use hotlift_qmp::{QmpAddress, RunState, Uuid, one_line};
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::{print_line, print_rejected_connections, warn};
use hotlift_terminal::progress::bytes;
use hotlift_terminal::signals::{Interrupt, run_alongside};

use crate::control_args::ControlArgs;
use crate::error::CommandError;
use crate::flush_args::FlushArgs;
use crate::peer::{Answer, Differences, Hello, SourceMessage};

/// Longest wait for the source's reason of a failure after the relay's connections have closed.
const REASON: Duration = Duration::from_secs(2);

/// Interval of progress messages to the source.
const PROGRESS: Duration = Duration::from_secs(1);

/// Flags of `serve`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("receiver").args(["command", "qmp", "files"]).required(true)))]
pub struct ServeArgs {
    /// Address to listen at for 'hotlift migrate': tcp:HOST:PORT; an empty HOST means all addresses
    #[arg(long, value_name = "URI")]
    listen: Address,
    /// QMP socket of a QEMU that waits with '-incoming defer': PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    qmp: Option<QmpAddress>,
    /// Serve the save files of this folder to other hosts, and receive no guest
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with_all = ["qmp", "command", "data_port", "control", "monitor"]
    )]
    files: Option<PathBuf>,
    /// With --files: print events as lines of JSON on standard output
    #[arg(long, requires = "files")]
    json: bool,
    /// Port for the pages, at the addresses of --listen [default: a free port]
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 0,
        hide_default_value = true
    )]
    data_port: u16,
    /// Do not receive RAM that both QEMUs, on one host, map from the same files (QEMU's x-ignore-shared); give the flag to
    /// 'hotlift migrate' too
    #[arg(long, conflicts_with = "files")]
    ignore_shared: bool,
    /// Show no progress
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    flush: FlushArgs,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    limits: LimitArgs<role::Receive>,
    /// Command line of the QEMU to start when a source connects; '-incoming defer' and a QMP socket are added
    #[arg(last = true, value_name = "QEMU", conflicts_with = "qmp")]
    command: Vec<OsString>,
}

/// Result of one source's connection.
enum SourceResult {
    /// The source was refused; another source may connect.
    Refused(CommandError),
    /// The source only compared the VMs; another source may connect.
    Compared,
    /// The migration of the source has ended.
    Over(Result<(), CommandError>),
}

/// Runs `hotlift serve`.
pub fn run(args: &ServeArgs) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    if let Some(folder) = &args.files {
        return files::run(args, folder, &interrupt);
    }
    let Address::Tcp { host, .. } = &args.listen else {
        return Err(SharedError::OnlyTcp { flag: "--listen" }.into());
    };
    if args.qmp.is_none() {
        process::waiting(&args.command)?;
        // Checked now: without this program, every source would fail.
        process::find(&args.command)?;
    }
    let mut held = args.qmp.as_ref().map(Destination::held).transpose()?;
    let tls = security::tls(&args.limits.tls, &args.listen)?;
    let listener = args.listen.listen()?;
    if args.data_port != 0 {
        // Checked now: if the port is in use, every source would fail.
        drop(pages_at(host, args.data_port).listen()?);
    }
    let events = Events::new();
    let options = Options {
        stream: RelaySettings::default().outgoing,
        ..Options::default()
    };
    let monitor = RelayMonitor::new(options, events.clone(), &interrupt);
    let commands: Arc<dyn Commands> = Arc::new(monitor.clone());
    let monitors = args.control.serve(&commands, &events)?;
    print_line!("listening on {}", address_of(&listener)?);
    print_line!("{}", of_data_port(args.data_port));
    let host = Host {
        args,
        interrupt: &interrupt,
        host,
        tls,
        monitor: &monitor,
    };
    let outcome = host.wait(&listener, &mut held);
    let was_asked_to_end = monitor.end();
    drop(monitors);
    match outcome {
        Err(CommandError::Terminal(TerminalError::Interrupted)) if was_asked_to_end => Ok(()),
        outcome => outcome,
    }
}

/// Settings of a host that receives a guest.
struct Host<'a> {
    args: &'a ServeArgs,
    interrupt: &'a Interrupt,
    /// Address on which the relay listens for the pages.
    host: &'a str,
    /// TLS settings for messages and pages; `None` without TLS.
    tls: Option<Arc<Tls>>,
    monitor: &'a RelayMonitor,
}

impl Host<'_> {
    /// Accepts sources until the migration of one has ended. `held` is a QEMU that was given with `--qmp`.
    fn wait(
        &self,
        listener: &Listener,
        held: &mut Option<Destination>,
    ) -> Result<(), CommandError> {
        // The last printed reason: a reason is printed again only after another one.
        let trouble = Mutex::new(String::new());
        let report_failure = |why: &str| {
            let mut trouble = trouble.lock().unwrap_or_else(PoisonError::into_inner);
            if *trouble != why {
                warn!("hotlift: refused a connection: {why}");
                why.clone_into(&mut trouble);
            }
        };
        let callers = Callers::new(listener, self.tls.clone(), &report_failure);
        let mut callers = callers.map_err(TerminalError::process("listener"))?;
        loop {
            if self.interrupt.is_raised() {
                return Err(TerminalError::Interrupted.into());
            }
            let mut receive_request =
                |source: &mut Conversation| source.receive_hello::<Hello>(Duration::ZERO);
            let Some(call) = callers.next(None, &[self.interrupt.wake_fd()], &mut receive_request)
            else {
                continue;
            };
            let mut source = call.conversation;
            let rejected = match call.request {
                Ok(hello) => match self.receive(&mut source, &hello, held) {
                    SourceResult::Over(outcome) => return outcome,
                    SourceResult::Refused(error) => error,
                    SourceResult::Compared => {
                        warn!("hotlift: a source compared its VM with this one and sent no guest");
                        continue;
                    }
                },
                Err(error) => {
                    let error = SharedError::from(error);
                    refuse(&mut source, &error);
                    error.into()
                }
            };
            warn!("hotlift: refused a source: {}", error_line(&rejected));
        }
    }

    /// Prepares a QEMU for the source of `hello`, and receives the guest.
    fn receive(
        &self,
        source: &mut Conversation,
        hello: &Hello,
        held: &mut Option<Destination>,
    ) -> SourceResult {
        // Send errors are ignored: the next message detects that the source has disconnected. A QEMU may take time to start.
        let _ = source.send(&Answer::Progress { received_bytes: 0 });
        let destination = match held.take() {
            Some(destination) => Ok(destination),
            None => Destination::start(&self.args.command, self.interrupt),
        };
        let destination = match destination {
            Ok(destination) => destination,
            Err(error) => {
                refuse(source, &error);
                return SourceResult::Refused(error.into());
            }
        };
        let vm = match self.compare(hello, &destination) {
            Ok(vm) if hello.differences != Differences::Show => vm,
            outcome => {
                if self.args.qmp.is_some() {
                    *held = Some(destination);
                }
                return match outcome {
                    Ok(vm) => match source.send(&Answer::Compared { vm }) {
                        Ok(()) => SourceResult::Compared,
                        Err(error) => SourceResult::Refused(error.into()),
                    },
                    Err(error) => {
                        refuse(source, &error);
                        SourceResult::Refused(error.into())
                    }
                };
            }
        };
        destination.expect(hello.state.clone());
        SourceResult::Over(self.migrate(source, hello, vm, destination))
    }

    /// Returns a description of the destination's VM. If QEMU would refuse differences from the source's VM, returns an error,
    /// unless the source ignores differences.
    fn compare(&self, hello: &Hello, destination: &Destination) -> Result<Box<Vm>, QemuError> {
        let vm = destination.vm(Some(&hello.vm))?.within(vm::MESSAGE_MAX);
        match hello.differences {
            Differences::Show => return Ok(vm.into()),
            Differences::Refuse => compare::check(&compare::compare(&hello.vm, &vm))?,
            Differences::Ignore => {}
        }
        self.shares_memory(hello, destination)?;
        Ok(vm.into())
    }

    /// Checks that source and destination map RAM from the same files, or that neither uses `--ignore-shared`.
    fn shares_memory(&self, hello: &Hello, destination: &Destination) -> Result<(), QemuError> {
        match (&hello.shared_memory, self.args.ignore_shared) {
            (Some(at_source), true) => {
                let here = shared_memory::of(&mut destination.qemu(), Side::Destination)?;
                shared_memory::check(at_source, &here)
            }
            (None, false) => Ok(()),
            (at_source, _) => Err(QemuError::Shared {
                problem: format!(
                    "only 'hotlift {}' has --ignore-shared: give it to both commands or to neither",
                    if at_source.is_some() {
                        "migrate"
                    } else {
                        "serve"
                    }
                ),
            }),
        }
    }

    /// Receives the guest into `destination`, and reports the result to the source.
    fn migrate(
        &self,
        source: &mut Conversation,
        hello: &Hello,
        vm: Box<Vm>,
        mut destination: Destination,
    ) -> Result<(), CommandError> {
        let socket = destination.socket();
        let token = relay::new_token().map_err(TerminalError::process("random numbers"))?;
        let ready = self.get_ready(hello, &mut destination, &socket);
        let (listener, port, mut settings) = match ready {
            Ok(ready) => ready,
            Err(error) => {
                refuse(source, &error);
                return Err(error);
            }
        };
        settings.incoming_pass = Some(source.pass(token));
        let ready = Answer::Ready {
            port,
            token: Uuid(token),
            qemu: destination.qemu().version(),
            vm,
        };
        source.send(&ready)?;
        let (relayed, source_failure) =
            self.relay(source, &destination, &settings, &listener, &socket)?;
        drop(listener);
        let settle_timeout = settings.limits.settle_timeout;
        match relayed {
            Ok(report) => self.await_load(source, destination, settle_timeout, report),
            Err(error) => self.failed(source, source_failure, destination, settle_timeout, &error),
        }
    }

    /// Makes the destination's QEMU listen on `socket`, and opens the port for the pages.
    fn get_ready(
        &self,
        hello: &Hello,
        destination: &mut Destination,
        socket: &Path,
    ) -> Result<(Listener, u16, RelaySettings), CommandError> {
        let limits = self.args.limits.limits.clone();
        let mut settings = incoming::relay_settings(destination, hello.channels, limits)?;
        settings.incoming_tls = self.tls.clone();
        settings.flush_after_each_section = self.args.flush.value();
        let purpose = Purpose::Migrate {
            ignore_shared: self.args.ignore_shared,
        };
        incoming::listen(destination, purpose, hello.channels, &hello.alike, socket)?;
        let listener = pages_at(self.host, self.args.data_port).listen()?;
        match address_of(&listener)? {
            Address::Tcp { port, .. } => {
                if self.args.data_port == 0 && !self.args.quiet {
                    warn!("the pages arrive at port {port}");
                }
                Ok((listener, port, settings))
            }
            Address::Unix { .. } => Err(SharedError::OnlyTcp { flag: "--listen" }.into()),
        }
    }

    /// Runs the relay, and sends the relay's progress to the source. Cancels the relay if the source disconnects before the
    /// commit. Returns the relay's result, and the source's reason if the source reported a failure.
    fn relay(
        &self,
        source: &mut Conversation,
        destination: &Destination,
        settings: &RelaySettings,
        listener: &Listener,
        socket: &Path,
    ) -> Result<(Result<RelayReport, MigrationError>, Option<String>), TerminalError> {
        let control = self.monitor.waits();
        let outgoing = Address::Unix {
            path: socket.to_owned(),
        };
        let latest = Mutex::new(RelayProgress::default());
        let note = |progress: &RelayProgress| {
            self.monitor.note(progress);
            if let Ok(mut latest) = latest.lock() {
                *latest = *progress;
            }
        };
        let on_commit = || destination.custody().release();
        let has_taken = |was: Option<&str>| destination.query_guest_state(was);
        let hooks = Hooks {
            on_progress: Some(&note),
            on_commit: Some(&on_commit),
            has_taken: Some(&has_taken),
            ..Hooks::default()
        };
        let relay = || {
            let (incoming, outgoing) = (Incoming::Listener(listener), Outgoing::Address(&outgoing));
            hotlift::relay::relay(incoming, &outgoing, settings, &control, hooks)
        };
        let custody = destination.custody();
        let (outcome, source_failure) = run_alongside(relay, |ended| {
            let received = || latest.lock().map_or(0, |latest| latest.received_bytes);
            self.serve_source(source, ended, &control, custody, &received)
        })?;
        print_rejected_connections(&control);
        self.monitor.ended(&outcome);
        Ok((outcome, source_failure))
    }

    /// Exchanges messages with the source until `ended` is readable. Returns the source's reason if the source reported a
    /// failure.
    fn serve_source(
        &self,
        source: &mut Conversation,
        ended: BorrowedFd<'_>,
        control: &Control,
        custody: &Custody,
        received: &dyn Fn() -> u64,
    ) -> Option<String> {
        let mut failure = None;
        let mut last_progress = Instant::now();
        let mut source_is_there = true;
        while !is_readable(ended) {
            let mut wakes = vec![ended];
            match self.interrupt.is_raised() {
                true => control.cancel(),
                false => wakes.push(self.interrupt.wake_fd()),
            }
            if !source_is_there {
                wait_readable(&wakes, None);
                continue;
            }
            let mut from_source =
                receive_failure(source, &wakes, last_progress + PROGRESS, &mut failure);
            if last_progress.elapsed() >= PROGRESS {
                last_progress = Instant::now();
                let received_bytes = received();
                if !self.args.quiet {
                    let stall = control.stall();
                    let stall = stall.map_or_else(String::new, |stall| format!(", {stall}"));
                    warn!("receiving: {} arrived{stall}", bytes(received_bytes));
                }
                from_source =
                    from_source.and_then(|()| source.send(&Answer::Progress { received_bytes }));
            }
            if from_source.is_err() || failure.is_some() {
                source_is_there = from_source.is_ok();
                // Not cancelled after the commit: the source may have lost all connections, and then queries the outcome.
                if !custody.is_released() {
                    control.cancel();
                }
            }
        }
        failure
    }

    /// After a complete stream, waits until QEMU runs the guest, reports this to the source, and leaves QEMU running.
    fn await_load(
        &self,
        source: &mut Conversation,
        destination: Destination,
        settle_timeout: Duration,
        report: RelayReport,
    ) -> Result<(), CommandError> {
        // A signal during the handover came too late to cancel. Only a later signal ends this wait.
        self.interrupt.forget();
        match destination.statement_in_time(settle_timeout, self.interrupt) {
            Statement::Here { state } => {
                let report = Box::new(report);
                // Send errors are ignored: the guest is here, even if the source does not learn this.
                let _ = source.send(&Answer::Completed {
                    state: state.clone(),
                    report,
                });
                print_arrival(&state, destination);
                Ok(())
            }
            Statement::Stopped { reason, can_run } => {
                Err(not_running(source, destination, reason, can_run))
            }
            // The relay cannot see this failure: the end of the stream was no error for the source.
            Statement::Ended { reason } => {
                let _ = source.send(&failed(reason.clone(), DestinationKnowledge::NotHere));
                Err(QemuError::Failed { reasons: reason }.into())
            }
            Statement::GuestEnded { how, by_itself } => report_ended(source, how, by_itself),
            // QEMU accepted the guest on the stream. So its current state does not prove that the guest never ran.
            Statement::Never { reason } => {
                let error = CommandError::NotTaken { reason };
                let _ = source.send(&failed(error_line(&error), DestinationKnowledge::Unknown));
                Err(error)
            }
            Statement::Unknown { reason, .. } => Err(not_known(source, destination, reason)),
        }
    }

    /// After the relay failed, determines where the guest is, and reports this and the cause to the source.
    fn failed(
        &self,
        source: &mut Conversation,
        source_failure: Option<String>,
        destination: Destination,
        settle_timeout: Duration,
        error: &MigrationError,
    ) -> Result<(), CommandError> {
        let is_interrupted = self.interrupt.is_raised();
        let in_doubt = matches!(error, MigrationError::InDoubt);
        if in_doubt {
            self.interrupt.forget();
        }
        let statement = destination.after_failure(in_doubt, settle_timeout, self.interrupt);
        let trouble = match error {
            // This host is the destination, so the error needs no prefix.
            MigrationError::Destination { reason } => reason.clone(),
            error => error.chain(),
        };
        let explained = |words: &str| format!("{trouble}; its QEMU: {words}");
        match statement {
            Statement::Here { state } => {
                let reason = error.chain();
                let _ = source.send(&failed(reason.clone(), DestinationKnowledge::Here));
                warn!("hotlift: the guest is here, but errors occurred: {reason}");
                print_arrival(&state, destination);
                Ok(())
            }
            Statement::GuestEnded { how, by_itself } => report_ended(source, how, by_itself),
            Statement::Stopped { reason, can_run } => Err(not_running(
                source,
                destination,
                explained(&reason),
                can_run,
            )),
            Statement::Never { reason } | Statement::Ended { reason } => {
                let reasons = explained(&reason);
                destination.restore_settings();
                let _ = source.send(&failed(reasons.clone(), DestinationKnowledge::NotHere));
                if is_interrupted {
                    return Err(TerminalError::Interrupted.into());
                }
                let mut failure = source_failure;
                if failure.is_none() {
                    let _ = receive_failure(source, &[], Instant::now() + REASON, &mut failure);
                }
                let reasons = match (failure, error) {
                    // The source's failure ended this relay, so it is the cause.
                    (Some(failure), MigrationError::Cancelled) => format!("the source: {failure}"),
                    (Some(failure), _) => format!("{reasons}; the source: {failure}"),
                    (None, _) => reasons,
                };
                Err(QemuError::Failed { reasons }.into())
            }
            Statement::Unknown { reason, .. } => {
                Err(not_known(source, destination, explained(&reason)))
            }
        }
    }
}

/// Returns the address on which the relay listens for the pages; with port 0 the system chooses a free port.
fn pages_at(host: &str, port: u16) -> Address {
    Address::Tcp {
        host: host.to_owned(),
        port,
    }
}

/// Returns a line that names the port of the pages, for the rules of a firewall.
fn of_data_port(port: u16) -> String {
    match port {
        0 => "pages arrive at another, free port (--data-port PORT sets it)".to_owned(),
        port => format!("pages arrive at port {port}"),
    }
}

/// Receives one message of the source until `until`, or until one of `others` is readable. Stores the reason if the message
/// reports a failure.
fn receive_failure(
    source: &mut Conversation,
    others: &[BorrowedFd<'_>],
    until: Instant,
    failure: &mut Option<String>,
) -> Result<(), ConversationError> {
    if let Some(SourceMessage::Failed { reason }) = source.receive_until(others, Some(until))? {
        failure.get_or_insert_with(|| one_line(&reason));
    }
    Ok(())
}

fn failed(reason: String, guest: DestinationKnowledge) -> Answer {
    Answer::Failed { reason, guest }
}

/// Prints that the guest is here. Leaves its QEMU running.
fn print_arrival(state: &RunState, destination: Destination) {
    print_line!(
        "the guest {} here: {}",
        state_clause(state),
        destination.keep_running()
    );
}

/// Reports to the source that QEMU has the guest, but does not run it. Leaves QEMU running, and returns the error.
fn not_running(
    source: &mut Conversation,
    destination: Destination,
    reasons: String,
    can_run: bool,
) -> CommandError {
    let _ = source.send(&failed(reasons.clone(), DestinationKnowledge::Stopped));
    CommandError::NotRunning {
        reasons,
        qemu: destination.keep_running(),
        can_run,
        has_source: true,
    }
}

/// Reports to the source that QEMU has ended after it had the guest: the source must not run the guest again. Returns an error
/// unless the guest ended by itself.
fn report_ended(
    source: &mut Conversation,
    how: String,
    by_itself: bool,
) -> Result<(), CommandError> {
    let reason = format!("the guest was received, then its QEMU ended: {how}");
    let _ = source.send(&failed(reason.clone(), DestinationKnowledge::Here));
    if !by_itself {
        return Err(CommandError::EndedSince { how });
    }
    warn!("{reason}");
    Ok(())
}

/// Reports to the source that QEMU may or may not run the guest. Leaves QEMU running, and returns the error.
fn not_known(source: &mut Conversation, destination: Destination, reasons: String) -> CommandError {
    let _ = source.send(&failed(reasons.clone(), DestinationKnowledge::Unknown));
    CommandError::NotKnown {
        reasons,
        qemu: destination.keep_running_unchanged(),
    }
}

/// Sends a refusal to the source. Send errors are ignored: the source may have disconnected.
fn refuse(source: &mut Conversation, error: &dyn std::error::Error) {
    let reason = error_line(error);
    let _ = source.send(&Answer::Refused { reason });
}

/// Returns the address of `listener`, with the port that the system chose.
fn address_of(listener: &Listener) -> Result<Address, TerminalError> {
    listener
        .address()
        .map_err(TerminalError::process("listener"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_of_the_pages_is_printed_or_the_option_that_sets_it() {
        assert_eq!(of_data_port(4445), "pages arrive at port 4445");
        assert!(of_data_port(0).contains("--data-port PORT"));
        assert!(of_data_port(0).len() <= 79);
    }
}
