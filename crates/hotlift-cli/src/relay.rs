//! `hotlift relay`: forwards migrations between the QEMU of this host and the relay of another host.

use std::ops::ControlFlow;
use std::sync::Arc;

use clap::{Args, Subcommand};
use hotlift::relay::{Hooks, Incoming, Outgoing, RelayProgress, RelaySettings};
use hotlift::{Address, Listener, MigrationError, Options};
use hotlift_command::migration_args::{RoleArgs, role};
use hotlift_command::security::{self, QemuTlsArgs};
use hotlift_monitor::RelayMonitor;
use hotlift_qmp::Uuid;
use hotlift_qmp::server::{Commands, Events};
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::{print_line, print_rejected_connections, warn};
use hotlift_terminal::progress::{Display, jobs};
use hotlift_terminal::signals::Interrupt;

use crate::control_args::ControlArgs;
use crate::error::CommandError;
use crate::flush_args::FlushArgs;
use crate::output_args::OutputArgs;
use crate::relay_report::{progress_line, relay_table};

/// Host of a relay. Both relays do the same; the help differs, because the usual flags do.
#[derive(Debug, Subcommand)]
pub enum RelayCommand {
    /// Receive migrations from the QEMU of this host, and send them to the relay of another host
    ///
    /// This relay compresses the pages, so set the method and the number of channels here:
    ///
    ///   hotlift relay source --listen unix:/run/a.sock --connect tcp:HOST:4444 --method zstd
    ///
    /// Both hosts need certificates ('hotlift certs'), or --insecure. In QEMU's monitor, with multifd on (any number of
    /// channels) or off:
    ///
    ///   migrate -d unix:/run/a.sock
    #[command(verbatim_doc_comment)]
    Source(RelayArgs),
    /// Receive migrations from the relay of another host, and pass them to the QEMU of this host
    ///
    /// The relay detects the method of the other host. --channels, --method and --multifd describe the stream to the QEMU of
    /// this host, and must be the settings of that QEMU (its method is usually none).
    ///
    ///   hotlift relay destination --listen tcp::4444 --connect unix:/run/b.sock
    ///
    /// Both hosts need certificates ('hotlift certs'), or --insecure. In the monitor of a QEMU started with '-incoming defer':
    ///
    ///   migrate_set_capability multifd on
    ///   migrate_incoming unix:/run/b.sock
    #[command(verbatim_doc_comment)]
    Destination(RelayArgs),
}

/// Flags of both.
#[derive(Debug, Args)]
#[command(mut_arg("control", |arg| arg.visible_alias("qmp")))]
pub struct RelayArgs {
    /// Listen for migrations at this address: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    listen: Address,
    /// Forward migrations to this address: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI", value_parser = Address::of_peer)]
    connect: Address,
    /// UUID of the VM, for the multifd channels; needed if the VM has a UUID and the source does not use multifd
    #[arg(long, value_name = "UUID")]
    uuid: Option<Uuid>,
    #[command(flatten)]
    flush: FlushArgs,
    /// Relay one migration after another, also after a failed migration, until a signal ends the relay
    #[arg(long)]
    forever: bool,
    #[command(flatten)]
    qemu_tls: QemuTlsArgs,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    migration: RoleArgs<role::Relay>,
}

/// Runs `hotlift relay`.
pub fn run(command: &RelayCommand) -> Result<(), CommandError> {
    let (label, args) = match command {
        RelayCommand::Source(args) => ("relay source", args),
        RelayCommand::Destination(args) => ("relay destination", args),
    };
    let interrupt = Interrupt::catch()?;
    let mut settings = args.migration.relay_settings()?;
    let (listen, connect) = (&args.listen, &args.connect);
    let (of_relay, of_qemu) = match command {
        RelayCommand::Source(_) => (connect, listen),
        RelayCommand::Destination(_) => (listen, connect),
    };
    let options = args.migration.values();
    let relay_tls = security::tls(&options.tls, of_relay)?;
    let connects = matches!(command, RelayCommand::Destination(_));
    let qemu_tls = args.qemu_tls.tls(&options.tls, of_qemu, connects)?;
    (settings.outgoing_tls, settings.incoming_tls) = match command {
        RelayCommand::Source(_) => (relay_tls, qemu_tls),
        RelayCommand::Destination(_) => (qemu_tls, relay_tls),
    };
    settings.to_qemu = matches!(command, RelayCommand::Destination(_));
    settings.uuid = args.uuid.map(|uuid| uuid.0);
    settings.flush_after_each_section = args.flush.value();
    let listener = args.listen.listen()?;
    let address = listener
        .address()
        .map_err(TerminalError::process("listener"))?;
    let events = Events::new();
    let shown = Options {
        stream: settings.outgoing.clone(),
        ..options.clone()
    };
    let monitor = RelayMonitor::new(shown, events.clone(), &interrupt);
    let commands: Arc<dyn Commands> = Arc::new(monitor.clone());
    let monitors = args.control.serve(&commands, &events)?;
    print_line!("listening on {address}");
    let relay = Relay {
        args,
        label,
        settings: &settings,
        listener: &listener,
        interrupt: &interrupt,
        monitor: &monitor,
    };
    let outcome = loop {
        match relay.one() {
            ControlFlow::Continue(()) if args.forever && !interrupt.is_raised() => {}
            ControlFlow::Continue(()) => break Ok(()),
            ControlFlow::Break(error) => break Err(error),
        }
    };
    let was_asked_to_end = monitor.end();
    drop(monitors);
    match outcome {
        Err(CommandError::Relay(MigrationError::Cancelled)) if was_asked_to_end => Ok(()),
        outcome => outcome,
    }
}

/// Settings of a relay that forwards one or more migrations.
struct Relay<'a> {
    args: &'a RelayArgs,
    label: &'a str,
    settings: &'a RelaySettings,
    listener: &'a Listener,
    interrupt: &'a Interrupt,
    monitor: &'a RelayMonitor,
}

impl Relay<'_> {
    /// Forwards one migration. Returns `Break` with an error that ends the command.
    fn one(&self) -> ControlFlow<CommandError> {
        let (args, label) = (self.args, self.label);
        let control = self.monitor.waits();
        let display = Display::new(label, args.output.quiet, &control);
        let show = |progress: &RelayProgress| {
            self.monitor.note(progress);
            display.show_line(0, || {
                let jobs = jobs(&control.jobs());
                format!("{}{jobs}", progress_line(label, progress, control.stall())).into()
            });
        };
        let hooks = Hooks {
            on_progress: Some(&show),
            ..Hooks::default()
        };
        let outcome = self.interrupt.cancelling(&control, || {
            hotlift::relay::relay(
                Incoming::Listener(self.listener),
                &Outgoing::Address(&args.connect),
                self.settings,
                &control,
                hooks,
            )
        });
        display.finish();
        print_rejected_connections(&control);
        self.monitor.ended(&outcome);
        match outcome {
            Ok(report) => {
                let printed = args.output.print(&report, || relay_table(label, &report));
                match printed {
                    // Only printed: an error while printing the report must not stop later migrations.
                    Err(error) if args.forever => warn!("hotlift: {}", error_line(&error)),
                    Err(error) => return ControlFlow::Break(error.into()),
                    Ok(()) => {}
                }
                ControlFlow::Continue(())
            }
            Err(error) if args.forever && !self.interrupt.is_raised() => {
                warn!("hotlift: {label}: {}", error.chain());
                ControlFlow::Continue(())
            }
            Err(error) => ControlFlow::Break(CommandError::Relay(error)),
        }
    }
}
