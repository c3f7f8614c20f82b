//! One migration of the built-in guest between two `guest run` processes, as `demo` and `hotlift-bench` repeat it.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hotlift::figures::{DestinationReport, SideFigures, SourceReport};
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::signals::{Cause, Interrupt};
use hotlift_vmm::GuestKind;
use rustix::process::{Pid, Signal, kill_process};

use crate::args::GuestArgs;
use crate::events::{self, Check, Event, Events, Filling, ProgressSnapshot};
use crate::migration_args::MigrationArgs;

/// Guest, options and processes of one migration.
pub struct Pair<'a> {
    /// Kind of the guest at source and destination.
    pub kind: GuestKind,
    /// Settings of the source's guest.
    pub guest: &'a GuestArgs,
    /// Options of the migration.
    pub migration: &'a MigrationArgs,
    /// Prefix of the lines of the progress display.
    pub label: &'a str,
    /// Program of both processes, and where they run.
    pub place: &'a ProcessPlace,
    /// Time limit from the start of the source's process; `None` for no limit.
    pub limit: Option<Duration>,
    /// Handling of the standard error of both processes.
    pub errors: StderrHandling,
}

/// Program of two processes, and where they run.
#[derive(Debug, Clone)]
pub struct ProcessPlace {
    /// Path of the `hotlift` program that both processes run.
    pub program: PathBuf,
    /// Command before the source's command line, such as one that enters a network namespace.
    pub source_prefix: Vec<String>,
    /// Command before the destination's command line.
    pub destination_prefix: Vec<String>,
    /// Address at which a destination on this host listens; `None` for 127.0.0.1.
    pub address: Option<String>,
    /// Names and values of the TLS options for both processes.
    pub security: Vec<(String, String)>,
}

impl ProcessPlace {
    /// Returns the place of two processes that run `program` on this host, without prefixes and TLS options.
    pub fn new(program: PathBuf) -> Self {
        Self {
            program,
            source_prefix: Vec::new(),
            destination_prefix: Vec::new(),
            address: None,
            security: Vec::new(),
        }
    }

    /// Returns the TLS flags of both processes for a migration with the options `given`.
    pub fn flags(&self, given: &MigrationArgs) -> Vec<String> {
        if given.has("tls-creds") {
            return match given.values().tls.creds.is_empty() {
                // The migration's own options name certificates.
                false => Vec::new(),
                // TLS is off for this migration. An address in a network namespace needs --insecure.
                true => vec!["--insecure=on".to_owned()],
            };
        }
        let flag = |(name, value): &(String, String)| format!("--{name}={value}");
        let flags: Vec<_> = self.security.iter().map(flag).collect();
        // Without TLS, an address in a network namespace needs --insecure.
        match self.address.is_some() && flags.is_empty() {
            true => vec!["--insecure=on".to_owned()],
            false => flags,
        }
    }
}

/// Handling of the standard error of both processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StderrHandling {
    /// Both processes write to this process's standard error, with the progress display.
    Shown {
        /// True to omit the progress display.
        quiet: bool,
    },
    /// Stored in a file: its last lines show why a process ended without a report.
    Kept,
}

/// Result of one migration.
#[derive(Debug, Default)]
pub struct PairResult {
    /// Report of the source; `None` if the migration did not complete there.
    pub source: Option<SourceReport>,
    /// Report of the destination; `None` if the migration did not complete there.
    pub destination: Option<DestinationReport>,
    /// Result of the guest check at the destination; `None` if the guest was not checked.
    pub check: Option<Check>,
    /// Content of the guest's RAM at its start; `None` if RAM was not filled.
    pub filled: Option<Filling>,
    /// First error of the migration; `None` if it succeeded.
    pub error: Option<String>,
}

/// Event during a migration, for the caller's display.
pub enum PairEvent<'a> {
    /// The source's process and, if it is on this host, the destination's process were started. Nothing was sent yet.
    Begun {
        /// Process id of the source.
        source: u32,
        /// Process id of the destination; `None` on another host.
        destination: Option<u32>,
    },
    /// The RAM of the source's guest was filled; the migration starts next.
    Filled,
    /// Progress of the migration at the source.
    Progress(&'a ProgressSnapshot),
}

impl PairResult {
    fn failed(&mut self, error: &str) {
        self.error.get_or_insert_with(|| error.to_owned());
    }
}

/// Returns the destination's figures. Percentages refer to `total_ms`, the source's total time in milliseconds.
pub fn destination_side(report: DestinationReport, total_ms: f64) -> SideFigures {
    SideFigures::new(
        report.side.threads,
        Duration::from_secs_f64(total_ms / 1e3),
        report.normal_pages,
        report.side.jobs,
    )
}

impl Pair<'_> {
    /// Runs one migration to `destination`, and passes its events to `report`. An interrupt or the time limit kills both
    /// processes.
    ///
    /// # Errors
    /// If a process cannot be started. All other errors are in [`PairResult::error`].
    pub fn migrate(
        &self,
        destination: Destination,
        interrupt: &Interrupt,
        report: &mut dyn FnMut(&PairEvent<'_>),
    ) -> Result<PairResult, TerminalError> {
        let mut moved = PairResult::default();
        let Destination {
            mut process,
            mut events,
        } = destination;
        let mut listening = None;
        let there: Vec<u32> = process.iter().map(Process::id).collect();
        self.watched(&there, interrupt, || {
            listening = events.find_map(|event| match event {
                Event::Listening { uri } => Some(Ok(uri)),
                Event::Failed { error } => Some(Err(error)),
                _ => None,
            });
        });
        let uri = match listening {
            Some(Ok(uri)) => uri,
            Some(Err(error)) => {
                moved.failed(&error);
                return Ok(moved);
            }
            None => {
                moved.failed(&end_of_process(
                    process.as_mut(),
                    "destination",
                    "it listened",
                ));
                return Ok(moved);
            }
        };
        let source = self.spawn(&self.place.source_prefix, &format!("--migrate-to={uri}"));
        if source.is_err()
            && let Some(process) = &mut process
        {
            // Without this kill, the drop of `process` would wait for the destination, which waits for a source.
            process.end();
        }
        let (mut source, source_events) = source?;
        let pid = process.as_ref().map(Process::id);
        report(&PairEvent::Begun {
            source: source.id(),
            destination: pid,
        });
        let watched: Vec<u32> = std::iter::once(source.id()).chain(pid).collect();
        let late = self.watched(&watched, interrupt, || {
            for event in source_events {
                match event {
                    Event::Progress { moment } => report(&PairEvent::Progress(&moment)),
                    Event::Filled(filling) => {
                        moved.filled = Some(filling);
                        report(&PairEvent::Filled);
                    }
                    Event::Sent { report } => moved.source = Some(*report),
                    Event::Failed { error } => moved.failed(&error),
                    _ => {}
                }
            }
            // If the source ended without a report, the destination would wait for it forever.
            if moved.source.is_none() {
                let why = end_of_process(Some(&mut source), "source", "the migration did");
                moved.failed(&why);
                if let Some(process) = &mut process {
                    process.end();
                }
            }
            drop(source);
            for event in events {
                match event {
                    Event::Received { report } => moved.destination = Some(report),
                    Event::Checked(check) => moved.check = Some(check),
                    Event::Failed { error } => moved.failed(&error),
                    Event::Listening { .. }
                    | Event::Filled(_)
                    | Event::Sent { .. }
                    | Event::Progress { .. } => {}
                }
            }
        });
        if late {
            moved.error = Some(format!(
                "it did not finish within {:.0} s and was ended",
                self.limit.unwrap_or_default().as_secs_f64()
            ));
        }
        if moved.error.is_none() && moved.check.is_none() {
            moved.failed(&end_of_process(
                process.as_mut(),
                "destination",
                "the guest was checked",
            ));
        }
        Ok(moved)
    }

    /// Starts the destination's process on this host.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn destination(&self) -> Result<Destination, TerminalError> {
        let address = self.place.address.as_deref().unwrap_or("127.0.0.1");
        let (process, events) = self.spawn(
            &self.place.destination_prefix,
            &format!("--incoming=tcp:{address}:0"),
        )?;
        Ok(Destination {
            process: Some(process),
            events,
        })
    }

    fn spawn(&self, prefix: &[String], role: &str) -> Result<(Process, Events), TerminalError> {
        let failed = TerminalError::process("hotlift guest run");
        let program = &self.place.program;
        let mut command = match prefix.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
            None => Command::new(program),
        };
        command
            .args(["guest", "run", "--tell-events"])
            .arg(format!("--label={}", self.label))
            .arg(role)
            .args(self.guest.to_flags(self.kind))
            .args(self.migration.to_flags())
            .args(self.place.flags(self.migration))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // A separate process group: Ctrl-C signals only the parent, which ends this process and prints the message.
            .process_group(0);
        let mut stderr = None;
        match self.errors {
            StderrHandling::Shown { quiet } => {
                command.args(quiet.then_some("--quiet"));
            }
            StderrHandling::Kept => {
                let file = tempfile::tempfile().map_err(failed)?;
                command
                    .arg("--quiet")
                    .stderr(file.try_clone().map_err(failed)?);
                stderr = Some(file);
            }
        }
        let mut child = command.spawn().map_err(failed)?;
        let events = match child.stdout.take() {
            Some(stdout) => events::read(stdout),
            None => Box::new(std::iter::empty()),
        };
        Ok((Process { child, stderr }, events))
    }

    /// Runs `work`. Kills `processes` on an interrupt, or after the time limit. Returns true if the time limit was the cause.
    fn watched(&self, processes: &[u32], interrupt: &Interrupt, work: impl FnOnce()) -> bool {
        let mut late = false;
        let end = |cause| {
            late = cause == Cause::Deadline;
            processes.iter().copied().for_each(kill);
        };
        interrupt.watching(self.limit, end, work);
        late
    }
}

fn kill(process: u32) {
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Returns an error message: the process of `side` ended before the step `before`. Appends the process's last error line, if
/// its standard error was stored.
fn end_of_process(process: Option<&mut Process>, side: &str, before: &str) -> String {
    let plain = format!("the {side} process ended before {before}");
    match process.and_then(Process::last_error_line) {
        Some(words) => format!("{plain}: {words}"),
        None => plain,
    }
}

/// Destination of a migration that will listen soon.
pub struct Destination {
    /// Process of the destination; `None` if it is on another host.
    pub process: Option<Process>,
    /// Events of the destination's process.
    pub events: Events,
}

/// Child process; the drop waits for its end.
pub struct Process {
    child: Child,
    stderr: Option<File>,
}

impl Process {
    fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process if it still runs, and waits for its end.
    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Returns the error line of the process from its stored standard error, or else the last line. `None` if nothing is
    /// stored.
    fn last_error_line(&mut self) -> Option<String> {
        /// Bytes of standard error that are read: much more than any error message of Hotlift.
        const MAX_KEPT_STDERR: u64 = 64 << 10;
        let stderr = self.stderr.as_mut()?;
        let mut text = String::new();
        stderr.seek(SeekFrom::Start(0)).ok()?;
        stderr
            .take(MAX_KEPT_STDERR)
            .read_to_string(&mut text)
            .ok()?;
        let error = text.lines().find_map(|line| line.strip_prefix("hotlift: "));
        let last = || text.lines().rfind(|line| !line.trim().is_empty());
        Some(error.or_else(last)?.to_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The output of the process has ended, so the process ends now, unless it hangs.
        let _ = self.child.wait();
    }
}
