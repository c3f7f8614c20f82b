//! Groups of runs: repeats of one row, and rows that differ only in their migration options.

use hotlift_command::args::Fill;

use crate::figures::{self, Figure};
use crate::record::{Completed, Engine, Outcome, Record, Row};
use crate::stats::{Spread, rate_text};
use crate::table::{Labels, channels, series, zero_share};

/// All runs of one row in one program version.
pub struct Series<'a> {
    /// Settings that all runs of the series share.
    pub row: Row,
    /// Program that migrated the guest: "Hotlift", "QEMU 10.0.2".
    pub program: String,
    /// Name that distinguishes the row from other rows of its chapter. Omits link and guest.
    pub name: String,
    /// The completed runs, in the order in which they ran.
    pub runs: Vec<&'a Record>,
    /// Reasons why runs of this row did not complete.
    pub problems: Vec<Problem<'a>>,
}

/// A reason why some runs of a row did not complete.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Problem<'a> {
    /// Text of the reason, in one line.
    pub why: &'a str,
    /// True if the runs failed; false if they were skipped because something is missing.
    pub failed: bool,
    /// Number of runs that did not complete for this reason.
    pub times: usize,
}

/// All rows with the same guest over the same link.
pub struct Condition<'a> {
    /// Title: the link, and the properties of the guest that differ between conditions.
    pub title: String,
    /// Note below the title: the guest, and the settings that all rows of the chapter share.
    pub note: String,
    /// One series for each row.
    pub series: Vec<Series<'a>>,
}

impl<'a> Series<'a> {
    fn new(row: Row, program: String, labels: &Labels, records: &'a [Record]) -> Self {
        let mut name = vec![row.method_and_level(), channels(&row)];
        if row.engine != Engine::Hotlift {
            name[0].insert_str(0, &format!("{program} "));
        }
        name.extend(labels.differing_options(&row));
        let mut series = Self {
            row,
            program,
            name: name.join(", "),
            runs: Vec::new(),
            problems: Vec::new(),
        };
        let runs = records
            .iter()
            .filter(|run| run.row == series.row && run.program_name() == series.program);
        for record in runs.collect::<Vec<_>>() {
            let (why, failed) = match &record.outcome {
                Outcome::Completed(_) => {
                    series.runs.push(record);
                    continue;
                }
                Outcome::Failed { error } => (error.as_str(), true),
                Outcome::Skipped { reason } => (reason.as_str(), false),
            };
            let same = |problem: &&mut Problem<'_>| (problem.why, problem.failed) == (why, failed);
            match series.problems.iter_mut().find(same) {
                Some(problem) => problem.times += 1,
                None => series.problems.push(Problem {
                    why,
                    failed,
                    times: 1,
                }),
            }
        }
        series
    }

    /// Returns the figures of the completed runs.
    pub fn completed(&self) -> impl Iterator<Item = &'a Completed> {
        self.runs.iter().filter_map(|run| run.completed())
    }

    /// Returns the spread of `figure` over all completed runs; `None` if a run has no value.
    pub fn spread(&self, figure: Figure) -> Option<Spread> {
        figure.spread(self.completed())
    }

    /// Returns the completed run with the median total time; `None` without completed runs.
    pub fn typical(&self) -> Option<&'a Completed> {
        let mut runs: Vec<_> = self.completed().collect();
        runs.sort_by(|a, b| a.source.total_ms.total_cmp(&b.source.total_ms));
        runs.get(runs.len() / 2).copied()
    }
}

impl<'a> Condition<'a> {
    /// Returns the lower of the link's start rate and `max-bandwidth`, in bytes per second; `None` without a limit.
    pub fn rate(&self) -> Option<f64> {
        self.series.first().and_then(|series| rate(&series.row))
    }

    /// Returns true if neither the link's rate nor the available cores change during a run.
    pub fn is_steady(&self) -> bool {
        self.series.first().is_some_and(|series| {
            let link = series.row.link();
            series.row.neighbour.is_none() && link.is_none_or(|link| link.changes().is_empty())
        })
    }

    /// Returns the figures for the CPU time per GiB of source and destination, and the kind of pages that the GiB
    /// counts.
    pub fn cpu(&self) -> ([Figure; 2], &'static str) {
        cpu(self.series.iter().flat_map(Series::completed))
    }

    /// Returns true if `other` has the same guest; the links may differ.
    pub fn has_the_guest_of(&self, other: &Self) -> bool {
        let first = |condition: &Self| condition.series.first().map(|series| series.row.clone());
        first(self).zip(first(other)).is_some_and(|(a, b)| {
            let b = Row {
                max_bandwidth: a.max_bandwidth,
                link: a.link.clone(),
                ..b
            };
            a.is_comparable(&b)
        })
    }
}

/// Returns the figures for CPU time per GiB of source and destination, and the kind of pages that the GiB counts. The
/// kind is pages with content, or all pages if almost all are zero.
pub fn cpu<'a>(mut runs: impl Iterator<Item = &'a Completed>) -> ([Figure; 2], &'static str) {
    match runs.all(figures::has_content) {
        true => (
            [figures::SOURCE_CPU, figures::DESTINATION_CPU],
            "GiB of pages with content",
        ),
        false => (
            [figures::SOURCE_CPU_OF_ALL, figures::DESTINATION_CPU_OF_ALL],
            "GiB of all pages, of which nearly none has content",
        ),
    }
}

/// Returns the lower of the link's start rate and `max-bandwidth`, in bytes per second; `None` without a limit.
pub fn rate(row: &Row) -> Option<f64> {
    let link = row.link().and_then(|link| Some(link.rate()? as f64 / 8.0));
    match (link, row.max_bandwidth) {
        (link, 0) => link,
        (link, limit) => Some(link.map_or(limit as f64, |link| link.min(limit as f64))),
    }
}

/// Describes the link and the busy thread: "1 Gbit/s", "10 Gbit/s, 500 Mbit/s from 1s".
pub fn wire_text(row: &Row) -> String {
    let link = row.link().filter(|link| !link.changes().is_empty());
    let mut words = vec![link.map_or_else(|| rate_text(rate(row)), |link| link.words())];
    words.extend(neighbour(row));
    words.join("; ")
}

/// Describes the busy thread: "a neighbour takes a core from 2s"; `None` without a busy thread.
pub fn neighbour(row: &Row) -> Option<String> {
    let at = row.neighbour.as_ref()?;
    Some(format!("a neighbour takes a core from {at}"))
}

/// Describes the guest of a row.
pub fn guest(row: &Row) -> String {
    let guest = &row.guest;
    let touched = match guest.zero_touched {
        true => ", written once",
        false => "",
    };
    let work = match guest.workload.as_str() {
        "idle" => "idle".to_owned(),
        name => format!(
            "{name} at {} pages/s in {}",
            guest.rate,
            hotlift_terminal::progress::bytes(guest.working_set)
        ),
    };
    format!(
        "{} guest, {} vCPU, {} of RAM filled with {}, {}{touched}, {work}",
        guest.kind,
        guest.vcpus,
        hotlift_terminal::progress::bytes(guest.ram_bytes),
        Fill::words(&guest.fill),
        zero_share(guest),
    )
}

/// Groups the records of one chapter by link and guest.
pub fn conditions(records: &[Record]) -> Vec<Condition<'_>> {
    let all_series = series(records);
    let rows: Vec<Row> = all_series.iter().map(|(row, _)| row.clone()).collect();
    let labels = Labels::of(&rows);
    let mut all: Vec<Condition<'_>> = Vec::new();
    for (row, program) in all_series {
        let series = Series::new(row, program, &labels, records);
        let row = &series.row;
        let same = |condition: &&mut Condition<'_>| {
            let first = condition.series.first();
            first.is_some_and(|other| other.row.is_comparable(row))
        };
        if let Some(condition) = all.iter_mut().find(same) {
            condition.series.push(series);
            continue;
        }
        let mut title = vec![format!("Wire: {}", wire_text(row))];
        title.extend(labels.work(row));
        let mut note = vec![guest(row)];
        note.extend(labels.shared_options(row));
        all.push(Condition {
            title: title.join(", "),
            note: note.join("; "),
            series: vec![series],
        });
    }
    all
}
