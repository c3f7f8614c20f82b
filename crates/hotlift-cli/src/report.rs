//! Formats the results of several migrations: a table in the style of published ones, CPU time by thread, and JSON.

use std::collections::BTreeMap;
use std::path::Path;

use comfy_table::Table;
use hotlift::figures::{DestinationReport, JobFigures, SideFigures, SourceReport, shares_of};
use hotlift::options::{Group, OPTIONS};
use hotlift::{Options, Status};
use hotlift_command::events::{Check, ProgressSnapshot};
use hotlift_command::pair::destination_side;
use hotlift_mem::FileError;
use hotlift_terminal::error::TerminalError;
use hotlift_terminal::output_file;
use hotlift_terminal::table::{align, align_with_words, new_table};
use hotlift_terminal::width;
use hotlift_vmm::{GuestKind, GuestSettings};
use serde::ser::Error;
use serde::{Serialize, Serializer};

/// State in the results of a migration that a signal ended.
const INTERRUPTED: &str = "interrupted";

/// Options that have a field of their own in [`Run`], or a column of their own in the table.
const FIELDS: &[&str] = &[
    "multifd-compression",
    "compress",
    "multifd-channels",
    "zero-page-detection",
    "max-bandwidth",
    "downtime-limit",
];

/// A migration in the output of `--json`. Times are in milliseconds, CPU times in seconds and in percent of one core.
/// `hotlift::figures` defines every figure.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    pub guest: String,
    pub vcpus: u8,
    pub workload: String,
    pub rate: u64,
    pub working_set: Option<u64>,
    pub seed: u64,
    pub method: String,
    pub library: String,
    pub level: Option<u8>,
    pub channels: u8,
    pub zero_page_detection: String,
    pub max_bandwidth: u64,
    pub downtime_limit_ms: u128,
    /// All other options that differ from their defaults, as typed. If multifd is off, `multifd` is `off`.
    pub options: BTreeMap<&'static str, String>,
    pub ram_bytes: u64,
    pub status: String,
    pub error: Option<String>,
    /// True if the guest ran after the migration and lost no write; `null` if the other host checks this.
    pub verified: Option<bool>,
    /// Figures that the source measured; the destination's figures if the source's are unknown.
    #[serde(flatten, serialize_with = "without_side")]
    pub figures: SourceReport,
    pub source: Option<SideFigures>,
    pub destination: Option<SideFigures>,
}

/// Returns the value of [`Run::options`].
fn others(options: &Options) -> BTreeMap<&'static str, String> {
    let defaults = Options::default();
    OPTIONS
        .iter()
        .filter(|info| info.group != Group::Levels && !FIELDS.contains(&info.name))
        .map(|info| {
            (
                info.name,
                info.read(options).to_string(),
                info.read(&defaults).to_string(),
            )
        })
        .filter(|(_, value, default)| value != default)
        .map(|(name, value, _)| (name, value))
        .collect()
}

/// Serializes the source's report without its field `side`, which is in the field `source` of [`Run`].
fn without_side<S: Serializer>(report: &SourceReport, to: S) -> Result<S::Ok, S::Error> {
    let mut figures = serde_json::to_value(report).map_err(S::Error::custom)?;
    if let Some(figures) = figures.as_object_mut() {
        figures.remove("side");
    }
    figures.serialize(to)
}

impl Run {
    /// Creates the record of a migration before it runs.
    pub fn new(kind: GuestKind, guest: &GuestSettings, options: &Options) -> Self {
        Self {
            guest: kind.name().to_owned(),
            vcpus: guest.vcpus,
            workload: guest.workload.name().to_owned(),
            rate: guest.rate,
            working_set: guest.working_set,
            seed: guest.seed,
            method: options.stream.method_name().to_owned(),
            library: options.stream.library(),
            level: options.stream.level(),
            channels: options.stream.channels(),
            zero_page_detection: options.zero_page_detection_name(),
            max_bandwidth: options.stream.max_bandwidth,
            downtime_limit_ms: options.switchover.downtime_limit.as_millis(),
            options: others(options),
            ram_bytes: guest.ram_bytes,
            status: Status::None.name().to_owned(),
            error: None,
            verified: None,
            figures: SourceReport::default(),
            source: None,
            destination: None,
        }
    }

    /// Adds the figures of the source.
    pub fn sent(&mut self, mut report: SourceReport) {
        self.status = Status::Completed.name().to_owned();
        self.source = Some(std::mem::take(&mut report.side));
        self.figures = report;
    }

    /// Marks the migration as interrupted, and adds the last progress snapshot.
    pub fn interrupted(&mut self, last: &ProgressSnapshot) {
        self.status = INTERRUPTED.to_owned();
        self.figures.total_ms = last.elapsed_ms;
        self.figures.rounds = last.round;
        self.figures.transferred_bytes = last.transferred_bytes;
        let seconds = last.elapsed_ms / 1e3;
        if seconds > 0.0 {
            #[expect(clippy::cast_precision_loss, reason = "shown with few digits")]
            let bits = last.transferred_bytes as f64 * 8.0;
            self.figures.throughput_mbps = bits / seconds / 1e6;
        }
        self.figures.pages_per_second = last.pages_per_second;
    }

    /// Adds the figures of the destination; percentages refer to the source's total time, if that is known.
    pub fn received(&mut self, report: DestinationReport) {
        if self.source.is_none() {
            self.status = Status::Completed.name().to_owned();
            self.figures.total_ms = report.total_ms;
            self.figures.normal_pages = report.normal_pages;
            self.figures.zero_pages = report.zero_pages;
        }
        self.destination = Some(destination_side(report, self.figures.total_ms));
    }

    /// Adds the result of the guest check.
    pub fn checked(&mut self, check: &Check) {
        self.verified = Some(check.runs && check.verified);
        if let Some(problem) = &check.problem {
            self.error.get_or_insert_with(|| problem.clone());
        }
    }

    /// Adds the error of a failed migration; a later error does not replace it.
    pub fn failed(&mut self, error: &str) {
        self.status = Status::Failed.name().to_owned();
        self.error.get_or_insert_with(|| error.to_owned());
    }

    /// Returns true if the migration completed, and the guest passed its check or was not checked here.
    pub fn is_good(&self) -> bool {
        self.status == Status::Completed.name()
            && self.verified != Some(false)
            && self.error.is_none()
    }

    fn name(&self) -> String {
        match self.level {
            Some(level) => format!("{} {level}", self.method),
            None => self.method.clone(),
        }
    }
}

/// Returns the tables of results, CPU time by thread, and accelerator jobs.
pub fn all(runs: &[Run]) -> String {
    let tables = [Some(results(runs)), Some(threads(runs)), jobs(runs)];
    tables.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

/// Column headings of the table of results.
pub const RESULTS: &[&str] = &[
    "method",
    "ch",
    "total ms",
    "down ms",
    "rounds",
    "Mbit/s",
    "pages/s",
    "ratio",
    "CPU % src",
    "CPU % dst",
    "core-s/GiB src",
    "core-s/GiB dst",
    "verified",
];

/// Returns the table of results, with one row per migration.
pub fn results(runs: &[Run]) -> String {
    let rows: Vec<_> = runs.iter().map(row).collect();
    let mut lines = option_lines(runs);
    lines.push(width::fitted(RESULTS, &rows, align));
    lines.extend(runs.iter().filter_map(shares));
    lines.extend(runs.iter().filter_map(throttled));
    lines.join("\n")
}

fn row(run: &Run) -> Vec<String> {
    let side = |side: &Option<SideFigures>, figure: fn(&SideFigures) -> String| {
        side.as_ref().map_or("-".to_owned(), figure)
    };
    let verified = match (run.verified, run.status.as_str()) {
        (Some(true), _) => "yes".to_owned(),
        (Some(false), _) => "NO".to_owned(),
        (None, "completed") => "-".to_owned(),
        (None, status) => status.to_owned(),
    };
    // If nothing was measured, the cells are empty.
    let is_measured = run.figures.total_ms > 0.0;
    let is_whole = is_measured && run.status == Status::Completed.name();
    let figure = |is_known: bool, text: String| match is_known {
        true => text,
        false => "-".to_owned(),
    };
    vec![
        run.name(),
        run.channels.to_string(),
        figure(is_measured, format!("{:.0}", run.figures.total_ms)),
        figure(is_whole, format!("{:.1}", run.figures.downtime_ms)),
        figure(is_measured, run.figures.rounds.to_string()),
        figure(is_measured, format!("{:.0}", run.figures.throughput_mbps)),
        figure(is_measured, format!("{:.0}", run.figures.pages_per_second)),
        figure(is_whole, format!("{:.2}", run.figures.ratio)),
        side(&run.source, |side| format!("{:.0}", side.cpu_percent)),
        side(&run.destination, |side| format!("{:.0}", side.cpu_percent)),
        side(&run.source, |side| format!("{:.2}", side.core_s_per_gib)),
        side(&run.destination, |side| {
            format!("{:.2}", side.core_s_per_gib)
        }),
        verified,
    ]
}

/// Returns the options that differ from the usual ones, one line for each set of options.
fn option_lines(runs: &[Run]) -> Vec<String> {
    let words = |run: &Run| {
        let words = run
            .options
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        words.collect::<Vec<_>>().join(", ")
    };
    let mut lines: Vec<String> = Vec::new();
    let first = runs.first().map(words).unwrap_or_default();
    let are_alike = runs.iter().all(|run| words(run) == first);
    for run in runs {
        let line = match (words(run), are_alike) {
            (words, _) if words.is_empty() => continue,
            (words, true) => format!("with {words}"),
            (words, false) => format!("{} with {words}", run.name()),
        };
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

/// Returns the share of each method, if each packet has its own method; `None` otherwise.
fn shares(run: &Run) -> Option<String> {
    let methods = &run.figures.methods;
    (!methods.is_empty()).then(|| format!("{}: {}", run.name(), shares_of(methods)))
}

/// Returns the effect of auto-converge (throttling of the vCPUs); `None` if it was off.
fn throttled(run: &Run) -> Option<String> {
    run.options.get("auto-converge")?;
    Some(match run.figures.throttle_percent {
        0 => format!("{}: auto-converge was not needed", run.name()),
        percent => format!(
            "{}: auto-converge took up to {percent} % of the vCPUs' time",
            run.name()
        ),
    })
}

/// Returns the CPU time by thread, with one column per migration. Makes several tables if the terminal is too narrow.
pub fn threads(runs: &[Run]) -> String {
    let names = runs
        .iter()
        .flat_map(|run| run.source.iter().chain(&run.destination))
        .flat_map(|side| &side.threads)
        .map(|thread| thread.name.len());
    let names = names.max().unwrap_or(0).max(THREADS.len());
    let figures = runs.iter().map(|run| run.name().len()).max().unwrap_or(0);
    let beside = width::side_by_side(names, figures.max(LONGEST_MS), runs.len());
    let tables = runs.chunks(beside).map(|runs| threads_of(runs).to_string());
    tables.collect::<Vec<_>>().join("\n")
}

/// Heading of the column with thread names.
const THREADS: &str = "thread, CPU ms";

/// Width of a CPU time of 999 seconds in milliseconds, in characters.
const LONGEST_MS: usize = 8;

fn threads_of(runs: &[Run]) -> Table {
    let columns: Vec<String> = runs.iter().map(Run::name).collect();
    let mut header = vec![THREADS];
    header.extend(columns.iter().map(String::as_str));
    let mut table = new_table(&header);
    let mut names: Vec<&str> = Vec::new();
    let of = |run: &Run| -> Vec<(String, f64)> {
        run.source
            .iter()
            .chain(&run.destination)
            .flat_map(|side| &side.threads)
            .map(|thread| (thread.name.clone(), thread.cpu_s * 1e3))
            .collect()
    };
    let all: Vec<_> = runs.iter().map(of).collect();
    for (name, _) in all.iter().flatten() {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names.sort_by_key(|name| name.starts_with("mig/dst"));
    for name in names {
        let mut row = vec![name.to_owned()];
        row.extend(all.iter().map(|threads| {
            threads
                .iter()
                .find(|(thread, _)| thread == name)
                .map_or("-".to_owned(), |(_, ms)| format!("{ms:.1}"))
        }));
        table.add_row(row);
    }
    let mut totals = vec!["total".to_owned()];
    totals.extend(all.iter().map(|threads| {
        let total = threads.iter().map(|(_, ms)| ms).sum::<f64>() + 0.0;
        format!("{total:.1}")
    }));
    table.add_row(totals);
    align(&mut table);
    table
}

/// Returns the table of accelerator jobs (units of work), also of jobs that the CPU did instead; `None` if there were no jobs.
pub fn jobs(runs: &[Run]) -> Option<String> {
    let sides = runs.iter().flat_map(|run| {
        let sides = [("source", &run.source), ("destination", &run.destination)];
        sides.into_iter().flat_map(move |(side, figures)| {
            let of = |what: String, jobs: fn(&SideFigures) -> &JobFigures| {
                Some((what, side, jobs(figures.as_ref()?)))
            };
            let zero_pages = format!("zero pages, {}", run.name());
            [
                of(run.name(), |figures| &figures.jobs),
                of(zero_pages, |figures| &figures.zero_jobs),
            ]
        })
    });
    let rows: Vec<_> = sides
        .flatten()
        .filter(|(_, _, jobs)| **jobs != JobFigures::default())
        .collect();
    if rows.is_empty() {
        return None;
    }
    let mut table = new_table(&[
        "method",
        "side",
        "hardware",
        "software",
        "retries",
        "raw pages",
        "done by",
    ]);
    // Reasons are printed once below the table: in its cells they would make the rows high.
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for (method, side, jobs) in rows {
        if let Some(why) = &jobs.fallback {
            match reasons.iter_mut().find(|(known, _)| known == why) {
                Some((_, methods)) if methods.contains(&method) => {}
                Some((_, methods)) => methods.push(method.clone()),
                None => reasons.push((why, vec![method.clone()])),
            }
        }
        table.add_row([
            method,
            side.to_owned(),
            jobs.hardware.to_string(),
            jobs.software.to_string(),
            jobs.retries.to_string(),
            jobs.raw_pages.to_string(),
            devices_text(jobs),
        ]);
    }
    align_with_words(&mut table, 6);
    width::wrap(&mut table, 6);
    let mut lines = vec!["jobs".to_owned(), table.to_string()];
    lines.extend(reasons.iter().map(|(why, methods)| {
        width::folded(&format!("{}: on the CPU: {why}", methods.join(", ")))
    }));
    Some(lines.join("\n"))
}

/// Returns the names of the devices that did the jobs, and the CPU if it did some.
fn devices_text(jobs: &JobFigures) -> String {
    let devices = jobs.devices.join(", ");
    match &jobs.fallback {
        None if !devices.is_empty() => devices,
        Some(_) if jobs.hardware > 0 => format!("{devices}; then the CPU"),
        _ => "the CPU".to_owned(),
    }
}

/// Returns the devices and the CPU that did the jobs. If the CPU replaced a device, adds the reason.
pub fn done_by(jobs: &JobFigures) -> String {
    let devices = devices_text(jobs);
    match &jobs.fallback {
        None => devices,
        Some(why) => {
            // The text already names the device, so it is removed from the start of the reason.
            let of_the_one = match jobs.hardware {
                0 => None,
                _ => why.strip_prefix(&format!("{}: ", jobs.devices.join(", "))),
            };
            format!("{devices}: {}", of_the_one.unwrap_or(why))
        }
    }
}

/// Writes the results of all migrations to the file `path`, as a JSON array.
pub fn write_json(path: &Path, runs: &[Run]) -> Result<(), TerminalError> {
    let failed = FileError::writing(path);
    let mut text = serde_json::to_string_pretty(runs).map_err(|error| failed(error.into()))?;
    text.push('\n');
    Ok(output_file::write(path, text.as_bytes()).map_err(failed)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(given: &[(&str, &str)]) -> Run {
        let mut options = Options::default();
        for (name, value) in given {
            options.set(name, value).unwrap();
        }
        Run::new(GuestKind::Threads, &GuestSettings::default(), &options)
    }

    #[test]
    fn a_result_names_only_options_that_differ_from_the_default() {
        assert_eq!(
            option_lines(&[run(&[]), run(&[("multifd-compression", "zstd")])]),
            [""; 0]
        );
        for (given, words) in [
            (("xbzrle", "on"), "with multifd=off, xbzrle=on"),
            (("multifd", "off"), "with multifd=off"),
            (("zero-copy-send", "on"), "with zero-copy-send=on"),
            (("mem-prealloc", "on"), "with mem-prealloc=on"),
            (("auto-converge", "on"), "with auto-converge=on"),
        ] {
            let runs = [run(&[given])];
            let text = results(&runs);
            assert!(text.starts_with(&format!("{words}\n")), "{text}");
            let json = serde_json::to_value(&runs).unwrap();
            assert_eq!(json[0]["options"][given.0], given.1, "{json}");
        }
        let mixed = [run(&[("mem-prealloc", "on")]), run(&[])];
        assert_eq!(option_lines(&mixed), ["none with mem-prealloc=on"]);
    }

    #[test]
    fn the_reason_for_software_fallback_is_printed_once_and_not_in_the_table() {
        let why = "libqpl.so.1: cannot open shared object file";
        let mut one = run(&[("multifd-compression", "qpl")]);
        let jobs = JobFigures {
            software: 5,
            fallback: Some(why.to_owned()),
            ..JobFigures::default()
        };
        let side = SideFigures {
            jobs: jobs.clone(),
            ..SideFigures::default()
        };
        one.source = Some(side.clone());
        one.destination = Some(side);
        let text = super::jobs(&[one]).unwrap();
        assert_eq!(text.matches("the CPU │").count(), 2, "{text}");
        assert_eq!(text.matches(why).count(), 1, "{text}");
        assert!(text.ends_with(&format!(": on the CPU: {why}")), "{text}");
        assert_eq!(done_by(&jobs), format!("the CPU: {why}"));
        let lost = JobFigures {
            hardware: 3,
            devices: vec!["IAA".to_owned()],
            fallback: Some("IAA: status 0x20".to_owned()),
            ..jobs
        };
        assert_eq!(devices_text(&lost), "IAA; then the CPU");
        assert_eq!(done_by(&lost), "IAA; then the CPU: status 0x20");
    }

    #[test]
    fn an_interrupted_run_shows_only_measured_values() {
        let mut one = run(&[]);
        one.interrupted(&ProgressSnapshot {
            elapsed_ms: 2000.0,
            status: "active".to_owned(),
            round: 3,
            remaining_bytes: 1,
            transferred_bytes: 250_000_000,
            bytes_per_second: 1.0,
            pages_per_second: 500.0,
            dirty_pages_per_second: 1.0,
        });
        let shown: Vec<_> = row(&one);
        assert_eq!(shown[2..8].join(" "), "2000 - 3 1000 500 -");
        assert_eq!(shown.last().map(String::as_str), Some("interrupted"));
    }
}
