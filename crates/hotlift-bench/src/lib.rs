//! `hotlift-bench`: runs migrations in many settings and keeps their records.
//!
//! | file | subject |
//! |---|---|
//! | `command` | the `hotlift` to measure |
//! | `certificates` | certificates for runs over TLS |
//! | `cell`, `matrix` | one setting, and all combinations of the requested settings |
//! | `runner`, `journal` | runs the cells in random order; appends each run to `runs.jsonl` when it ends |
//! | `record` | a kept run: one line of JSON |
//! | `built_in`, `remote_host` | a run of the built-in guest, on this host or to another |
//! | `qemu` | the same work done by a real QEMU, alone and with relays in between |
//! | `link`, `namespaces` | real link limits, made with network namespaces |
//! | `planned_changes` | changes during a run: the link's rate, a busy neighbour that takes a core |
//! | `threads`, `machine` | the kernel's counts of threads; properties of this machine |
//! | `figures`, `stats`, `table` | the figures of a run; medians and quotients, as tables |
//! | `report` | the same as one HTML file |
//! | `suite` | the published tables, and our own tables |
//! | `best_fixed` | compares the `auto` method with the best fixed method |
//! | `error` | errors of a bench |

#![forbid(unsafe_code)]

mod best_fixed;
mod built_in;
mod cell;
mod certificates;
mod child_process;
mod command;
pub mod error;
mod figures;
mod journal;
mod link;
mod machine;
mod matrix;
mod namespaces;
mod planned_changes;
mod qemu;
mod record;
mod remote_host;
mod report;
mod runner;
mod stats;
mod suite;
mod table;
mod threads;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use hotlift::Address;
use hotlift_command::args::{Fill, GuestArgs, GuestChoice, RamBackend, ram, size};
use hotlift_command::error::SharedError;
use hotlift_command::security::SecurityArgs;
use hotlift_mem::FileError;
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::output::{self, warn};
use hotlift_terminal::output_file;
use hotlift_terminal::progress::bytes;
use hotlift_terminal::signals::Interrupt;
use hotlift_vmm::layout::MAX_VCPUS;

use crate::error::BenchError;
use cell::Cell;
use certificates::Certificates;
use command::Hotlift;
use journal::Journal;
use link::Link;
use matrix::MatrixArgs;
use namespaces::NamespacePair;
use record::{Outcome, Record};
use remote_host::RemoteHost;
use runner::Bench;
use suite::{Choice, Suite};

/// Default of `--out`: folder for `runs.jsonl` and the report.
const OUT: &str = "hotlift-bench-results";

/// Default RAM of a guest in the matrix, in bytes.
const RAM: u64 = 1 << 30;

/// Flags of the program.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Run this suite instead of the matrix: a published table, a table of Hotlift's own, or all
    #[arg(long, value_name = "NAME", value_parser = suite::choose, conflicts_with_all = ["methods",
          "levels", "channels", "zero_pages", "bandwidths", "workloads", "zero_shares", "zero_touched"])]
    suite: Option<Choice>,
    /// Run only the cells whose line of --dry-run contains this text; repeatable
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    only: Vec<String>,
    /// Number of runs of each cell
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Folder of runs.jsonl and report.html; earlier runs stay in it [default: hotlift-bench-results; with --kept the folder
    /// of its first file]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// List the cells and the memory that they need, and run none
    #[arg(long)]
    dry_run: bool,
    /// Path of the hotlift to measure [default: hotlift in the folder of this program, else on PATH]
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    hotlift: Option<PathBuf>,
    /// Path of a QEMU to measure with the same work in the same run
    #[arg(long, value_name = "PATH", conflicts_with = "to")]
    with_qemu: Option<PathBuf>,
    /// Also measure migrations between two QEMUs through two relays; the relays compress instead of the QEMUs
    #[arg(long, requires = "with_qemu", conflicts_with = "suite")]
    relays: bool,
    /// Migrate to the host where 'hotlift-bench --serve' waits: tcp:HOST:PORT
    #[arg(long, value_name = "URI", value_parser = Address::of_peer)]
    to: Option<Address>,
    /// Act as the destination host: receive the guests of 'hotlift-bench --to' until Ctrl-C
    #[arg(long, value_name = "URI", conflicts_with_all = ["to", "suite", "with_qemu", "link"])]
    serve: Option<Address>,
    /// Print the tables of the runs in this runs.jsonl, write their report into the folder of --out,
    /// and run nothing; repeatable
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    kept: Vec<PathBuf>,
    /// Rate and delay of a link between two network namespaces (needs root), as in 1gbit or 200mbit,2ms;
    /// 10gbit,500mbit@1s changes the rate 1 s after the request to migrate
    #[arg(long, value_name = "RATE[,DELAY][,RATE@TIME]", conflicts_with = "to")]
    link: Option<Link>,
    /// Keep one core busy with another thread, beginning this time after the request to migrate
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, hide_short_help = true)]
    neighbour: Option<Duration>,
    /// Time limit of each run, in seconds; a longer run is ended and counts as failed
    #[arg(long, value_name = "SECONDS", default_value_t = 600, hide_short_help = true,
          value_parser = clap::value_parser!(u64).range(1..))]
    time_limit: u64,
    /// Bytes of RAM, with suffix K, M or G [default: 1G; for a suite the published size; less if that
    /// does not fit]
    #[arg(long, value_name = "SIZE", value_parser = ram, help_heading = "Guest")]
    ram: Option<u64>,
    /// Number of vCPUs, 1 to 8
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Guest",
          value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_VCPUS)))]
    vcpus: u8,
    /// Pages that the guest writes per second
    #[arg(
        long,
        value_name = "PAGES/S",
        default_value_t = 20_000,
        help_heading = "Guest"
    )]
    rate: u64,
    /// Size of the memory that the guest writes to, in bytes [default: an eighth of the RAM]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Guest", hide_short_help = true)]
    working_set: Option<u64>,
    /// Write the zero pages once, so that the host allocates them
    #[arg(long, help_heading = "Guest", hide_short_help = true)]
    zero_touched: bool,
    /// Seed of all random numbers, including the order of runs
    #[arg(long, value_name = "N", default_value_t = 1, hide_short_help = true)]
    seed: u64,
    #[command(flatten)]
    security: SecurityArgs,
    #[command(flatten)]
    matrix: MatrixArgs,
}

/// Prints `text` as a line on standard output. Ignores a closed pipe.
fn write_line(text: impl std::fmt::Display) -> Result<(), BenchError> {
    Ok(output::result(&text.to_string()).map_err(TerminalError::Output)?)
}

/// Prints `text` on standard error as a warning. Ignores a closed pipe.
fn warn(text: impl std::fmt::Display) {
    warn!("hotlift-bench: {text}");
}

/// Runs the command.
///
/// # Errors
/// If the bench cannot be started or completed, or if runs have failed.
pub fn run(args: &BenchArgs) -> Result<(), BenchError> {
    let interrupt = Interrupt::catch()?;
    if let Some(at) = &args.serve {
        let hotlift = Hotlift::find(args.hotlift.as_deref())?;
        return remote_host::serve(at, &hotlift.path, &args.security, &interrupt);
    }
    if !args.kept.is_empty() {
        return show_kept(&args.kept, args.out.as_deref());
    }
    let remote = args
        .to
        .as_ref()
        .map(|to| RemoteHost::new(to, &args.security));
    let remote = remote.transpose()?;
    let qemu = args.with_qemu.as_deref().map(qemu::Program::find);
    let qemu = qemu.transpose()?;
    let suites: Vec<Option<&Suite>> = match &args.suite {
        Some(suites) => suites.0.iter().copied().map(Some).collect(),
        None => vec![None],
    };
    let mut parts = Vec::new();
    for suite in suites {
        parts.push((suite, cells(args, suite, qemu.is_some())?));
    }
    if args.dry_run {
        let all: Vec<Cell> = parts.into_iter().flat_map(|(_, cells)| cells).collect();
        return dry_run(args, &all, remote.is_none());
    }
    let hotlift = Hotlift::find(args.hotlift.as_deref())?;
    let out = args.out.as_deref().unwrap_or(Path::new(OUT));
    let any = |wants: fn(&Cell) -> bool| parts.iter().any(|(_, cells)| cells.iter().any(wants));
    let joined = any(|cell| cell.link.is_some())
        .then(NamespacePair::make)
        .transpose()?;
    let certificates = any(|cell| certificates::wants(&cell.migration))
        .then(|| Certificates::make(&hotlift.path))
        .transpose()?;
    let mut bench = Bench {
        hotlift,
        suite: String::new(),
        seed: args.seed,
        repeats: args.repeats,
        limit: Duration::from_secs(args.time_limit),
        security: args.security.given_to_others(),
        joined,
        remote,
        qemu,
        certificates,
        journal: Journal::open(out)?,
        interrupt: &interrupt,
    };
    let mut records = Vec::new();
    let number = parts.len();
    for (i, (suite, cells)) in parts.iter().enumerate() {
        bench.suite = suite
            .map_or("matrix", |suite| suite.name.as_str())
            .to_owned();
        if number > 1 {
            warn(format!("suite {} of {number}: {}", i + 1, bench.suite));
        }
        records.extend(bench.run(cells)?);
        if interrupt.is_raised() {
            break;
        }
    }
    // Both files are written before any output, because the output may be a closed pipe.
    let kept = bench.journal.finish();
    let report = match records.is_empty() {
        true => None,
        false => Some(write_report(out, &records)),
    };
    for records in suite::split(&records) {
        print(&records)?;
    }
    write_line(format!("raw runs: {}", bench.journal.path().display()))?;
    kept?;
    if let Some(report) = report.transpose()? {
        write_line(report)?;
    }
    outcome(&records, &interrupt)
}

/// Returns the cells of a suite, or of the matrix without a suite.
fn cells(
    args: &BenchArgs,
    suite: Option<&Suite>,
    beside_qemu: bool,
) -> Result<Vec<Cell>, BenchError> {
    let base = base(args, suite)?;
    let mut cells = match suite {
        Some(suite) => suite.cells(&base, &args.matrix)?,
        None => args.matrix.cells(&base)?,
    };
    if args.link.is_some()
        && let Some(suite) = suite
        && cells.iter().any(|cell| cell.link.is_some())
    {
        return Err(suite.sets_itself("--link", "link"));
    }
    for cell in &mut cells {
        cell.guest.check()?;
        cell.link = cell.link.take().or_else(|| args.link.clone());
        cell.neighbour = cell.neighbour.or(args.neighbour);
    }
    if beside_qemu {
        cells = matrix::beside_qemu(cells, args.relays)?;
    }
    only(&args.only, cells)
}

/// Returns the cells whose description contains one of `texts`. Without texts, returns all cells.
fn only(texts: &[String], mut cells: Vec<Cell>) -> Result<Vec<Cell>, BenchError> {
    if !texts.is_empty() {
        let lines = lines(&cells)?;
        let mut is_wanted = lines
            .iter()
            .map(|line| texts.iter().any(|text| line.contains(text.as_str())));
        cells.retain(|_| is_wanted.next().unwrap_or(false));
    }
    Ok(cells)
}

/// Returns a one-line description of each cell, which differs from all other lines.
fn lines(cells: &[Cell]) -> Result<Vec<String>, BenchError> {
    let rows = cells.iter().map(Cell::row).collect::<Result<Vec<_>, _>>()?;
    let labels = table::Labels::of(&rows);
    let line = |row: &record::Row| labels.text(row, row.program_name());
    Ok(rows.iter().map(line).collect())
}

/// Returns the guest settings that all cells start from.
fn base(args: &BenchArgs, suite: Option<&Suite>) -> Result<GuestArgs, BenchError> {
    let ends = if args.to.is_none() { 2 } else { 1 };
    let ram = match args.ram {
        Some(ram) => ram,
        None => {
            let wanted = suite.map_or(RAM, Suite::ram);
            let (ram, words) = machine::fitting(wanted, ends);
            if let Some(words) = words {
                write_line(words)?;
            }
            ram
        }
    };
    Ok(GuestArgs {
        guest: GuestChoice::Auto,
        vcpus: args.vcpus,
        ram,
        ram_backend: RamBackend::Private,
        workload: hotlift_vmm::workload::Workload::Idle,
        rate: args.rate,
        working_set: args.working_set,
        fill: Fill::Generated,
        zero_share: None,
        zero_touched: args.zero_touched,
        seed: args.seed,
    })
}

fn dry_run(args: &BenchArgs, cells: &[Cell], here: bool) -> Result<(), BenchError> {
    for (cell, line) in cells.iter().zip(lines(cells)?) {
        write_line(format!("{line}: {}", bytes(cell.memory(here))))?;
    }
    let most = cells.iter().map(|cell| cell.memory(here)).max();
    write_line(format!(
        "{} cells, {} runs; each needs up to {} of memory, and {} are free",
        cells.len(),
        cells.len() * args.repeats as usize,
        bytes(most.unwrap_or(0)),
        bytes(machine::available())
    ))
}

/// Prints the table of `records`, which all belong to one suite or to the matrix.
fn print(records: &[Record]) -> Result<(), BenchError> {
    let Some(first) = records.first() else {
        return Ok(());
    };
    let machine = &first.machine;
    write_line(format!(
        "{}, {} cores, {} of memory, Linux {}, load {:.1}",
        machine.cpu,
        machine.cores,
        bytes(machine.memory_bytes),
        machine.kernel,
        machine.load
    ))?;
    match suite::find(&first.suite) {
        Ok(suite) => write_line(suite.sheet(records)),
        Err(_) => write_line(table::matrix(records)),
    }
}

/// Writes `report.html` into `folder`, and returns a message with its path.
fn write_report(folder: &Path, records: &[Record]) -> Result<String, BenchError> {
    let path = folder.join("report.html");
    std::fs::create_dir_all(folder)
        .and_then(|()| output_file::write(&path, report::html(records).as_bytes()))
        .map_err(FileError::writing(&path))
        .map_err(TerminalError::from)?;
    Ok(format!("report: {}", path.display()))
}

/// Prints the tables of kept runs, one for each suite, and writes their report.
fn show_kept(files: &[PathBuf], out: Option<&Path>) -> Result<(), BenchError> {
    let mut records = Vec::new();
    for path in files {
        records.extend(record::read(path).map_err(TerminalError::from)?);
    }
    let beside = files.first().and_then(|file| file.parent());
    let folder = out.or(beside).unwrap_or(Path::new("."));
    let report = write_report(folder, &records)?;
    for records in suite::split(&records) {
        print(&records)?;
    }
    write_line(report)
}

/// Returns an error if a run failed or a signal arrived.
fn outcome(records: &[Record], interrupt: &Interrupt) -> Result<(), BenchError> {
    if interrupt.is_raised() {
        return Err(TerminalError::Interrupted.into());
    }
    let failed = records.iter().filter(|run| match &run.outcome {
        Outcome::Completed(completed) => completed.verified == Some(false),
        Outcome::Failed { .. } => true,
        Outcome::Skipped { .. } => false,
    });
    match failed.count() {
        0 => Ok(()),
        failed => Err(SharedError::Migrations {
            failed,
            runs: records.len(),
        }
        .into()),
    }
}
