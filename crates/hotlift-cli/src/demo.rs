//! `hotlift demo`: both ends of a migration as two processes of this host, and the result table.

use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use clap::Args;
use hotlift::Options;
use hotlift_methods::METHODS;
use hotlift_vmm::GuestKind;

use crate::args::GuestArgs;
use crate::error::CommandError;
use crate::events::{self, Event};
use crate::migration_args::MigrationArgs;
use crate::report::{self, Run};
use crate::signals::Interrupt;

/// Flags of `demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Migrate so often with each setting
    #[arg(long, value_name = "N", default_value_t = 1)]
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
    migration: MigrationArgs,
}

/// Runs the command.
pub fn run(args: &DemoArgs) -> Result<(), CommandError> {
    args.migration.refuse(
        &["pause-before-switchover"],
        "a monitor that lets the migration go on, which the demo has not",
    )?;
    let interrupt = Interrupt::catch()?;
    let kind = args.guest.kind();
    let mut runs = Vec::new();
    for migration in settings(&args.migration) {
        for _ in 0..args.repeat {
            if interrupt.is_raised() {
                break;
            }
            runs.push(migrate_once(args, kind, &migration)?);
        }
    }
    println!("{}", heading(args, kind));
    println!("{}", report::results(&runs));
    if runs.iter().any(|run| run.source.is_some()) {
        println!("{}", report::threads(&runs));
    }
    if let Some(jobs) = report::jobs(&runs) {
        println!("{jobs}");
    }
    for run in &runs {
        if let Some(error) = &run.error {
            eprintln!("hotlift: {}: {error}", run.method);
        }
    }
    if let Some(path) = &args.json {
        report::write_json(path, &runs)?;
    }
    if interrupt.is_raised() {
        return Err(CommandError::Interrupted);
    }
    match runs.iter().filter(|run| !run.is_good()).count() {
        0 => Ok(()),
        failed => Err(CommandError::Demo {
            failed,
            runs: runs.len(),
        }),
    }
}

/// The settings to migrate with: the ones given, or every method where none was chosen. On one host
/// nothing is gained by holding back, so the bandwidth is unlimited unless it was given.
fn settings(given: &MigrationArgs) -> Vec<MigrationArgs> {
    let unlimited = if given.has("max-bandwidth") {
        given.clone()
    } else {
        given.with("max-bandwidth", "0")
    };
    let multifd = given.options().is_ok_and(|options| options.multifd());
    if given.has("multifd-compression") || given.has_level() || !multifd {
        return vec![unlimited];
    }
    METHODS
        .iter()
        .map(|method| unlimited.with("multifd-compression", method.name))
        .collect()
}

/// What was migrated.
fn heading(args: &DemoArgs, kind: GuestKind) -> String {
    let guest = &args.guest;
    let settings = guest.settings();
    let fill = guest
        .fill
        .as_ref()
        .map_or("a generated mix".to_owned(), |folder| {
            folder.display().to_string()
        });
    format!(
        "{kind} guest, {vcpus} vCPU, {ram} of RAM filled with {fill} ({zero:.0} % zero pages), \
         workload {workload} at {rate} pages/s in {working_set}",
        vcpus = guest.vcpus,
        ram = crate::progress::bytes(guest.ram),
        zero = guest.zero_share * 100.0,
        workload = guest.workload.name(),
        rate = guest.rate,
        working_set = crate::progress::bytes(settings.working_set.unwrap_or(guest.ram)),
    )
}

/// One migration between two child processes.
fn migrate_once(
    args: &DemoArgs,
    kind: GuestKind,
    migration: &MigrationArgs,
) -> Result<Run, CommandError> {
    let options: Options = migration.options()?;
    let mut run = Run::new(kind, &args.guest.settings(), &options);
    let label = options.method_name();

    let (destination, mut events) = spawn(
        args,
        kind,
        migration,
        label,
        &["--incoming=tcp:127.0.0.1:0"],
    )?;
    let listening = events.find_map(|event| match event {
        Event::Listening { uri } => Some(Ok(uri)),
        Event::Failed { error } => Some(Err(error)),
        _ => None,
    });
    let uri = match listening {
        Some(Ok(uri)) => uri,
        Some(Err(error)) => {
            run.failed(&error);
            return Ok(run);
        }
        None => {
            run.failed("the destination process ended before it listened");
            return Ok(run);
        }
    };
    let (source, source_events) = spawn(
        args,
        kind,
        migration,
        label,
        &[&format!("--migrate-to={uri}")],
    )?;
    for event in source_events {
        match event {
            Event::Sent { report } => run.sent(report),
            Event::Failed { error } => run.failed(&error),
            _ => {}
        }
    }
    // A source that went without a word leaves a destination that would wait for it.
    drop(source);
    let mut destination = destination;
    if run.source.is_none() {
        run.failed("the source process ended before the migration did");
        destination.end();
    }
    for event in events {
        match event {
            Event::Received { report } => run.received(report),
            Event::Checked(check) => run.checked(&check),
            Event::Failed { error } => run.failed(&error),
            Event::Listening { .. } | Event::Sent { .. } => {}
        }
    }
    if run.status == "completed" && run.verified.is_none() {
        run.verified = Some(false);
        run.failed("the destination process ended before the guest was checked");
    }
    Ok(run)
}

/// A child process that does not outlive its owner.
struct Process(Child);

impl Process {
    /// Ends the process if it has not ended.
    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // By now its output has ended, and so does it; a process that does not is stuck.
        let _ = self.0.wait();
    }
}

fn spawn(
    args: &DemoArgs,
    kind: GuestKind,
    migration: &MigrationArgs,
    label: &str,
    role: &[&str],
) -> Result<(Process, impl Iterator<Item = Event> + use<>), CommandError> {
    let failed = |source| CommandError::Process {
        what: "hotlift guest run",
        source,
    };
    let program = std::env::current_exe().map_err(failed)?;
    let mut child = Command::new(program)
        .args(["guest", "run", "--tell-events"])
        .arg(format!("--label={label}"))
        .args(role)
        .args(args.guest.to_flags(kind))
        .args(migration.to_flags())
        .args(args.quiet.then_some("--quiet"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(failed)?;
    let stdout: Option<ChildStdout> = child.stdout.take();
    let events = stdout.into_iter().flat_map(events::read);
    Ok((Process(child), events))
}
