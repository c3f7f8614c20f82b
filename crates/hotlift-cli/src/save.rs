//! `hotlift save`: saves the guest of a running QEMU to a file.

use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use hotlift::MigrationError;
use hotlift::file::{self, FileError, FileFormat};
use hotlift::relay::Outgoing;
use hotlift_command::migration_args::{RoleArgs, role};
use hotlift_mem::wait_readable;
use hotlift_qemu::QemuError;
use hotlift_qemu::capabilities::Purpose;
use hotlift_qemu::downtime_limit::LimitArgs;
use hotlift_qemu::error::at_source;
use hotlift_qemu::outgoing::{self, OutgoingMigration, Relayed};
use hotlift_qemu::source::{DestinationKnowledge, Source};
use hotlift_qemu::unused_ram::unused_ram;
use hotlift_qemu::vm;
use hotlift_qmp::QmpAddress;
use hotlift_terminal::error::error_line;
use hotlift_terminal::output::warn;
use hotlift_terminal::signals::Interrupt;

use crate::error::CommandError;
use crate::output_args::OutputArgs;
use crate::relay_report::Saved;

/// Flags of `save`.
#[derive(Debug, Args)]
pub struct SaveArgs {
    /// File to write; replaces an existing file once the new file is complete
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// QMP socket of the QEMU whose guest to save: PATH, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    qmp: QmpAddress,
    /// Format of the file
    #[arg(long, value_enum, default_value = "hotlift")]
    format: Format,
    /// Continue the guest after the save, instead of leaving it paused
    #[arg(long)]
    keep_running: bool,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    migration: RoleArgs<role::Save>,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Format of Hotlift: compressed by the chosen method, with checksums; 'restore --lazy' reads it
    Hotlift,
    /// Format mapped-ram of QEMU: uncompressed; QEMU 9.0 or later can load it without Hotlift
    MappedRam,
}

/// Runs `hotlift save`.
pub fn run(args: &SaveArgs) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch()?;
    let mut settings = args.migration.relay_settings()?;
    let format = match args.format {
        Format::Hotlift => FileFormat::Hotlift,
        Format::MappedRam => FileFormat::MappedRam,
    };
    format.check(&settings.outgoing)?;
    file::check_target(&args.file).map_err(|error| CommandError::Save {
        reason: error_line(&error),
        advice: None,
    })?;
    let source = Source::connect(&args.qmp, Purpose::Save)?;
    let vm = source.vm()?;
    settings.uuid = Some(vm.uuid.0);
    settings.vm = serde_json::to_value(vm.within(vm::FILE_MAX)).ok();
    settings.unused_ram = unused_ram(&mut source.qemu()).map_err(at_source)?;
    let moving = OutgoingMigration {
        source: &source,
        interrupt: &interrupt,
        settings: &settings,
        outgoing: Outgoing::File {
            path: &args.file,
            format,
        },
        quiet: args.output.quiet,
    };
    let limit = LimitArgs {
        own: args.migration.downtime_limit(),
        // The downtime limit is not raised step by step: a saved guest needs no low downtime.
        ramps: false,
    };
    let wait = &mut |wakes: &[BorrowedFd<'_>], until, _: &_| {
        wait_readable(wakes, Some(until));
    };
    let outcome = outgoing::change_settings(&source, Purpose::Save, &settings, limit)
        .and_then(|limit| moving.run(limit, wait));
    let saved = match outcome {
        Ok(Relayed {
            outcome: Ok(relay), ..
        }) => Ok(Saved {
            qemu: source.poll().unwrap_or_default(),
            relay,
            file_bytes: length(&args.file),
        }),
        // No guest runs at a file.
        Ok(Relayed {
            outcome: Err(error),
            ..
        }) => {
            let settled = source.settle(&error, false, || DestinationKnowledge::NotHere);
            let failed = settled.into_error(None, interrupt.is_raised());
            Err(not_saved(failed, room(&error)))
        }
        Err(error) => Err(error.into()),
    };
    source.restore_settings();
    let saved = saved?;
    let ended = source.guest_end();
    if let Some(how) = &ended {
        warn!("{how} during the save");
    }
    // The file is complete and has its final name: later failures of QEMU do not matter.
    let file = args.file.display();
    match args.keep_running && source.was_running() && ended.is_none() {
        false => warn!("{file} is written; the guest is left paused"),
        true => match source.cont() {
            Ok(()) => warn!("{file} is written; the guest keeps running"),
            Err(error) => warn!(
                "hotlift: {file} is written, but the guest may be paused: {}; to continue it: hotlift settle --qmp {} --here",
                error_line(&error),
                source.address()
            ),
        },
    }
    Ok(args.output.print(&saved, || saved.table())?)
}

/// Converts an error of QEMU to an error of the save: there is no destination, so other advice applies.
fn not_saved(error: QemuError, advice: Option<&'static str>) -> CommandError {
    match error {
        QemuError::Failed { reasons } => CommandError::Save {
            reason: reasons,
            advice,
        },
        QemuError::Gone { reasons } => CommandError::Save {
            reason: format!("its QEMU has ended or does not answer: {reasons}"),
            advice: None,
        },
        error => error.into(),
    }
}

/// Returns the next step if the file system was full; `None` for other errors.
pub fn room(error: &MigrationError) -> Option<&'static str> {
    let MigrationError::File(FileError::Write { source, .. }) = error else {
        return None;
    };
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Some(
            "free space there, or save to another disk; '--method zstd' makes the file smaller",
        ),
        ErrorKind::FileTooLarge => Some(
            "raise the limit of this process ('ulimit -f'), or save to another file system; '--method zstd' makes the file smaller",
        ),
        _ => None,
    }
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |file| file.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_has_a_next_step() {
        let error = |kind: ErrorKind| {
            MigrationError::File(FileError::Write {
                path: "/saved/vm".into(),
                source: kind.into(),
            })
        };
        assert!(
            room(&error(ErrorKind::StorageFull))
                .unwrap()
                .contains("another disk")
        );
        assert!(
            room(&error(ErrorKind::FileTooLarge))
                .unwrap()
                .contains("ulimit -f")
        );
        assert_eq!(room(&error(ErrorKind::PermissionDenied)), None);
    }

    #[test]
    fn an_error_of_a_save_mentions_no_migration_and_no_destination() {
        let reasons = || "no space".to_owned();
        for error in [
            QemuError::Failed { reasons: reasons() },
            QemuError::Gone { reasons: reasons() },
        ] {
            let line = not_saved(error, None).line();
            assert!(line.starts_with("the guest was not saved: "), "{line}");
            assert!(line.ends_with("no space"), "{line}");
            assert!(!line.contains("destination"), "{line}");
        }
    }
}
