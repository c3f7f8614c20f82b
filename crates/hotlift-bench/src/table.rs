//! The result table of a matrix: one line per row, with Hotlift's rows next to QEMU's.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};

use hotlift_terminal::progress::{bytes, rounded};
use hotlift_terminal::table::{align, align_with_words};
use hotlift_terminal::width;

use super::figures::{self, Figure};
use super::record::{Completed, Engine, GuestRow, Outcome, Record, Row, program_names};
use super::report::{neighbour, rate};

/// A table of text cells, for the terminal and for the report.
pub struct Grid {
    /// Headings of the columns.
    pub header: Vec<String>,
    /// The rows, one cell per column.
    pub rows: Vec<Vec<String>>,
    /// Index of a text column, which is aligned like the first column; 0 if the first is the only text column.
    pub words: usize,
}

impl Grid {
    /// Returns a table with these headings and without rows. `words` is the index of a text column, or 0.
    pub fn new<'a>(header: impl IntoIterator<Item = &'a str>, words: usize) -> Self {
        Self {
            header: header.into_iter().map(str::to_owned).collect(),
            rows: Vec::new(),
            words,
        }
    }
}

/// Formats the table for the width of the terminal, and omits columns that do not fit.
impl Display for Grid {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let header: Vec<&str> = self.header.iter().map(String::as_str).collect();
        let text = width::fitted(&header, &self.rows, |table| match self.words {
            0 => align(table),
            words => align_with_words(table, words),
        });
        f.write_str(&text)
    }
}

/// Row names that show only the settings in which the rows differ.
pub struct Labels {
    differs: Vec<bool>,
    options: BTreeSet<String>,
}

/// Group of row settings that [`Labels`] shows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SettingGroup {
    /// Number of multifd channels.
    Channels,
    /// Other migration options.
    Options,
    /// Network link.
    Link,
    /// Guest and its writes.
    Guest,
}

impl Labels {
    /// Creates the labels for rows that are shown in one table.
    pub fn of(rows: &[Row]) -> Self {
        let all: Vec<_> = rows.iter().map(parts).collect();
        let differs = (0..all.first().map_or(0, Vec::len))
            .map(|part| {
                let mut reported = all.iter().filter_map(|row| row[part].1.as_ref());
                reported
                    .next()
                    .is_some_and(|first| reported.any(|other| other != first))
            })
            .collect();
        let names = rows.iter().flat_map(|row| row.options.keys());
        let differing = |name: &&String| {
            let mut values = rows.iter().map(|row| row.options.get(*name));
            let first = values.next();
            values.any(|value| Some(value) != first)
        };
        let options = names.filter(differing).cloned().collect();
        Self { differs, options }
    }

    /// Returns the name of a row: its method, and all settings that differ between the rows of the table.
    pub fn text(&self, row: &Row, program: &str) -> String {
        let mut words = vec![row.method_and_level()];
        if row.engine != Engine::Hotlift {
            words.insert(0, program.to_owned());
        }
        words.extend(self.words(row, SettingGroup::Channels, true));
        words.extend(self.differing_options(row));
        words.extend(self.words(row, SettingGroup::Link, true));
        words.extend(self.work(row));
        words.join(" ")
    }

    /// Returns the migration options of `row` that differ between the rows. Omits method, level and channels.
    pub fn differing_options(&self, row: &Row) -> Vec<String> {
        let mut words = self.words(row, SettingGroup::Options, true);
        words.extend(self.options(row, true));
        words
    }

    /// Returns the migration options that all rows share. Omits defaults.
    pub fn shared_options(&self, row: &Row) -> Vec<String> {
        let mut words = self.words(row, SettingGroup::Options, false);
        words.retain(|word| !["zero pages: multifd", &row.guest.kind].contains(&word.as_str()));
        words.extend(self.options(row, false));
        words
    }

    /// Returns the migration options that all rows share, except those shown elsewhere in a table.
    fn common_options(&self, row: &Row) -> Vec<String> {
        let mut options = self.options(row, false);
        let channels = self.words(row, SettingGroup::Channels, false);
        options.extend(channels.into_iter().filter(|_| row.channels == 0));
        options
    }

    /// Returns the settings of link and guest that differ between the rows.
    pub fn circumstances(&self, row: &Row) -> String {
        let mut words = self.words(row, SettingGroup::Link, true);
        words.extend(self.work(row));
        words.join(", ")
    }

    /// Returns the settings of the guest that differ between the rows.
    pub fn work(&self, row: &Row) -> Vec<String> {
        self.words(row, SettingGroup::Guest, true)
    }

    fn words(&self, row: &Row, group: SettingGroup, differs: bool) -> Vec<String> {
        let parts = parts(row).into_iter().zip(&self.differs);
        parts
            .filter(|((of, _), different)| *of == group && **different == differs)
            .filter_map(|((_, words), _)| words.filter(|words| !words.is_empty()))
            .collect()
    }

    fn options(&self, row: &Row, differs: bool) -> Vec<String> {
        // The number of channels already shows if multifd is on.
        let chosen = row
            .options
            .iter()
            .filter(|(name, _)| *name != "multifd" && self.options.contains(*name) == differs);
        chosen
            .map(|(name, value)| format!("{name}={value}"))
            .collect()
    }
}

/// Returns the settings that may distinguish a row, each `None` if unused. Omits engine, method, level and options.
fn parts(row: &Row) -> Vec<(SettingGroup, Option<String>)> {
    let guest = &row.guest;
    let bandwidth = match row.max_bandwidth {
        0 => "unlimited".to_owned(),
        limit => format!("{}/s", bytes(limit)),
    };
    let link = row.link.as_ref().map(|link| format!("link {link}"));
    let touched = match guest.zero_touched {
        true => "zero pages written once",
        false => "",
    };
    let writes = guest.workload != "idle";
    let detects = !row.zero_page_detection.is_empty();
    vec![
        (SettingGroup::Channels, Some(channels(row))),
        (
            SettingGroup::Options,
            detects.then(|| format!("zero pages: {}", row.zero_page_detection)),
        ),
        (SettingGroup::Options, Some(guest.kind.clone())),
        (SettingGroup::Link, Some(bandwidth)),
        (SettingGroup::Link, Some(link.unwrap_or_default())),
        (SettingGroup::Link, Some(neighbour(row).unwrap_or_default())),
        (SettingGroup::Guest, Some(format!("{} vCPU", guest.vcpus))),
        (SettingGroup::Guest, Some(bytes(guest.ram_bytes))),
        (SettingGroup::Guest, Some(guest.fill.clone())),
        (SettingGroup::Guest, Some(zero_share(guest))),
        (SettingGroup::Guest, Some(touched.to_owned())),
        (SettingGroup::Guest, Some(guest.workload.clone())),
        (
            SettingGroup::Guest,
            writes.then(|| format!("{} pages/s", guest.rate)),
        ),
        (
            SettingGroup::Guest,
            writes.then(|| format!("in {}", bytes(guest.working_set))),
        ),
    ]
}

/// Returns the requested share of zero pages as text: "25 % zero".
pub fn zero_share(guest: &GuestRow) -> String {
    match guest.zero_share {
        Some(share) => format!("{:.0} % zero", share * 100.0),
        None => "zero pages as in the file".to_owned(),
    }
}

/// Returns the number of multifd channels as text: "2 ch", or "no multifd".
pub fn channels(row: &Row) -> String {
    match row.channels {
        0 => "no multifd".to_owned(),
        channels => format!("{channels} ch"),
    }
}

const COLUMNS: &[Figure] = &[
    figures::TOTAL_MS,
    figures::DOWN_MS,
    figures::MBPS,
    figures::PAGES_PER_SECOND,
    figures::RATIO,
    figures::SOURCE_CPU,
    figures::DESTINATION_CPU,
    figures::SOURCE_CPU_OF_ALL,
    figures::DESTINATION_CPU_OF_ALL,
];

/// Returns the table of `records` as text, with median (lowest–highest) of each figure for each row.
pub fn matrix(records: &[Record]) -> String {
    let series = series(records);
    let rows: Vec<Row> = series.iter().map(|(row, _)| row.clone()).collect();
    let labels = Labels::of(&rows);
    let all: Vec<&Completed> = records.iter().filter_map(Record::completed).collect();
    let columns = figures::meaningful(COLUMNS, &all);
    let names = columns.iter().map(|figure| figure.name);
    let header = ["", "runs"].into_iter().chain(names).chain(["verified"]);
    let mut table = Grid::new(header, 0);
    for (row, program) in &series {
        let of = |run: &&Record| run.row == *row && run.program_name() == *program;
        let runs: Vec<&Record> = records.iter().filter(of).collect();
        let completed: Vec<&Completed> = runs.iter().filter_map(|run| run.completed()).collect();
        let mut line = vec![labels.text(row, program), completed.len().to_string()];
        let figures = columns.iter();
        line.extend(figures.map(|figure| figure.text(completed.iter().copied())));
        line.push(verified(&runs));
        table.rows.push(line);
        for (ours, name) in &series {
            let same = is_the_same_work(ours, row);
            let pairs = if same {
                pairs(records, ours, (row, program))
            } else {
                Vec::new()
            };
            if pairs.is_empty() {
                continue;
            }
            let mut line = vec![format!("  {name} / {program}"), pairs.len().to_string()];
            line.extend(columns.iter().map(|figure| figure.quotient(&pairs)));
            line.push(String::new());
            table.rows.push(line);
        }
    }
    let all = match rows.first().map(|row| labels.common_options(row)) {
        Some(options) if !options.is_empty() => format!("; all with {}", options.join(", ")),
        _ => String::new(),
    };
    format!("median (lowest–highest){all}\n{table}")
}

/// Returns the distinct rows of `records`, sorted, each with its program. Each version of QEMU counts as a separate
/// program.
pub fn series<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<(Row, String)> {
    let records: Vec<&Record> = records.into_iter().collect();
    let rows = rows(records.iter().copied()).into_iter();
    rows.flat_map(|row| {
        let runs = records.iter().copied().filter(|run| run.row == row);
        let program_names = program_names(runs).into_iter();
        program_names
            .map(|program| (row.clone(), program))
            .collect::<Vec<_>>()
    })
    .collect()
}

/// Returns the distinct rows of `records`, sorted for a table.
fn rows<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for record in records {
        if !rows.contains(&record.row) {
            rows.push(record.row.clone());
        }
    }
    // The order of the runs was random. Rows of the same work are adjacent, slow links come first, and QEMU's row
    // follows ours.
    rows.sort_by_cached_key(|row| {
        let guest = &row.guest;
        let work = (
            guest.ram_bytes,
            guest.workload.clone(),
            guest.fill.clone(),
            guest.zero_share.map(f64::to_bits),
            guest.zero_touched,
            (guest.rate, guest.working_set),
            // A missing limit counts as the fastest link, in every notation.
            rate(row).map_or(u64::MAX, rounded),
            (row.link.clone(), row.neighbour.clone()),
            row.max_bandwidth,
        );
        let way = (
            row.method != "none",
            row.method.clone(),
            row.level,
            row.channels,
            row.zero_page_detection.clone(),
            row.options.clone(),
            guest.kind.clone(),
        );
        (work, way, row.engine)
    });
    rows
}

/// Returns true if `theirs` is a QEMU row with the same work as `ours`. `ours` is a row of Hotlift or of relays.
pub fn is_the_same_work(ours: &Row, theirs: &Row) -> bool {
    let mut same = theirs.clone();
    same.engine = ours.engine;
    same.guest.kind.clone_from(&ours.guest.kind);
    ours.is_ours() && !theirs.is_ours() && same == *ours
}

/// Returns pairs of runs with the same repeat number: a run of `ours` and a run of QEMU, which ran close in time.
pub fn pairs<'a>(
    records: impl IntoIterator<Item = &'a Record>,
    ours: &Row,
    (theirs, program): (&Row, &str),
) -> Vec<(&'a Completed, &'a Completed)> {
    let records: Vec<&Record> = records.into_iter().collect();
    let of_ours = records.iter().filter(|run| run.row == *ours);
    of_ours
        .filter_map(|run| {
            let other = records.iter().find(|other| {
                let same = other.repeat == run.repeat && other.series == run.series;
                same && other.row == *theirs && other.program_name() == program
            })?;
            Some((run.completed()?, other.completed()?))
        })
        .collect()
}

/// Returns "yes" if all runs were verified, else the first different result with its count.
pub fn verified(runs: &[&Record]) -> String {
    let reported: Vec<&str> = runs
        .iter()
        .map(|run| match &run.outcome {
            Outcome::Completed(completed) => match completed.verified {
                Some(true) => "yes",
                Some(false) => "NO",
                None => "-",
            },
            Outcome::Failed { .. } => "failed",
            Outcome::Skipped { .. } => "skipped",
        })
        .collect();
    match reported.iter().find(|word| **word != "yes") {
        None => "yes".to_owned(),
        Some(worst) if reported.iter().all(|word| word == worst) => (*worst).to_owned(),
        Some(worst) => {
            let number = reported.iter().filter(|word| *word == worst).count();
            format!("{number} {worst}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::example;
    use super::*;

    fn run(engine: Engine, repeat: u32, total_ms: f64) -> Record {
        let mut record = example();
        record.row.engine = engine;
        record.repeat = repeat;
        let mut completed = Completed {
            verified: Some(true),
            ..Completed::default()
        };
        completed.source.total_ms = total_ms;
        record.outcome = Outcome::Completed(Box::new(completed));
        record
    }

    #[test]
    fn a_label_has_every_difference_but_no_rate_of_an_idle_guest() {
        let row = example().row;
        let other = |change: fn(&mut Row)| {
            let mut other = row.clone();
            change(&mut other);
            let rows = [row.clone(), other.clone()];
            Labels::of(&rows).text(&other, "QEMU")
        };
        let link = other(|row| row.link = Some("1gbit".to_owned()));
        assert!(link.contains("link 1gbit"), "{link}");
        let touched = other(|row| row.guest.zero_touched = !row.guest.zero_touched);
        assert!(touched.contains("written once") != row.guest.zero_touched);
        let mut rows = [(); 3].map(|()| row.clone());
        for (row, (workload, rate)) in
            rows.iter_mut()
                .zip([("random", 7), ("random", 8), ("idle", 0)])
        {
            row.guest.workload = workload.to_owned();
            row.guest.rate = rate;
        }
        let texts = rows
            .each_ref()
            .map(|row| Labels::of(&rows).text(row, "QEMU"));
        assert!(texts[1].contains("8 pages/s") && !texts[2].contains("pages/s"));
        let texts = Labels::of(&rows[1..]).text(&rows[1], "QEMU");
        assert!(
            !texts.contains("pages/s"),
            "the only one that writes: {texts}"
        );
    }

    #[test]
    fn rows_have_medians_and_quotients_of_runs_with_the_same_repeat() {
        let mut runs = vec![
            run(Engine::Hotlift, 1, 100.0),
            run(Engine::Qemu, 1, 200.0),
            run(Engine::Hotlift, 2, 300.0),
            run(Engine::Qemu, 2, 300.0),
        ];
        let mut failed = run(Engine::Qemu, 3, 0.0);
        failed.outcome = Outcome::Failed {
            error: "no".to_owned(),
        };
        runs.push(failed);
        let text = matrix(&runs);
        for words in [
            "200 (100–300)",
            "250 (200–300)",
            "0.75 (0.50–1.00)",
            "1 failed",
        ] {
            assert!(text.contains(words), "no {words} in\n{text}");
        }
        assert!(!text.contains("2 ch"), "the same everywhere:\n{text}");
    }
}
