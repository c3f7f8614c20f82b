//! `hotlift demo`: migrates the built-in guest between two processes of this host, and shows the results in a table.

use std::path::PathBuf;

use clap::Args;
use hotlift::Options;
use hotlift::options::OptionError;
use hotlift_command::args::{Fill, GuestArgs};
use hotlift_command::error::SharedError;
use hotlift_command::events::Filling;
use hotlift_command::held_memory::HeldMemory;
use hotlift_command::migration_args::{MigrationArgs, RoleArgs, role};
use hotlift_command::pair::{Pair, PairEvent, ProcessPlace, StderrHandling};
use hotlift_methods::selections;
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::output::{self, warn};
use hotlift_terminal::progress;
use hotlift_terminal::signals::Interrupt;
use hotlift_terminal::width;
use hotlift_vmm::GuestKind;

use crate::error::CommandError;
use crate::report::{self, Run};

/// Flags of `demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Number of migrations with each setting
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Write the figures of all runs to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Show no progress
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    guest: GuestArgs,
    #[command(flatten)]
    migration: RoleArgs<role::Pair>,
}

/// Runs `hotlift demo`.
pub fn run(args: &DemoArgs) -> Result<(), CommandError> {
    let migrations = settings(&args.migration)?;
    args.guest.check()?;
    args.guest.check_fill()?;
    let program = std::env::current_exe().map_err(TerminalError::process("hotlift guest run"))?;
    let place = ProcessPlace::new(program);
    let interrupt = Interrupt::catch()?;
    let kind = args.guest.kind();
    let mut runs = Vec::new();
    let mut filling = None;
    for migration in &migrations {
        for _ in 0..args.repeat {
            if interrupt.is_raised() {
                break;
            }
            let (run, filled) = migrate_once(args, kind, migration, &place, &interrupt)?;
            runs.extend(run);
            filling = filling.or(filled);
        }
    }
    if interrupt.is_raised() && !args.quiet {
        progress::clear();
    }
    // Without a measured migration, there is no table to print.
    let printed = match runs.is_empty() {
        true => Ok(()),
        false => output::result(&tables(&heading(args, kind, filling), &runs)),
    };
    for run in &runs {
        if let Some(error) = &run.error {
            warn!("hotlift: {}: {error}", run.method);
        }
    }
    if let Some(path) = &args.json {
        report::write_json(path, &runs)?;
    }
    printed.map_err(TerminalError::Output)?;
    if interrupt.is_raised() {
        return Err(TerminalError::Interrupted.into());
    }
    match runs.iter().filter(|run| !run.is_good()).count() {
        0 => Ok(()),
        failed => Err(SharedError::Migrations {
            failed,
            runs: runs.len(),
        }
        .into()),
    }
}

fn tables(heading: &str, runs: &[Run]) -> String {
    let mut text = vec![width::folded(heading), report::results(runs)];
    if runs.iter().any(|run| run.source.is_some()) {
        text.push(report::threads(runs));
    }
    text.extend(report::jobs(runs));
    text.join("\n")
}

/// Returns the options of each migration: the given ones, or one set for every method if no method was chosen.
///
/// # Errors
/// If the given options are incompatible with a method.
fn settings(given: &RoleArgs<role::Pair>) -> Result<Vec<MigrationArgs>, OptionError> {
    let all = given.complete()?;
    if given.has("multifd-compression") || !all.options()?.stream.multifd() {
        return Ok(vec![all]);
    }
    let each = selections().map(|method| {
        let one = all.with("multifd-compression", method.name)?;
        match one.options() {
            // If the accelerator of this method is missing, its migration reports that later.
            Ok(_) | Err(OptionError::NoAccelerator { .. }) => Ok(one),
            Err(error) => Err(error),
        }
    });
    each.collect()
}

/// Returns a description of the guest and of its memory, as the heading of the output.
fn heading(args: &DemoArgs, kind: GuestKind, filling: Option<Filling>) -> String {
    let guest = &args.guest;
    let settings = guest.settings();
    let fill = guest.fill.to_string();
    let fill = Fill::words(&fill);
    format!(
        "{kind} guest, {vcpus} vCPU, {ram} of RAM filled with {fill}{zero}, \
         workload {workload} at {rate} pages/s in {working_set}",
        vcpus = guest.vcpus,
        ram = hotlift_terminal::progress::bytes(guest.ram),
        zero = filling.map_or(String::new(), |filling| format!(" ({})", filling.text())),
        workload = guest.workload.name(),
        rate = guest.rate,
        working_set = hotlift_terminal::progress::bytes(settings.working_set.unwrap_or(guest.ram)),
    )
}

/// Runs one migration between two child processes. Returns no result if an interrupt ended it before anything was sent.
fn migrate_once(
    args: &DemoArgs,
    kind: GuestKind,
    migration: &MigrationArgs,
    place: &ProcessPlace,
    interrupt: &Interrupt,
) -> Result<(Option<Run>, Option<Filling>), CommandError> {
    let options: Options = migration.options()?;
    let mut run = Run::new(kind, &args.guest.settings(), &options);
    let pair = Pair {
        kind,
        guest: &args.guest,
        migration,
        label: options.stream.method_name(),
        place,
        limit: None,
        errors: StderrHandling::Shown { quiet: args.quiet },
    };
    let mut last = None;
    let destination = pair.destination()?;
    let mut held = HeldMemory::new(args.guest.ram, &options);
    let moved = pair.migrate(destination, interrupt, &mut |tale| match tale {
        PairEvent::Begun { .. } => {}
        PairEvent::Filled => held = None,
        PairEvent::Progress(moment) => last = Some((*moment).clone()),
    })?;
    let is_whole = moved.error.is_none();
    if let Some(report) = moved.source {
        run.sent(report);
    }
    if let Some(report) = moved.destination {
        run.received(report);
    }
    if let Some(check) = &moved.check {
        run.checked(check);
    }
    // The interrupt is the cause, even if the two processes report errors.
    if interrupt.is_raised() && !is_whole {
        let run = last.map(|moment| {
            run.interrupted(&moment);
            run
        });
        return Ok((run, moved.filled));
    }
    if let Some(error) = &moved.error {
        run.failed(error);
    }
    if run.status == "completed" && run.verified.is_none() {
        run.verified = Some(false);
    }
    Ok((Some(run), moved.filled))
}
