//! `hotlift migrate`: moves the guest of a running QEMU to a host where `hotlift serve` waits.

use std::net::TcpStream;
use std::sync::Mutex;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use clap::Args;
use hotlift::relay::{Hooks, Incoming, Outgoing, RelayProgress, RelayReport, RelaySettings};
use hotlift::transport::Stream;
use hotlift::{Address, Control, MigrationError};
use hotlift_qmp::{QmpAddress, Version};

use crate::args::error_line;
use crate::error::CommandError;
use crate::migration_args::MigrationArgs;
use crate::progress::Display;
use crate::qemu::control::{Answer, Conversation, Guest, Hello, PROTOCOL};
use crate::qemu::result::Migration;
use crate::qemu::source::{Source, Whereabouts};
use crate::qemu::watch::Watch;
use crate::qemu::{private_folder, settings};
use crate::signals::{Interrupt, TICK};

/// How long connecting to the destination host may take.
const CONNECT: Duration = Duration::from_secs(10);

/// How long the destination may take to get ready; it may start a QEMU first.
const READY: Duration = Duration::from_secs(90);

/// How long the destination may take to say what became of a migration whose stream has ended.
const LAST_WORDS: Duration = Duration::from_secs(40);

/// Between two looks at QEMU's figures.
const LOOK: Duration = Duration::from_millis(500);

/// How long a relay may take to notice that QEMU has given up.
const GRACE: Duration = Duration::from_secs(5);

/// Flags of `migrate`.
#[derive(Debug, Args)]
pub struct MigrateArgs {
    /// QMP socket of the QEMU whose guest is to move: PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    qmp: QmpAddress,
    /// Where 'hotlift serve' listens: tcp:HOST:PORT
    #[arg(long, value_name = "URI")]
    to: Address,
    /// Print the figures as one line of JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Show no progress
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    migration: MigrationArgs,
}

/// Runs the command.
pub fn run(args: &MigrateArgs) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    let mut relay_settings = crate::relay::settings(&args.migration)?;
    let source = Source::connect(&args.qmp)?;
    relay_settings.uuid = Some(source.uuid()?.0);
    let mut destination = connect(&args.to)?;
    let hello = hello(&source, &relay_settings)?;
    destination.say(&hello)?;
    let (address, destination_qemu) = ready(args, &mut destination, &interrupt)?;
    let moving = Moving {
        args,
        interrupt: &interrupt,
        source: &source,
        settings: &relay_settings,
        address: &address,
    };
    let outcome = moving.change_settings();
    let outcome = outcome.and_then(|()| moving.run(&mut destination, destination_qemu));
    source.restore_settings();
    let migration = outcome?;
    if args.json {
        if let Ok(line) = serde_json::to_string(&migration) {
            println!("{line}");
        }
    } else {
        println!("{}", migration.table());
    }
    let state = match migration.running {
        Some(true) => "runs",
        Some(false) => "is paused",
        None => "is",
    };
    eprintln!(
        "the guest {state} at the destination; this QEMU keeps a paused copy, and can be ended"
    );
    Ok(())
}

fn connect(to: &Address) -> Result<Conversation, CommandError> {
    if !matches!(to, Address::Tcp { .. }) {
        return Err(CommandError::OnlyTcp { flag: "--to" });
    }
    let stream: TcpStream = match to.connect(CONNECT) {
        Ok(Stream::Tcp(stream)) => stream,
        Ok(Stream::Unix(_)) => return Err(CommandError::OnlyTcp { flag: "--to" }),
        Err(source) => {
            return Err(CommandError::NoServe { source });
        }
    };
    Ok(Conversation::new(stream)?)
}

fn hello(source: &Source, settings: &RelaySettings) -> Result<Hello, CommandError> {
    let at_source = |error| CommandError::qmp("source", error);
    let uuid = source.uuid()?;
    let mut qemu = source.qemu();
    let capabilities = qemu.query_capabilities().map_err(at_source)?;
    let alike = capabilities
        .into_iter()
        .filter(|(name, _)| settings::ALIKE.contains(&name.as_str()))
        .collect();
    Ok(Hello {
        hotlift_control: PROTOCOL,
        qemu: qemu.version(),
        machine: qemu.machine_type().map_err(at_source)?,
        uuid,
        running: source.was_running(),
        channels: settings.outgoing.channels(),
        alike,
    })
}

/// Waits until the destination is ready; where its relay listens, and its QEMU's version.
fn ready(
    args: &MigrateArgs,
    destination: &mut Conversation,
    interrupt: &Interrupt,
) -> Result<(Address, Version), CommandError> {
    let deadline = Instant::now() + READY;
    loop {
        match destination.hear(TICK)? {
            Some(Answer::Ready { port, qemu }) => {
                let address = match &args.to {
                    Address::Tcp { host, .. } => Address::Tcp {
                        host: host.clone(),
                        port,
                    },
                    Address::Unix { .. } => return Err(CommandError::OnlyTcp { flag: "--to" }),
                };
                return Ok((address, qemu));
            }
            Some(Answer::Refused { reason } | Answer::Failed { reason, .. }) => {
                let reason = hotlift_qmp::one_line(&reason);
                return Err(CommandError::Refused { reason });
            }
            Some(Answer::Progress { .. } | Answer::Completed { .. }) | None => {}
        }
        if interrupt.is_raised() {
            return Err(CommandError::Interrupted);
        }
        if Instant::now() >= deadline {
            return Err(CommandError::Silent { waited: READY });
        }
    }
}

/// One migration whose destination is ready.
struct Moving<'a> {
    args: &'a MigrateArgs,
    interrupt: &'a Interrupt,
    source: &'a Source,
    settings: &'a RelaySettings,
    address: &'a Address,
}

/// What the destination has said when it was over.
#[derive(Debug)]
enum LastWords {
    Completed {
        running: bool,
        report: Box<RelayReport>,
    },
    Failed {
        reason: String,
        guest: Guest,
    },
}

impl Moving<'_> {
    fn change_settings(&self) -> Result<(), CommandError> {
        let channels = self.settings.outgoing.channels();
        let (capabilities, mut parameters) = settings::for_relay(channels);
        // The limit is one of the wire, behind compression; the relay keeps it, and QEMU is slowed
        // down by its socket.
        parameters.insert("max-bandwidth".to_owned(), 0.into());
        if self.args.migration.has("downtime-limit") {
            let limit = self.settings.outgoing.downtime_limit.as_millis();
            let limit = u64::try_from(limit).unwrap_or(u64::MAX);
            parameters.insert("downtime-limit".to_owned(), limit.into());
        }
        self.source.change_settings(&capabilities, &parameters)
    }

    /// Runs relay and migration to their end.
    fn run(
        &self,
        destination: &mut Conversation,
        destination_qemu: Version,
    ) -> Result<Migration, CommandError> {
        let folder = private_folder()?;
        let path = folder.path().join("outgoing");
        let uri = format!("unix:{}", path.display());
        let listener = Address::Unix { path }.listen()?;
        let control = Control::new();
        let sent = Mutex::new(0);
        let note = |progress: &RelayProgress| {
            if let Ok(mut sent) = sent.lock() {
                *sent = progress.sent_bytes;
            }
        };
        let has_let_go = || self.source.has_let_go();
        let hooks = Hooks {
            on_progress: Some(&note),
            has_let_go: Some(&has_let_go),
        };
        let mut last_words = None;
        let relayed = thread::scope(|scope| {
            let relay = scope.spawn(|| {
                hotlift::relay::relay(
                    Incoming::Listener(&listener),
                    &Outgoing::Address(self.address),
                    self.settings,
                    &control,
                    hooks,
                )
            });
            let started = self.source.migrate(&uri);
            if started.is_err() {
                control.cancel();
            }
            let sent = || sent.lock().map_or(0, |sent| *sent);
            self.watch(destination, &mut last_words, &relay, &control, &sent);
            let relayed = relay.join().unwrap_or(Err(MigrationError::Cancelled));
            started.map(|()| relayed)
        })?;
        drop(listener);
        match relayed {
            Ok(report) => self.moved(destination, last_words, report, destination_qemu),
            Err(error) => Err(self.stayed(destination, last_words, &error)),
        }
    }

    /// Shows how it gets on until the relay has ended; cancels it on a signal.
    fn watch<T>(
        &self,
        destination: &mut Conversation,
        last_words: &mut Option<LastWords>,
        relay: &ScopedJoinHandle<'_, T>,
        control: &Control,
        sent: &dyn Fn() -> u64,
    ) {
        let display = Display::new("migration", self.args.quiet);
        let mut watch = Watch::default();
        let mut looked = Instant::now();
        let mut cancelled = false;
        let mut given_up: Option<Instant> = None;
        while !relay.is_finished() {
            if self.interrupt.is_raised() && !cancelled {
                cancelled = true;
                display.finish();
                eprintln!("cancelling");
                // QEMU decides whether it is too late; its sockets tell the relay.
                if self.source.cancel().is_err() {
                    control.cancel();
                }
            }
            self.hear(destination, last_words, TICK);
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                if let Ok(info) = self.source.look() {
                    let line = watch.look(&info, sent(), looked);
                    display.show_line(watch.round(), || line);
                    if info.has_failed() {
                        given_up.get_or_insert(looked);
                    }
                }
            }
            if given_up.is_some_and(|since| since.elapsed() >= GRACE) {
                control.cancel();
            }
        }
        display.finish();
    }

    /// Takes what the destination says within `timeout`.
    fn hear(
        &self,
        destination: &mut Conversation,
        last_words: &mut Option<LastWords>,
        timeout: Duration,
    ) {
        if last_words.is_some() {
            thread::sleep(timeout);
            return;
        }
        match destination.hear(timeout) {
            Ok(Some(Answer::Completed { running, report })) => {
                *last_words = Some(LastWords::Completed { running, report });
            }
            Ok(Some(Answer::Failed { reason, guest })) => {
                let reason = hotlift_qmp::one_line(&reason);
                *last_words = Some(LastWords::Failed { reason, guest });
            }
            Ok(_) => {}
            // The relays settle who has the guest; without this connection there are only less words.
            Err(error) => {
                let reason = error_line(&error);
                *last_words = Some(LastWords::Failed {
                    reason: format!("'hotlift serve' is not heard any more: {reason}"),
                    guest: Guest::Unknown,
                });
            }
        }
    }

    /// Waits for the destination's last words.
    fn hear_out(
        &self,
        destination: &mut Conversation,
        last_words: Option<LastWords>,
    ) -> Option<LastWords> {
        let deadline = Instant::now() + LAST_WORDS;
        let mut last_words = last_words;
        while last_words.is_none() && Instant::now() < deadline {
            self.hear(destination, &mut last_words, TICK);
        }
        last_words
    }

    /// The relay says that the destination has the guest.
    fn moved(
        &self,
        destination: &mut Conversation,
        last_words: Option<LastWords>,
        source: RelayReport,
        destination_qemu: Version,
    ) -> Result<Migration, CommandError> {
        let at_source = |error| CommandError::qmp("source", error);
        let (running, destination) = match self.hear_out(destination, last_words) {
            Some(LastWords::Completed { running, report }) => (Some(running), Some(*report)),
            Some(LastWords::Failed { reason, guest }) => {
                eprintln!("hotlift: the destination: {reason}");
                if guest == Guest::NotHere {
                    return Err(CommandError::InDoubt { reasons: reason });
                }
                (None, None)
            }
            None => (None, None),
        };
        Ok(Migration {
            qemu: self.source.look().map_err(at_source)?,
            source_qemu: self.source.qemu().version(),
            destination_qemu,
            running,
            source,
            destination,
        })
    }

    /// The relay has failed: sees that the guest goes on here, and says why.
    fn stayed(
        &self,
        destination: &mut Conversation,
        last_words: Option<LastWords>,
        error: &MigrationError,
    ) -> CommandError {
        let mut reasons = vec![error.chain()];
        if let Ok(info) = self.source.look()
            && let Some(words) = info.error_desc
        {
            reasons.push(format!("QEMU at the source: {words}"));
        }
        let mut heard = None;
        let settled = self.source.settle(|| {
            heard = self.hear_out(destination, last_words);
            match &heard {
                Some(LastWords::Completed { .. }) => Guest::Here,
                Some(LastWords::Failed { guest, .. }) => *guest,
                None => Guest::Unknown,
            }
        });
        if let Some(LastWords::Failed { reason, .. }) = heard {
            reasons.push(format!("the destination: {reason}"));
        }
        let reasons = reasons.join("; ");
        match settled {
            Err(problem) => CommandError::InDoubt {
                reasons: format!("{reasons}; QEMU at the source: {}", error_line(&problem)),
            },
            Ok(Whereabouts::InDoubt) => CommandError::InDoubt { reasons },
            Ok(Whereabouts::Moved) => CommandError::MovedAnyway { reasons },
            Ok(whereabouts) => {
                let state = match whereabouts {
                    Whereabouts::Runs => "runs on",
                    _ => "stays paused",
                };
                eprintln!("hotlift: the guest {state} at the source");
                if self.interrupt.is_raised() {
                    return CommandError::Interrupted;
                }
                CommandError::Moving { reasons }
            }
        }
    }
}
