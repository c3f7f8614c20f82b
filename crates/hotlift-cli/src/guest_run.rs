//! `hotlift guest run`: runs one built-in guest in this process. Started by an operator, by `demo`, or by `hotlift-bench`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use hotlift::options::OptionError;
use hotlift::{Address, Control, MigrationError, Options};
use hotlift_command::args::{GuestArgs, seconds};
use hotlift_command::error::SharedError;
use hotlift_command::events::{Check, Event, Filling, send_to_parent};
use hotlift_command::migration_args::{RoleArgs, role};
use hotlift_command::security;
use hotlift_methods::AUTO;
use hotlift_monitor::{GuestMonitor, ShutdownRequest, Sockets};
use hotlift_qmp::QmpAddress;
use hotlift_qmp::server::{Commands, Events};
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::{print_line, print_rejected_connections, warn};
use hotlift_terminal::progress::{Display, fallback_warning};
use hotlift_terminal::signals::{Interrupt, OwnFolder};
use hotlift_vmm::BuiltinGuest;

use crate::control_args::ControlArgs;
use crate::error::{CommandError, settle};
use crate::report::{self, Run};

/// Timeout for a started guest to show that it runs.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of the checks during [`START_TIMEOUT`].
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Interval at which a guest with a monitor is checked: its serial port, failures and run state cause no event.
const GUEST_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Flags of `guest run`.
#[derive(Debug, Args)]
#[command(mut_arg("control", |arg| arg.visible_alias("qmp")))]
pub struct GuestRunArgs {
    /// Receive the guest from a source at this address: tcp:HOST:PORT or unix:PATH; 'defer' waits for migrate-incoming
    /// at a monitor
    #[arg(long, value_name = "URI", conflicts_with = "migrate_to")]
    incoming: Option<Incoming>,
    /// Migrate the guest to the destination that listens at this address: tcp:HOST:PORT or unix:PATH
    #[arg(
        long,
        value_name = "URI",
        value_parser = Address::of_peer,
        conflicts_with_all = ["control", "monitor"]
    )]
    migrate_to: Option<Address>,
    /// Time that the guest runs before it is migrated
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "0.2",
        value_parser = seconds,
        requires = "migrate_to"
    )]
    migrate_after: Duration,
    /// Time that the guest runs here before its memory is checked and the process ends [default: until Ctrl-C]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    run_for: Option<Duration>,
    /// Longest wait for an answer of the peer
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "30",
        value_parser = seconds,
        hide_short_help = true
    )]
    handshake_timeout: Duration,
    /// Write the figures of this side to this file as JSON
    #[arg(long, value_name = "FILE", conflicts_with_all = ["control", "monitor"])]
    json: Option<PathBuf>,
    /// Print events as JSON lines on standard output, for the process that started this one
    #[arg(long, hide = true)]
    tell_events: bool,
    /// Prefix of the lines of the progress display
    #[arg(long, hide = true, default_value = "migration")]
    label: String,
    /// Show no progress
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    guest: GuestArgs,
    #[command(flatten)]
    migration: RoleArgs<role::Guest>,
}

/// Value of `--incoming`: when and where the guest is received.
#[derive(Debug, Clone)]
enum Incoming {
    /// Wait for the monitor command `migrate-incoming`, which contains the address.
    Defer,
    At(Address),
}

impl std::str::FromStr for Incoming {
    type Err = <Address as std::str::FromStr>::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "defer" => Ok(Self::Defer),
            _ => text.parse().map(Self::At),
        }
    }
}

/// Runs `hotlift guest run`.
pub fn run(args: &GuestRunArgs) -> Result<(), CommandError> {
    if args.migrate_to.is_some() && args.migration.values().switchover.pause_before {
        let conflict = OptionError::Conflict {
            option: "pause-before-switchover=on".to_owned(),
            needs: "a monitor for 'migrate-continue': give --monitor or --control, and 'migrate' there instead of --migrate-to",
        };
        return Err(conflict.into());
    }
    if !args.control.is_given() {
        args.migration.reject_ineffective()?;
    }
    if args.tell_events {
        // A child process must not run longer than the command that started it.
        let _ =
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    }
    args.guest.check()?;
    let interrupt = Interrupt::catch()?;
    let kind = args.guest.kind();
    let guest: Arc<dyn BuiltinGuest> = hotlift_vmm::create(kind, &args.guest.settings())?.into();
    let mut migration = args.migration.complete()?;
    // With a monitor, options that were not given have QEMU's defaults.
    if !args.control.is_given() && !migration.has("multifd-compression") {
        migration = migration.with("multifd-compression", AUTO.name)?;
    }
    let mut options = migration.options()?;
    options.limits.handshake_timeout = args.handshake_timeout;
    let session = Session {
        args,
        interrupt,
        guest,
        options,
    };
    if args.control.is_given() {
        return session.monitored();
    }
    match (&args.incoming, &args.migrate_to) {
        (Some(Incoming::Defer), _) => Err(CommandError::Deferred),
        (Some(Incoming::At(uri)), _) => session.destination(uri),
        (None, Some(uri)) => session.source(uri),
        (None, None) => {
            session.boot()?;
            session.run_on()
        }
    }
}

struct Session<'a> {
    args: &'a GuestRunArgs,
    interrupt: Interrupt,
    guest: Arc<dyn BuiltinGuest>,
    options: Options,
}

impl Session<'_> {
    /// Fills the guest's RAM, and starts the guest.
    fn boot(&self) -> Result<(), CommandError> {
        let filled = self.guest.fill(&self.args.guest.fill_settings())?;
        let filling = Filling::from(&filled);
        self.send_event(&Event::Filled(filling));
        self.print(&format!(
            "{} guest, {} pages with data, {} zero: {}",
            self.guest.kind(),
            filled.data_pages,
            filled.zero_pages,
            filling.text()
        ));
        Ok(self.guest.start()?)
    }

    fn source(&self, uri: &Address) -> Result<(), CommandError> {
        // Checked before the guest runs: the certificates may have errors.
        security::tls(&self.options.tls, uri)?;
        self.boot()?;
        if self.interrupt.sleep(Some(self.args.migrate_after)) {
            return Err(TerminalError::Interrupted.into());
        }
        let control = Control::new();
        let display = Display::new(&self.args.label, self.args.quiet, &control);
        let outcome = self.interrupt.cancelling(&control, || {
            hotlift::migrate(&*self.guest, uri, &self.options, &control, &|progress| {
                display.show(progress);
                self.send_event(&Event::Progress {
                    moment: progress.into(),
                });
            })
        });
        display.finish();
        match outcome {
            Ok(sent) => {
                self.send_event(&Event::Sent {
                    report: Box::new(sent.clone()),
                });
                let mut run = self.new_run();
                run.sent(sent);
                let runs = [run];
                self.print(&report::all(&runs));
                self.write_json(&runs)
            }
            Err(error) => {
                self.send_event(&Event::Failed {
                    error: error_line(&error),
                });
                match error {
                    // Not for a child process: its parent cannot settle the guest, but waits for the end of this process.
                    MigrationError::InDoubt if !self.args.tell_events => self.keep(error),
                    MigrationError::InDoubt | MigrationError::PagesMissing { .. } => {
                        Err(error.into())
                    }
                    error => {
                        self.stayed()?;
                        Err(error.into())
                    }
                }
            }
        }
    }

    /// Keeps the guest paused and complete, since it is unknown whether the destination runs it. Waits until the operator
    /// settles the guest. SIGINT and SIGTERM end the wait; the close of the terminal does not.
    fn keep(&self, error: MigrationError) -> Result<(), CommandError> {
        // Forgets signals that cancelled the migration: only later ones end this wait.
        self.interrupt.forget();
        let folder = OwnFolder::private()?;
        let qmp = QmpAddress::Unix(folder.path().join("qmp"));
        let (events, shutdown) = (Events::new(), ShutdownRequest::default());
        let monitor = GuestMonitor::in_doubt(
            self.guest.clone(),
            self.options.clone(),
            events.clone(),
            shutdown.clone(),
        );
        let commands: Arc<dyn Commands> = Arc::new(monitor.clone());
        let monitors = Sockets::qmp_at(qmp.clone()).serve(&commands, &events)?;
        warn!("hotlift: {}", error.chain());
        warn!("hotlift: {}", settle(&qmp.to_string()));
        warn!("until then the guest is kept here, paused and complete");
        while !monitor.is_running() {
            if shutdown.take().is_some() {
                monitor.end(true);
                return Err(CommandError::EndedCopy);
            }
            if self.interrupt.is_ordered() {
                monitor.end(false);
                return Err(error.into());
            }
            std::thread::sleep(GUEST_POLL_INTERVAL);
        }
        self.print("the guest runs here again");
        self.interrupt.forget();
        let outcome = self.until_shutdown(&shutdown, &monitor);
        monitor.end(matches!(outcome, Some(Ok(()))));
        drop(monitors);
        outcome.unwrap_or(Ok(()))?;
        self.verify()?;
        Err(CommandError::SettledHere)
    }

    /// Checks after a failed migration that the guest runs here, and keeps it running.
    fn stayed(&self) -> Result<(), CommandError> {
        let check = self.check();
        self.send_event(&Event::Checked(check.clone()));
        match check.problem {
            None => self.print(&format!(
                "the guest runs here again: {} writes, {} pages checked, none lost",
                check.writes, check.pages_checked
            )),
            Some(problem) => {
                warn!("hotlift: check of the guest that stayed here failed: {problem}")
            }
        }
        if self.args.run_for.is_some() {
            self.run_on()?;
        }
        Ok(())
    }

    fn destination(&self, uri: &Address) -> Result<(), CommandError> {
        let control = Control::new();
        security::tls(&self.options.tls, uri)?;
        hotlift::prepare(&*self.guest, &self.options)?;
        let listener = uri.listen()?;
        let address = listener
            .address()
            .map_err(TerminalError::process("listener"))?;
        self.send_event(&Event::Listening {
            uri: address.to_string(),
        });
        self.print(&format!("waiting for a source at {address}"));
        let received = self.interrupt.cancelling(&control, || {
            hotlift::receive(&*self.guest, listener, &self.options, &control)
        });
        print_rejected_connections(&control);
        let received = match received {
            Ok(received) => received,
            Err(error) => {
                self.send_event(&Event::Failed {
                    error: error_line(&error),
                });
                return Err(error.into());
            }
        };
        if let Some(warning) = fallback_warning(&received.side.jobs) {
            self.print(&warning);
        }
        self.print(&format!(
            "the guest runs here after {:.0} ms, {} normal and {} zero pages, CPU {:.2} s",
            received.total_ms, received.normal_pages, received.zero_pages, received.side.cpu_s
        ));
        if let Some(lazy) = &received.postcopy {
            let [median, one_in_100, longest] = lazy.wait_us;
            self.print(&format!(
                "all pages had arrived after {:.0} ms; the guest waited for {} of them, {median:.0} us (p50), {one_in_100:.0} \
                 us (p99), {longest:.0} us at most",
                lazy.complete_ms, lazy.requests
            ));
            if let Some(blocktime) = &lazy.blocktime {
                let [median, one_in_100, longest] = blocktime.vcpu_wait_us;
                self.print(&format!(
                    "vCPUs waited {} times, {median:.0} us (p50), {one_in_100:.0} us (p99), {longest:.0} us at most; all \
                     vCPUs at once for {:.0} ms",
                    blocktime.vcpu_waits, blocktime.all_ms
                ));
            }
        }
        self.send_event(&Event::Received {
            report: received.clone(),
        });
        let check = self.check();
        self.send_event(&Event::Checked(check.clone()));
        let mut run = self.new_run();
        run.received(received);
        run.checked(&check);
        self.write_json(&[run])?;
        if let Some(problem) = check.problem {
            return Err(SharedError::NotWell { problem }.into());
        }
        self.print(&format!(
            "the guest runs: {} writes, {} pages checked, no write was lost",
            check.writes, check.pages_checked
        ));
        if self.args.tell_events {
            return Ok(());
        }
        self.run_on()
    }

    /// Serves the monitors and executes their commands, until the command `quit` or a signal.
    fn monitored(&self) -> Result<(), CommandError> {
        let (events, shutdown) = (Events::new(), ShutdownRequest::default());
        if self.args.incoming.is_none() {
            self.boot()?;
        }
        let monitor = GuestMonitor::new(
            self.guest.clone(),
            self.options.clone(),
            events.clone(),
            shutdown.clone(),
            self.args.incoming.is_some(),
        );
        if let Some(Incoming::At(uri)) = &self.args.incoming {
            let address = monitor.wait_for_guest(uri)?;
            self.print(&format!("waiting for a source at {address}"));
        }
        let commands: Arc<dyn Commands> = Arc::new(monitor.clone());
        let monitors = self
            .args
            .control
            .serve(&commands, &events)
            .inspect_err(|_| monitor.end(false))?;
        let outcome = self.until_shutdown(&shutdown, &monitor);
        monitor.end(matches!(outcome, Some(Ok(()))));
        drop(monitors);
        outcome.unwrap_or(Ok(()))?;
        if monitor.has_arrived() {
            self.verify()?;
        }
        Ok(())
    }

    /// Waits until a monitor or a failure ends the process, and returns the cause. Returns `None` after a signal, or once the
    /// time of `--run-for` is over.
    fn until_shutdown(
        &self,
        shutdown: &ShutdownRequest,
        monitor: &GuestMonitor,
    ) -> Option<Result<(), CommandError>> {
        let mut end = None;
        loop {
            if end.is_none() && monitor.has_arrived() {
                end = self.args.run_for.map(|time| Instant::now() + time);
            }
            if let Some(outcome) = shutdown.take() {
                return Some(outcome.map_err(CommandError::from));
            }
            if self.interrupt.sleep(Some(GUEST_POLL_INTERVAL))
                || end.is_some_and(|end| Instant::now() >= end)
            {
                return None;
            }
            // A monitor on the terminal needs the terminal for itself.
            if !self.args.control.has_terminal() {
                for line in self.guest.serial() {
                    self.print(&line);
                }
            }
            if let Err(error) = self.guest.health() {
                return Some(Err(error.into()));
            }
        }
    }

    /// Runs the guest until the time of `--run-for` is over, or until a signal. Then checks the guest again.
    fn run_on(&self) -> Result<(), CommandError> {
        let end = self.args.run_for.map(|time| Instant::now() + time);
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let step = left.map_or(Duration::from_secs(1), |left| {
                left.min(Duration::from_secs(1))
            });
            let interrupted = self.interrupt.sleep(Some(step));
            for line in self.guest.serial() {
                self.print(&line);
            }
            self.guest.health()?;
            if interrupted || left.is_some_and(|left| left.is_zero()) {
                break;
            }
        }
        self.verify()
    }

    /// Pauses the guest, and compares its memory with the write records of its vCPUs.
    fn verify(&self) -> Result<(), CommandError> {
        self.guest.pause()?;
        let verified = self.guest.verify()?;
        self.print(&format!(
            "{} writes replayed, {} pages checked, no write was lost",
            verified.writes_replayed, verified.pages_checked
        ));
        Ok(())
    }

    /// Checks that the guest runs, and that its memory matches the write records of its vCPUs.
    fn check(&self) -> Check {
        let mut check = Check {
            runs: false,
            verified: false,
            problem: None,
            writes: 0,
            pages_checked: 0,
        };
        if let Err(problem) = self.poll(&mut check) {
            check.problem = Some(problem);
        }
        check
    }

    fn poll(&self, check: &mut Check) -> Result<(), String> {
        let text = |error: &dyn std::error::Error| error_line(error);
        let guest = &*self.guest;
        let before = guest.writes();
        let deadline = Instant::now() + START_TIMEOUT;
        while guest.rate() > 0 && guest.writes() == before {
            guest.health().map_err(|error| text(&error))?;
            if Instant::now() > deadline {
                return Err(format!("it has written nothing for {START_TIMEOUT:?}"));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        guest.health().map_err(|error| text(&error))?;
        check.runs = true;
        guest.pause().map_err(|error| text(&error))?;
        let verified = guest.verify().map_err(|error| text(&error))?;
        check.verified = true;
        check.pages_checked = verified.pages_checked;
        check.writes = verified.writes_replayed;
        guest.resume().map_err(|error| text(&error))
    }

    fn new_run(&self) -> Run {
        Run::new(
            self.guest.kind(),
            &self.args.guest.settings(),
            &self.options,
        )
    }

    fn write_json(&self, runs: &[Run]) -> Result<(), CommandError> {
        match &self.args.json {
            Some(path) => Ok(report::write_json(path, runs)?),
            None => Ok(()),
        }
    }

    /// Sends an event to the parent process, if `--tell-events` was given.
    fn send_event(&self, event: &Event) {
        if self.args.tell_events {
            send_to_parent(event);
        }
    }

    /// Prints a line for the operator.
    fn print(&self, text: &str) {
        if !self.args.tell_events {
            print_line!("{text}");
        }
    }
}
