//! `hotlift restore`: loads a saved guest from a file into a QEMU.

mod lazily;

use std::ffi::OsString;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use clap::{ArgGroup, Args};
use hotlift::file::{self, FileError, FileInfo, Location, LostPages};
use hotlift::options::OptionError;
use hotlift::relay::{Hooks, Incoming, Outgoing, RelayProgress, RelayReport, RelaySettings};
use hotlift::{Address, Control, MigrationError};
use hotlift_command::error::SharedError;
use hotlift_command::migration_args::{LimitArgs, role};
use hotlift_command::security;
use hotlift_qemu::QemuError;
use hotlift_qemu::capabilities::Purpose;
use hotlift_qemu::compare::{self, compare};
use hotlift_qemu::destination::{Destination, Statement};
use hotlift_qemu::error::at_destination;
use hotlift_qemu::incoming;
use hotlift_qemu::run_state::state_clause;
use hotlift_qemu::unused_ram::unused_ram;
use hotlift_qemu::vm::Vm;
use hotlift_qmp::QmpAddress;
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::warn;
use hotlift_terminal::progress::{Display, bytes};
use hotlift_terminal::signals::Interrupt;

use crate::clock::{GuestClock, SavedAt};
use crate::differences;
use crate::error::CommandError;
use crate::flush_args::FlushArgs;
use crate::output_args::OutputArgs;
use crate::relay_report::relay_table;
use crate::save_file::{location, named};

/// First bytes of QEMU's migration stream (`QEMU_VM_FILE_MAGIC`).
const QEMU_FILE_MAGIC: [u8; 4] = *b"QEVM";

/// Flags of `restore`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("receiver").args(["command", "qmp"]).required(true)))]
#[command(mut_arg("multifd_flush_after_each_section", |arg| arg.conflicts_with("lazy")))]
pub struct RestoreArgs {
    /// File of 'hotlift save', mapped-ram file of QEMU, or a file of 'hotlift serve --files': tcp:HOST:PORT/NAME
    #[arg(value_name = "FILE", value_parser = location())]
    file: Location,
    /// QMP socket of a QEMU that waits with '-incoming defer': PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    qmp: Option<QmpAddress>,
    /// Position of the mapped-ram data in the file, in bytes, as in QEMU's file:PATH,offset=N
    #[arg(long, value_name = "N", default_value_t = 0)]
    offset: u64,
    /// Number of multifd channels to QEMU, 1 to 255; 0 turns multifd off
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        visible_alias = "channels"
    )]
    multifd_channels: u8,
    /// Run the guest at once; send each page when the guest needs it, and the other pages in the background
    #[arg(long, conflicts_with = "multifd_channels")]
    lazy: bool,
    /// Resume an interrupted lazy restore, in the QEMU whose guest waits for pages
    #[arg(long, requires_all = ["lazy", "qmp"])]
    resume: bool,
    /// Replace damaged pages of the file with zero pages, and list them
    #[arg(long)]
    salvage: bool,
    /// With --lazy: bandwidth limit for pages that the guest has not requested, in bytes a second; 0 is unlimited [default: 0]
    #[arg(long, value_name = "BYTES/S", requires = "lazy")]
    max_bandwidth: Option<String>,
    /// With --lazy: limit of CPU time for pages that the guest has not requested, in cores; 0 is unlimited [default: 0]
    #[arg(long, value_name = "CORES", requires = "lazy")]
    cpu_limit: Option<String>,
    /// Restore even if the VM differs from the saved VM, and let QEMU decide
    #[arg(long, conflicts_with = "resume")]
    ignore_differences: bool,
    #[command(flatten)]
    flush: FlushArgs,
    /// Set the guest's clock once the guest runs, through this UNIX socket of the guest agent (qemu-ga) in the restored QEMU
    #[arg(long, value_name = "SOCKET")]
    sync_time: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    limits: LimitArgs<role::Restore>,
    /// Command line of the QEMU to start; '-incoming defer' and a QMP socket are added
    #[arg(last = true, value_name = "QEMU", conflicts_with = "qmp")]
    command: Vec<OsString>,
}

impl RestoreArgs {
    /// Returns the command line that loads the remaining pages of a lazily restored guest from `file`. `qmp` is the QMP socket
    /// of the guest's QEMU.
    fn to_resume(&self, file: &str, qmp: Option<&QmpAddress>) -> String {
        let qmp = qmp.map_or("ADDRESS".to_owned(), QmpAddress::to_string);
        let mut words = vec![
            "hotlift", "restore", "--lazy", "--resume", file, "--qmp", &qmp,
        ];
        let tls = &self.limits.tls;
        if self.file.server().is_some() {
            let given = [("--tls", &tls.creds), ("--tls-hostname", &tls.hostname)];
            for (flag, value) in given.into_iter().filter(|(_, value)| !value.is_empty()) {
                words.extend([flag, value]);
            }
            words.extend(tls.insecure.then_some("--insecure"));
        }
        words.extend(self.salvage.then_some("--salvage"));
        // Arguments never contain a NUL byte.
        shlex::try_join(words).unwrap_or_default()
    }

    /// Returns the location of the save file, with TLS settings if a server has it.
    fn file(&self) -> Result<Location, SharedError> {
        let options = &self.limits.tls;
        let tls = match self.file.server() {
            Some(server) => security::tls(options, server)?,
            None if !options.creds.is_empty() => {
                return Err(OptionError::Conflict {
                    option: format!("tls-creds={}", options.creds),
                    needs: "a file on another host: tcp:HOST:PORT/NAME",
                }
                .into());
            }
            None => None,
        };
        Ok(self.file.clone().with_tls(tls))
    }
}

/// Runs `hotlift restore`.
pub fn run(args: &RestoreArgs) -> Result<(), CommandError> {
    let restored = restore(args).map_err(|error| named(error, &args.file));
    match args.resume {
        true => restored.map_err(as_still_waiting),
        false => restored,
    }
}

/// Adds to the error of a failed `--resume` that the guest still waits for its pages. Leaves errors unchanged that report the
/// guest's state themselves.
fn as_still_waiting(error: CommandError) -> CommandError {
    match error {
        CommandError::Qemu(QemuError::NotPaused { .. })
        | CommandError::NotTaken { .. }
        | CommandError::EndedSince { .. }
        | CommandError::NotRunning { .. }
        | CommandError::PagesMissing { .. } => error,
        error if error.is_usage() => error,
        error => CommandError::StillWaits {
            reasons: error.line(),
        },
    }
}

fn restore(args: &RestoreArgs) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    let lazily = match args.lazy {
        true => Some(lazily::options(args)?),
        false => None,
    };
    let file = args.file()?;
    let info = info(args, &file, &interrupt)?;
    for (flag, is_given) in [("--lazy", args.lazy), ("--salvage", args.salvage)] {
        if is_given && info.is_none() {
            return Err(CommandError::Restore {
                reasons: format!(
                    "{flag} needs a file of 'hotlift save', but QEMU wrote this one; restore it without {flag}"
                ),
            });
        }
    }
    let id = info.as_ref().map_or(0, |info| info.id);
    let mut destination = match &args.qmp {
        Some(address) if args.resume => Destination::recovering(address, id)?,
        Some(address) => Destination::held(address)?,
        None => Destination::start(&args.command, &interrupt)?,
    };
    if let Some(info) = &info {
        compare_saved(args, info, &destination)?;
    }
    let saved = match (&info, &file) {
        (Some(info), _) => Some(SavedAt::Kept(info.saved_at())),
        (None, Location::Path(path)) => SavedAt::modified(path),
        (None, Location::Server(_)) => None,
    };
    let clock = GuestClock::new(saved, args.sync_time.clone());
    if let Some(options) = lazily {
        let socket = destination.socket_for(id);
        if !args.resume {
            incoming::listen_for_pages(&mut destination, &socket)?;
        }
        return lazily::run(
            args,
            (&file, id),
            destination,
            (&socket, clock),
            &options,
            &interrupt,
        );
    }
    let socket = destination.socket();
    let channels = args.multifd_channels;
    incoming::listen(&mut destination, Purpose::Restore, channels, &[], &socket)?;
    let limits = args.limits.limits.clone();
    let unused_ram = unused_ram(&mut destination.qemu()).map_err(at_destination)?;
    let settings = RelaySettings {
        unused_ram,
        salvage: args.salvage,
        flush_after_each_section: args.flush.value(),
        ..incoming::relay_settings(&mut destination, args.multifd_channels, limits)?
    };
    let settle_timeout = settings.limits.settle_timeout;
    let report = match relay(args, &file, &destination, &settings, &socket, &interrupt) {
        Ok(report) => report,
        Err(error) => return failed(&error, destination, clock, settle_timeout, &interrupt),
    };
    report.lost.iter().for_each(print_lost_pages);
    await_load(destination, &clock, settle_timeout, &interrupt)?;
    let table = || relay_table("restore", &report);
    let printed = args.output.print(&report, table);
    clock.report();
    Ok(printed?)
}

/// Compares the saved VM with the VM of the QEMU that receives the guest. Prints the differences.
///
/// # Errors
/// If QEMU would refuse a difference, and `--ignore-differences` was not given.
fn compare_saved(
    args: &RestoreArgs,
    info: &FileInfo,
    destination: &Destination,
) -> Result<(), QemuError> {
    let saved = info.vm.clone().map(serde_json::from_value::<Vm>);
    let saved = Vm {
        machine: Some(info.machine.clone()).filter(|machine| !machine.is_empty()),
        uuid: info.uuid.parse().unwrap_or_default(),
        // Another version of this command may have recorded fewer values, or none that can be read.
        ..saved.and_then(Result::ok).unwrap_or_default()
    };
    let there = match args.resume {
        // Compares only the machine and the UUID: this QEMU has the guest, and devices may have been plugged later.
        true => Vm::identity(&mut destination.qemu()).map_err(at_destination)?,
        false => destination.vm(Some(&saved))?,
    };
    let rows = compare(&saved, &there);
    if !args.ignore_differences {
        compare::check(&rows)?;
    }
    differences::warn(&rows);
    Ok(())
}

/// Waits until QEMU confirms that it has loaded the guest, and prints this on standard error.
fn await_load(
    destination: Destination,
    clock: &GuestClock,
    settle_timeout: Duration,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    interrupt.forget();
    let statement = destination.statement_in_time(settle_timeout, interrupt);
    conclude(
        statement,
        (destination, clock),
        None,
        |_, reason| CommandError::NotTaken { reason },
        |destination, _, reason| not_known(destination, reason),
    )
}

/// Prints QEMU's statement about the guest, or returns the error for this statement. `trouble` is an error of the restore.
/// `never` makes the error if QEMU never ran the guest. `unknown` makes the error if it is unknown whether QEMU has the guest;
/// its flag is true if QEMU answers. Both functions get the reason.
fn conclude(
    statement: Statement,
    (destination, clock): (Destination, &GuestClock),
    trouble: Option<&str>,
    never: impl FnOnce(Destination, String) -> CommandError,
    unknown: impl FnOnce(Destination, bool, String) -> CommandError,
) -> Result<(), CommandError> {
    match statement {
        Statement::Here { state } => {
            if let Some(trouble) = trouble {
                warn!("hotlift: the guest is restored, but errors occurred: {trouble}");
            }
            warn!(
                "the guest {}: {}",
                state_clause(&state),
                destination.keep_running()
            );
            clock.is_here(&state);
            Ok(())
        }
        // The QEMU is not ended: it has the guest, but does not run it.
        Statement::Stopped { reason, can_run } => Err(CommandError::NotRunning {
            reasons: match trouble {
                Some(trouble) if !trouble.contains(&reason) => {
                    format!("{trouble}; QEMU: {reason}")
                }
                _ => reason,
            },
            qemu: destination.keep_running(),
            can_run,
            has_source: false,
        }),
        Statement::Ended { reason } => Err(CommandError::Restore { reasons: reason }),
        Statement::GuestEnded {
            how,
            by_itself: true,
        } => {
            warn!("the guest was restored, then its QEMU ended: {how}");
            Ok(())
        }
        Statement::GuestEnded { how, .. } => Err(CommandError::EndedSince { how }),
        Statement::Never { reason } => Err(never(destination, reason)),
        Statement::Unknown { answers, reason } => Err(unknown(destination, answers, reason)),
    }
}

/// Determines the result after the relay failed: the guest may run nevertheless.
fn failed(
    error: &MigrationError,
    destination: Destination,
    clock: GuestClock,
    settle_timeout: Duration,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let is_interrupted = interrupt.is_raised();
    let in_doubt = matches!(error, MigrationError::InDoubt);
    if in_doubt {
        interrupt.forget();
    }
    let statement = destination.after_failure(in_doubt, settle_timeout, interrupt);
    let trouble = error.chain();
    let explained = |words: &str| format!("{trouble}; QEMU: {words}");
    let never = |destination: Destination, reason: String| {
        destination.restore_settings();
        match is_interrupted {
            true => TerminalError::Interrupted.into(),
            false if error.is_damage() => CommandError::Damaged {
                reasons: trouble.clone(),
            },
            false => CommandError::Restore {
                reasons: explained(&reason),
            },
        }
    };
    let concluded = conclude(
        statement,
        (destination, &clock),
        Some(&trouble),
        never,
        |destination, _, reason| not_known(destination, explained(&reason)),
    );
    clock.report();
    concluded
}

/// Prints the damaged parts of the file; these pages are zero in the guest.
fn print_lost_pages(lost: &LostPages) {
    warn!("hotlift: lost: {lost}");
}

/// Returns the error for a QEMU that may or may not run the guest. Does not end this QEMU.
fn not_known(destination: Destination, reasons: String) -> CommandError {
    CommandError::NotKnown {
        reasons,
        qemu: destination.keep_running_unchanged(),
    }
}

/// Returns the description in a file that Hotlift wrote; `None` for a file that QEMU wrote. In such a file, only the start of a
/// migration stream is checked; the stream itself describes the VM.
fn info(
    args: &RestoreArgs,
    file: &Location,
    interrupt: &Interrupt,
) -> Result<Option<FileInfo>, CommandError> {
    let refused = |error: FileError| match interrupt.is_raised() {
        true => TerminalError::Interrupted.into(),
        false => CommandError::Restore {
            reasons: error_line(&error),
        },
    };
    let path = match file {
        Location::Path(path) => Some(path),
        Location::Server(_) => None,
    };
    if args.offset == 0 || path.is_none() {
        let control = Control::new();
        let inspected = interrupt.cancelling(&control, || file::inspect(file, &control));
        match inspected {
            Ok(info) => return Ok(Some(info)),
            Err(FileError::NotASave) if path.is_some() => {}
            Err(error) => return Err(refused(error)),
        }
    }
    let mut magic = [0; QEMU_FILE_MAGIC.len()];
    let opened = path
        .map(|path| file::open(path))
        .transpose()
        .map_err(refused)?;
    let read = opened.map(|file| file.read_exact_at(&mut magic, args.offset));
    if !matches!(read, Some(Ok(()))) || magic != QEMU_FILE_MAGIC {
        return Err(refused(FileError::NotASave));
    }
    Ok(None)
}

fn relay(
    args: &RestoreArgs,
    file: &Location,
    destination: &Destination,
    settings: &RelaySettings,
    socket: &Path,
    interrupt: &Interrupt,
) -> Result<RelayReport, MigrationError> {
    let control = Control::new();
    let display = Mutex::new(Display::new("restore", args.output.quiet, &control));
    let show = |progress: &RelayProgress| {
        if let Ok(display) = display.lock() {
            display.show_line(0, || {
                format!(
                    "restore: {} read, {} of RAM",
                    bytes(progress.received_bytes),
                    bytes(progress.total_bytes)
                )
                .into()
            });
        }
    };
    let on_commit = || destination.custody().release();
    let has_taken = |was: Option<&str>| destination.query_guest_state(was);
    let hooks = Hooks {
        on_progress: Some(&show),
        on_commit: Some(&on_commit),
        has_taken: Some(&has_taken),
        ..Hooks::default()
    };
    let outgoing = Address::Unix {
        path: socket.to_owned(),
    };
    let incoming = match file {
        Location::Path(path) => Incoming::File {
            path,
            offset: args.offset,
        },
        Location::Server(file) => Incoming::Remote(file),
    };
    let relayed = interrupt.cancelling(&control, || {
        hotlift::relay::relay(
            incoming,
            &Outgoing::Address(&outgoing),
            settings,
            &control,
            hooks,
        )
    });
    if let Ok(display) = display.lock() {
        display.finish();
    }
    relayed
}
