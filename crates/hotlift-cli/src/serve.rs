//! `hotlift serve`: waits on the destination host for `hotlift migrate`, and gets a QEMU ready.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use clap::Args;
use hotlift::relay::{Hooks, Incoming, Outgoing, RelayProgress, RelayReport, RelaySettings};
use hotlift::transport::Stream;
use hotlift::{Address, Control, Listener, MigrationError};
use hotlift_qmp::QmpAddress;
use hotlift_qmp::server::Events;

use crate::advise::survey;
use crate::args::error_line;
use crate::error::CommandError;
use crate::monitor::{Commands, ControlArgs, PassingMonitor};
use crate::output::{complain, say};
use crate::progress::bytes;
use crate::qemu::control::{Answer, ControlError, Conversation, Guest, Hello, Opening};
use crate::qemu::destination::Destination;
use crate::qemu::{incoming, private_folder, process};
use crate::signals::{Interrupt, TICK};

/// How long a source that has connected may take to say what it wants.
const HELLO: Duration = Duration::from_secs(10);

/// Between two messages about progress.
const PROGRESS: Duration = Duration::from_secs(1);

/// Flags of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Where 'hotlift migrate' connects to: tcp:HOST:PORT (empty HOST: all addresses)
    #[arg(long, value_name = "URI")]
    listen: Address,
    /// QMP socket of a QEMU that waits with '-incoming defer': PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS", required_unless_present = "command")]
    qmp: Option<QmpAddress>,
    /// Port for the pages, on the same addresses [default: one that is free]
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 0,
        hide_default_value = true
    )]
    data_port: u16,
    /// Show no progress
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    control: ControlArgs,
    /// Command line of the QEMU to start when a source has come; '-incoming defer' and a QMP socket
    /// are added
    #[arg(last = true, value_name = "QEMU", conflicts_with = "qmp")]
    command: Vec<OsString>,
}

/// What became of one source that connected.
enum Visit {
    /// It wanted to know what this host can do, and was told.
    Surveyed(String),
    /// It was sent away, and nothing was used up.
    SentAway(CommandError),
    /// Its migration has ended.
    Over(Result<(), CommandError>),
}

/// Runs the command.
pub fn run(args: &ServeArgs) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    let Address::Tcp { host, .. } = &args.listen else {
        return Err(CommandError::OnlyTcp { flag: "--listen" });
    };
    if args.qmp.is_none() {
        process::waiting(&args.command)?;
    }
    let mut held = args.qmp.as_ref().map(Destination::held).transpose()?;
    let listener = args.listen.listen()?;
    let events = Events::new();
    let outgoing = RelaySettings::default().outgoing;
    let monitor = PassingMonitor::new(outgoing, events.clone(), &interrupt);
    let commands: Arc<dyn Commands> = Arc::new(monitor.clone());
    let monitors = args.control.serve(&commands, &events)?;
    say!("listening on {}", address_of(&listener)?);
    let host = Host {
        args,
        interrupt: &interrupt,
        host,
        monitor: &monitor,
    };
    let outcome = host.wait(&listener, &mut held);
    let was_asked_to_end = monitor.end();
    drop(monitors);
    match outcome {
        Err(CommandError::Interrupted) if was_asked_to_end => Ok(()),
        outcome => outcome,
    }
}

/// What a source is received with.
struct Host<'a> {
    args: &'a ServeArgs,
    interrupt: &'a Interrupt,
    /// Address that data connections are taken at.
    host: &'a str,
    monitor: &'a PassingMonitor,
}

impl Host<'_> {
    /// Waits for sources, until one's migration has ended.
    fn wait(
        &self,
        listener: &Listener,
        held: &mut Option<Destination>,
    ) -> Result<(), CommandError> {
        loop {
            if self.interrupt.is_raised() {
                return Err(CommandError::Interrupted);
            }
            let Some(Stream::Tcp(stream)) = accept(listener)? else {
                continue;
            };
            let here = stream.local_addr().map_err(ControlError::from);
            let visit = match here.and_then(|here| Ok((here.ip(), Conversation::new(stream)?))) {
                Ok((here, mut source)) => self.receive(&mut source, here, held),
                Err(error) => Visit::SentAway(error.into()),
            };
            match visit {
                Visit::Surveyed(what) => complain!("{what}"),
                Visit::Over(outcome) => return outcome,
                Visit::SentAway(error) => {
                    complain!("hotlift: a source was sent away: {}", error_line(&error));
                }
            }
        }
    }

    /// Hears what a source wants, and does it.
    fn receive(
        &self,
        source: &mut Conversation,
        here: IpAddr,
        held: &mut Option<Destination>,
    ) -> Visit {
        let hello = match self.hear_opening(source) {
            Ok(Opening::Migration(hello)) => hello,
            Ok(Opening::Survey(request)) => {
                let port = self.args.data_port;
                let answered = survey::answer(source, &request, here, port, self.interrupt);
                return match answered {
                    Ok(what) => Visit::Surveyed(what),
                    Err(error) => Visit::SentAway(error.into()),
                };
            }
            Err(error) => {
                refuse(source, &error);
                return Visit::SentAway(error);
            }
        };
        let destination = match held.take() {
            Some(destination) => Ok(destination),
            None => Destination::start(&self.args.command, self.interrupt),
        };
        let mut destination = match destination {
            Ok(destination) => destination,
            Err(error) => {
                refuse(source, &error);
                return Visit::SentAway(error);
            }
        };
        let machine = hello.machine.as_deref();
        if let Err(error) = incoming::compare(machine, hello.uuid, &mut destination) {
            refuse(source, &error);
            if self.args.qmp.is_some() {
                *held = Some(destination);
            }
            return Visit::SentAway(error);
        }
        Visit::Over(self.migrate(source, &hello, destination))
    }

    fn hear_opening(&self, source: &mut Conversation) -> Result<Opening, CommandError> {
        let deadline = Instant::now() + HELLO;
        loop {
            if let Some(opening) = source.hear_opening(TICK)? {
                return Ok(opening);
            }
            if self.interrupt.is_raised() {
                return Err(CommandError::Interrupted);
            }
            if Instant::now() >= deadline {
                return Err(CommandError::Silent { waited: HELLO });
            }
        }
    }

    /// Receives the guest into `destination`.
    fn migrate(
        &self,
        source: &mut Conversation,
        hello: &Hello,
        mut destination: Destination,
    ) -> Result<(), CommandError> {
        let folder = private_folder()?;
        let socket = folder.path().join("incoming");
        let (listener, port, settings) = match self.get_ready(hello, &mut destination, &socket) {
            Ok(ready) => ready,
            Err(error) => {
                refuse(source, &error);
                return Err(error);
            }
        };
        let ready = Answer::Ready {
            port,
            qemu: destination.qemu().version(),
        };
        source.say(&ready)?;
        let relayed = self.relay(source, &settings, &listener, &socket);
        drop(listener);
        match relayed {
            Ok(report) => self.taken(source, destination, report),
            Err(error) => Err(self.failed(source, destination, error)),
        }
    }

    /// Lets QEMU listen on `socket`, and listens for the pages at a port.
    fn get_ready(
        &self,
        hello: &Hello,
        destination: &mut Destination,
        socket: &Path,
    ) -> Result<(Listener, u16, RelaySettings), CommandError> {
        let settings = incoming::relay_settings(destination, hello.channels)?;
        incoming::listen(destination, hello.channels, &hello.alike, socket)?;
        let address = Address::Tcp {
            host: self.host.to_owned(),
            port: self.args.data_port,
        };
        let listener = address.listen()?;
        match address_of(&listener)? {
            Address::Tcp { port, .. } => Ok((listener, port, settings)),
            Address::Unix { .. } => Err(CommandError::OnlyTcp { flag: "--listen" }),
        }
    }

    /// Runs the relay, tells the source how it gets on, and cancels it if the source goes.
    fn relay(
        &self,
        source: &mut Conversation,
        settings: &RelaySettings,
        listener: &Listener,
        socket: &Path,
    ) -> Result<RelayReport, MigrationError> {
        let control = self.monitor.waits();
        let outgoing = Address::Unix {
            path: socket.to_owned(),
        };
        let latest = std::sync::Mutex::new(RelayProgress::default());
        let note = |progress: &RelayProgress| {
            self.monitor.note(progress);
            if let Ok(mut latest) = latest.lock() {
                *latest = *progress;
            }
        };
        let hooks = Hooks {
            on_progress: Some(&note),
            ..Hooks::default()
        };
        let outcome = thread::scope(|scope| {
            let relay = scope.spawn(|| {
                hotlift::relay::relay(
                    Incoming::Listener(listener),
                    &Outgoing::Address(&outgoing),
                    settings,
                    &control,
                    hooks,
                )
            });
            let received = || latest.lock().map_or(0, |latest| latest.received_bytes);
            self.attend(source, &relay, &control, &received);
            relay.join().unwrap_or(Err(MigrationError::Cancelled))
        });
        self.monitor.ended(&outcome);
        outcome
    }

    /// Talks to the source until the relay has ended.
    fn attend<T>(
        &self,
        source: &mut Conversation,
        relay: &ScopedJoinHandle<'_, T>,
        control: &Control,
        received: &dyn Fn() -> u64,
    ) {
        let mut told = Instant::now();
        let mut source_is_there = true;
        while !relay.is_finished() {
            if self.interrupt.is_raised() {
                control.cancel();
            }
            if !source_is_there {
                thread::sleep(TICK);
                continue;
            }
            // It has nothing more to say: what comes is its end.
            let mut heard = source.hear::<serde::de::IgnoredAny>(TICK).map(|_| ());
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                let received_bytes = received();
                if !self.args.quiet {
                    complain!("receiving: {} have arrived", bytes(received_bytes));
                }
                heard = heard.and_then(|()| source.say(&Answer::Progress { received_bytes }));
            }
            if heard.is_err() {
                source_is_there = false;
                control.cancel();
            }
        }
    }

    /// The stream has ended well: waits for QEMU to run the guest, and leaves it to itself.
    fn taken(
        &self,
        source: &mut Conversation,
        mut destination: Destination,
        report: RelayReport,
    ) -> Result<(), CommandError> {
        let running = match destination.wait_taken() {
            Ok(running) => running,
            Err(error) => {
                let reason = error_line(&error);
                let guest = Guest::Unknown;
                let _ = source.say(&Answer::Failed { reason, guest });
                return Err(error);
            }
        };
        let report = Box::new(report);
        // Whether the source hears it or not, the guest is here.
        let _ = source.say(&Answer::Completed { running, report });
        let state = if running { "runs" } else { "is paused" };
        say!("the guest {state} here: {}", destination.leave());
        Ok(())
    }

    /// The relay has failed: tells the source why, and where the guest is.
    fn failed(
        &self,
        source: &mut Conversation,
        mut destination: Destination,
        error: MigrationError,
    ) -> CommandError {
        let in_doubt = matches!(error, MigrationError::InDoubt);
        let (guest, words) = destination.after_failure(in_doubt);
        let mut reason = error.chain();
        if let Some(words) = words {
            reason = format!("{reason}; its QEMU: {words}");
        }
        let _ = source.say(&Answer::Failed {
            reason: reason.clone(),
            guest,
        });
        if guest != Guest::NotHere && !destination.has_ended() {
            say!("the guest may be here: {}", destination.leave());
        }
        if self.interrupt.is_raised() {
            return CommandError::Interrupted;
        }
        if in_doubt {
            return CommandError::Relay(error);
        }
        CommandError::Moving { reasons: reason }
    }
}

/// Tells a source that it is refused. It may have gone.
fn refuse(source: &mut Conversation, error: &CommandError) {
    let reason = error_line(error);
    let _ = source.say(&Answer::Refused { reason });
}

fn accept(listener: &Listener) -> Result<Option<Stream>, CommandError> {
    listener
        .accept(TICK)
        .map_err(|source| CommandError::Process {
            what: "listener",
            source,
        })
}

fn address_of(listener: &Listener) -> Result<Address, CommandError> {
    listener.address().map_err(|source| CommandError::Process {
        what: "listener",
        source,
    })
}
