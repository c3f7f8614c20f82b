//! The published tables, row by row, with our own figures beside theirs.
//!
//! A suite is data: blocks of rows, each with the settings that it was measured with and the figures that
//! were published. What a suite shows beside that is in its own file.

mod dsa;
mod iaa;
mod legacy_rework;
mod multithread;
mod qat;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Formatter};

use comfy_table::Table;
use hotlift::options::{OptionError, option, parse_size};
use hotlift_console::args::GuestArgs;
use hotlift_console::migration_args::MigrationArgs;
use hotlift_console::progress::bytes;
use hotlift_console::table::{align_with_words, new_table};
use hotlift_vmm::workload::Workload;

use super::cell::{Cell, with_method};
use super::figures;
use super::machine;
use super::matrix::{MatrixArgs, add_new};
use super::record::{Completed, Engine, Record, Row};
use super::stats;
use super::table::{Labels, is_the_same_work, pairs, series};
use super::warn;
use crate::error::BenchError;

/// A published table.
#[derive(Debug)]
pub struct Suite {
    /// As typed.
    pub name: &'static str,
    /// Who published it, where and when.
    source: &'static str,
    /// What it was measured on.
    machine: &'static str,
    /// What differs here, apart from machine and size.
    differs: &'static [&'static str],
    /// GiB of RAM of the published guest.
    ram_gib: u64,
    /// What the columns are.
    columns: &'static [Column],
    /// The table.
    blocks: &'static [Block],
    /// Adds what else it shows of the kept runs.
    more: Option<fn(&[Record], &mut Sheet)>,
}

/// A published table with ours beside it.
pub struct Sheet {
    /// Who published it, where and when, and what it was measured on.
    pub published: String,
    /// What differs here, a line each.
    pub differs: Vec<String>,
    /// The tables, each with its caption.
    pub tables: Vec<(String, Table)>,
}

impl Display for Sheet {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "published: {}\nhere, what differs:", self.published)?;
        for line in &self.differs {
            writeln!(f, "- {line}")?;
        }
        for (caption, table) in &self.tables {
            writeln!(f, "{caption}\n{table}")?;
        }
        Ok(())
    }
}

/// A column, with a figure of ours of the same definition.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    name: &'static str,
    figure: fn(&Record, &Completed) -> f64,
}

/// Rows that share most of their settings.
#[derive(Debug)]
pub struct Block {
    title: &'static str,
    method: &'static str,
    /// Name and value of options; the value [`DEVICES`] stands for those of this host.
    options: &'static [(&'static str, &'static str)],
    workload: Workload,
    zero_share: f64,
    zero_touched: bool,
    rows: &'static [Published],
}

/// A row: its name, settings of its own, and a figure a column; NaN where none was published.
#[derive(Debug)]
pub struct Published(
    &'static str,
    &'static [(&'static str, &'static str)],
    &'static [f64],
);

/// Stands for the accelerators of this host, or those of `--with accel-path=`.
const DEVICES: &str = "(devices)";

/// No figure was published.
const NONE: f64 = f64::NAN;

const TOTAL_MS: Column = Column {
    name: "total ms",
    figure: |_, run| run.source.total_ms,
};
const DOWN_MS: Column = Column {
    name: "down ms",
    figure: |_, run| run.source.downtime_ms,
};
const MBPS: Column = Column {
    name: "Mbit/s",
    figure: |_, run| (figures::MBPS.of)(run).unwrap_or(NONE),
};
const PAGES_PER_SECOND: Column = Column {
    name: "pages/s",
    figure: |_, run| run.source.pages_per_second,
};
const SOURCE_CPU: Column = Column {
    name: "CPU % src",
    figure: |_, run| run.source.side.cpu_percent,
};
const DESTINATION_CPU: Column = Column {
    name: "CPU % dst",
    figure: |_, run| run.destination.side.cpu_percent,
};
const TRANSFERRED_KB: Column = Column {
    name: "sent kB",
    figure: |_, run| (figures::BYTES.of)(run).map_or(NONE, |bytes| bytes / 1024.0),
};
const RAM_KB: Column = Column {
    name: "RAM kB",
    figure: |record, _| record.row.guest.ram_bytes as f64 / 1024.0,
};

static SUITES: [&Suite; 5] = [
    &dsa::SUITE,
    &multithread::SUITE,
    &iaa::SUITE,
    &qat::SUITE,
    &legacy_rework::SUITE,
];

/// `--suite`.
#[derive(Debug, Clone)]
pub struct Choice(pub Vec<&'static Suite>);

/// The suite with this name, or all of them.
///
/// # Errors
/// If there is none; with those that there are.
pub fn choose(name: &str) -> Result<Choice, String> {
    match name {
        "all" => Ok(Choice(SUITES.to_vec())),
        name => find(name)
            .map(|suite| Choice(vec![suite]))
            .map_err(|error| format!("{error}, all")),
    }
}

/// The suite with this name.
///
/// # Errors
/// If there is none; with those that there are.
pub fn find(name: &str) -> Result<&'static Suite, String> {
    let found = SUITES.iter().find(|suite| suite.name == name);
    found.copied().ok_or_else(|| {
        let names: Vec<_> = SUITES.iter().map(|suite| suite.name).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// Records that one table can show, each in the order in which it came first: of one suite, machine and
/// work.
pub fn split(records: &[Record]) -> Vec<Vec<Record>> {
    let mut works: BTreeMap<(&str, &str), Work<'_>> = BTreeMap::new();
    for record in records {
        let work = works.entry((&record.suite, &record.series)).or_default();
        work.add(record);
    }
    let mut tables: Vec<(&Work<'_>, Vec<Record>)> = Vec::new();
    for record in records {
        let work = &works[&(&*record.suite, &*record.series)];
        match tables.iter_mut().find(|(known, _)| *known == work) {
            Some((_, records)) => records.push(record.clone()),
            None => tables.push((work, vec![record.clone()])),
        }
    }
    tables.into_iter().map(|(_, records)| records).collect()
}

/// What one call of the bench did, beside what a published row says itself.
#[derive(Default, PartialEq)]
struct Work<'a> {
    suite: &'a str,
    machines: BTreeSet<(&'a str, usize, &'a str, Option<&'a str>)>,
    guests: BTreeSet<(u64, u8, Option<&'a str>)>,
    fills: BTreeSet<&'a str>,
    kinds: BTreeSet<&'a str>,
    writes: BTreeSet<(u64, u64)>,
}

impl<'a> Work<'a> {
    fn add(&mut self, record: &'a Record) {
        self.suite = &record.suite;
        let machine = &record.machine;
        self.machines.insert(machine.identity());
        if find(&record.suite).is_err() {
            // A matrix shows in its labels what differs.
            return;
        }
        let (row, guest) = (&record.row, &record.row.guest);
        self.guests
            .insert((guest.ram_bytes, guest.vcpus, row.link.as_deref()));
        if guest.fill != "zero" {
            self.fills.insert(&guest.fill);
        }
        if row.engine == Engine::Hotlift {
            self.kinds.insert(&guest.kind);
        }
        if guest.workload != "idle" {
            self.writes.insert((guest.rate, guest.working_set));
        }
    }
}

/// RAM that a suite's guest has for each core of this machine at most, unless `--ram` says more: the
/// published hosts had dozens of cores, and some thirty rows have to be done in less than a day.
const RAM_PER_CORE: u64 = 1 << 30;

impl Suite {
    /// Bytes of RAM that its guests have here, before it is seen what fits.
    pub fn ram(&self) -> u64 {
        let cores = u64::try_from(machine::cores()).unwrap_or(u64::MAX);
        (self.ram_gib << 30).min(RAM_PER_CORE.saturating_mul(cores))
    }

    /// A cell for every row that this host can try, for a guest like `base`.
    ///
    /// # Errors
    /// If `--with` asks for what does not go together.
    pub fn cells(&self, base: &GuestArgs, matrix: &MatrixArgs) -> Result<Vec<Cell>, BenchError> {
        if let Some(option) = matrix.with_names().find(|name| self.sets(name)) {
            return Err(BenchError::SuiteSets {
                suite: self.name,
                option,
            });
        }
        let mut cells = Vec::new();
        let mut left_out: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (block, row) in self.rows() {
            let guest = GuestArgs {
                guest: matrix.guest(),
                fill: matrix.fill(),
                workload: block.workload,
                zero_share: Some(block.zero_share),
                zero_touched: block.zero_touched,
                ..base.clone()
            };
            let migration = match own_options(block, row, matrix) {
                Ok(Some(migration)) => migration,
                Ok(None) => continue,
                Err(why) => {
                    let why = why.to_string();
                    left_out.entry(why).or_default().insert(block.title);
                    continue;
                }
            };
            let kind = guest.kind();
            // The devices are for the rows that name them.
            for migration in matrix.with_each(vec![migration], &["accel-path"])? {
                let cell = Cell {
                    engine: Engine::Hotlift,
                    kind,
                    guest: guest.clone(),
                    migration,
                    link: None,
                };
                add_new(&mut cells, cell)?;
            }
        }
        for (why, titles) in left_out {
            let titles: Vec<_> = titles.into_iter().collect();
            warn(format!("not run: {}: {why}", titles.join("; ")));
        }
        Ok(cells)
    }

    /// Whether its rows set this option themselves. Whose devices they name is the host's.
    fn sets(&self, name: &str) -> bool {
        let is = |(set, value): &(&str, &str)| {
            *value != DEVICES && option(set).is_ok_and(|info| info.name == name)
        };
        ["multifd-compression", "compress"].contains(&name)
            || self
                .rows()
                .any(|(block, row)| block.options.iter().chain(row.1).any(is))
    }

    fn rows(&self) -> impl Iterator<Item = (&'static Block, &'static Published)> {
        let blocks = self.blocks;
        blocks
            .iter()
            .flat_map(|block| block.rows.iter().map(move |row| (block, row)))
    }

    /// The published table with ours beside it, and what differs.
    pub fn sheet(&self, records: &[Record]) -> Sheet {
        let mut header = vec!["", ""];
        header.extend(self.columns.iter().map(|column| column.name));
        let mut shown = new_table(&header);
        for (block, row) in self.rows() {
            let mut name = format!("{}, {}", block.title, row.0);
            let mut line = |who: &str, figures: Vec<String>| {
                let mut cells = vec![std::mem::take(&mut name), who.to_owned()];
                cells.extend(figures);
                shown.add_row(cells);
            };
            let published = row.2.iter().map(|&figure| plain(figure)).collect();
            line("published", published);
            for (who, figures) in self.ours(block, row, records) {
                line(&who, figures);
            }
        }
        align_with_words(&mut shown, 1);
        let mut sheet = Sheet {
            published: format!("{}; on {}", self.source, self.machine),
            differs: self.differences(records),
            tables: vec![("medians (lowest–highest)".to_owned(), shown)],
        };
        if let Some(more) = self.more {
            more(records, &mut sheet);
        }
        sheet
    }

    /// Our lines below a published row: Hotlift, each QEMU, and the quotient of both, for each setting that the
    /// row leaves open.
    fn ours(
        &self,
        block: &Block,
        published: &Published,
        records: &[Record],
    ) -> Vec<(String, Vec<String>)> {
        let of = |record: &&Record| is_of(block, published, &record.row);
        let runs: Vec<&Record> = records.iter().filter(of).collect();
        let series = series(runs.iter().copied());
        let rows: Vec<Row> = series.iter().map(|(row, _)| row.clone()).collect();
        let labels = Labels::of(&rows);
        let mut lines = Vec::new();
        for (row, who) in &series {
            let of = |run: &&Record| run.row == *row && run.who() == *who;
            let mine: Vec<&Record> = runs.iter().copied().filter(of).collect();
            let completed: Vec<_> = mine
                .iter()
                .filter_map(|run| Some((*run, run.completed()?)))
                .collect();
            let mut name = vec![who.clone()];
            name.extend(is_simulated(row).then(|| "simulated device".to_owned()));
            name.extend(labels.way(row));
            let figures = match completed.is_empty() {
                true => vec!["not run".to_owned()],
                false => self
                    .columns
                    .iter()
                    .map(|column| {
                        stats::text(completed.iter().map(|(run, one)| (column.figure)(run, one)))
                    })
                    .collect(),
            };
            lines.push((name.join(", "), figures));
            let beside = |run: &&&Record| is_the_same_work(&run.row, row);
            let (Some(ours), Some(theirs)) = (runs.iter().find(beside), mine.first()) else {
                continue;
            };
            let pairs = pairs(runs.iter().copied(), &ours.row, (row, who));
            if pairs.is_empty() {
                continue;
            }
            let figures = self.columns.iter().map(|column| {
                stats::text(
                    pairs
                        .iter()
                        .map(|(a, b)| (column.figure)(ours, a) / (column.figure)(theirs, b)),
                )
            });
            lines.push((format!("Hotlift / {who}"), figures.collect()));
        }
        lines
    }

    fn differences(&self, records: &[Record]) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(record) = records.first() {
            let (machine, guest) = (&record.machine, &record.row.guest);
            let fill = records.iter().find(|run| run.row.guest.fill != "zero");
            lines.push(format!(
                "{} with {} cores; both sides {}",
                machine.cpu,
                machine.cores,
                match (&machine.destination, &record.row.link) {
                    (Some(host), _) => format!("on two hosts ({host})"),
                    (None, Some(link)) => format!("on it, over a link of {link}"),
                    (None, None) => "on it, over loopback".to_owned(),
                }
            ));
            lines.push(format!(
                "a guest of {} instead of {} GiB, {} vCPU, filled with {}",
                bytes(guest.ram_bytes),
                self.ram_gib,
                guest.vcpus,
                super::report::fill(fill.map_or("zero", |run| &run.row.guest.fill))
            ));
            if let Some(channels) = records.iter().map(|run| run.row.channels).max()
                && usize::from(channels) > machine.cores
            {
                lines.push(format!(
                    "up to {channels} channels share {} cores with both sides: more of them gain nothing",
                    machine.cores
                ));
            }
        }
        lines.extend(self.differs.iter().map(|line| (*line).to_owned()));
        let is_run = |(block, row): (&Block, &Published)| {
            records.iter().any(|run| is_of(block, row, &run.row))
        };
        let missing: Vec<_> = self.rows().filter(|row| !is_run(*row)).collect();
        if !records.is_empty() && !missing.is_empty() {
            lines.push(match missing.iter().all(needs_device) {
                true => "rows without a line of ours need an accelerator that this host does not have: see \
                         'hotlift accel'"
                    .to_owned(),
                false => format!("{} rows were not run", missing.len()),
            });
        }
        if records.iter().any(|run| is_simulated(&run.row)) {
            lines.push(
                "the DSA device is simulated: its figures say nothing of a real one".to_owned(),
            );
        }
        lines
    }
}

/// Whether a row can be run only where there is an accelerator.
fn needs_device((block, row): &(&Block, &Published)) -> bool {
    let mut options = block.options.iter().chain(row.1);
    options.any(|&(name, value)| (name, value) == ("accelerator", "required") || value == DEVICES)
}

/// A published figure as it was published, or "-".
fn plain(figure: f64) -> String {
    match figure {
        figure if !figure.is_finite() => "-".to_owned(),
        figure if figure.fract() == 0.0 => format!("{figure:.0}"),
        figure => format!("{figure}"),
    }
}

/// The options of a row; `None` if they name devices and none is here.
///
/// # Errors
/// If they demand an accelerator that is not here.
fn own_options(
    block: &Block,
    row: &Published,
    matrix: &MatrixArgs,
) -> Result<Option<MigrationArgs>, OptionError> {
    let mut migration = MigrationArgs::default();
    for &(name, value) in block.options.iter().chain(row.1) {
        let devices;
        let value = if value == DEVICES {
            devices = matrix.given(name).map_or_else(dsa::devices, str::to_owned);
            if devices.is_empty() {
                return Ok(None);
            }
            &devices
        } else {
            value
        };
        migration = migration.with(name, value);
    }
    with_method(&migration, block.method, None).map(Some)
}

/// Whether `row` ran with the settings of this row.
fn is_of(block: &Block, published: &Published, row: &Row) -> bool {
    let guest = &row.guest;
    row.method == block.method
        && guest.workload == block.workload.name()
        && has_zero_share(row, block.zero_share)
        && block
            .options
            .iter()
            .chain(published.1)
            .all(|(name, value)| has(row, name, value))
}

/// Whether this share of pages was to stay zero.
fn has_zero_share(row: &Row, share: f64) -> bool {
    let asked = row.guest.zero_share;
    asked.is_some_and(|asked| (asked - share).abs() < 1e-9)
}

fn has(row: &Row, name: &str, value: &str) -> bool {
    let name = option(name).map_or(name, |info| info.name);
    match name {
        "multifd-channels" => row.channels.to_string() == value,
        "max-bandwidth" => parse_size(value) == Some(row.max_bandwidth),
        "zero-page-detection" => row.zero_page_detection == value,
        "compress-level" => row.level.is_some_and(|level| level.to_string() == value),
        _ if value == DEVICES => row.options.contains_key(name),
        _ => row.options.get(name).is_some_and(|has| has == value),
    }
}

/// Whether a device of this row was the software model.
fn is_simulated(row: &Row) -> bool {
    row.options
        .get("accel-path")
        .is_some_and(|paths| paths.contains("dsa-model"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        matrix: MatrixArgs,
    }

    #[derive(Parser)]
    struct Base {
        #[command(flatten)]
        guest: GuestArgs,
    }

    fn cells(suite: &Suite, flags: &[&str]) -> Vec<Cell> {
        let line = Line::parse_from(["t", "--guest=threads"].iter().chain(flags));
        let base = Base::parse_from(["t", "--ram=64M"]).guest;
        suite.cells(&base, &line.matrix).unwrap()
    }

    #[test]
    fn every_row_has_a_figure_a_column_and_a_cell_that_is_found_again() {
        for suite in SUITES {
            let cells = cells(suite, &["--with=accel-path=dsa-model:"]);
            let rows: Vec<Row> = cells.iter().map(|cell| cell.row().unwrap()).collect();
            let mut found = 0;
            for (block, row) in suite.rows() {
                assert_eq!(row.2.len(), suite.columns.len(), "{} {}", suite.name, row.0);
                let cells = rows.iter().filter(|one| is_of(block, row, one)).count();
                // Only what demands hardware may have none.
                let demands = block.options.contains(&("accelerator", "required"));
                assert!(
                    cells == 1 || demands && cells == 0,
                    "{}: {} {}: {cells}",
                    suite.name,
                    block.title,
                    row.0
                );
                found += cells;
            }
            assert_eq!(found, rows.len(), "{}", suite.name);
        }
    }

    #[test]
    fn runs_of_different_work_have_tables_of_their_own() {
        let cells = cells(&dsa::SUITE, &[]);
        let run = |series: &str, change: fn(&mut Record)| -> Vec<Record> {
            let of = |cell: &Cell| {
                let mut record = super::super::record::tests::example();
                record.suite = "dsa".to_owned();
                record.series = series.to_owned();
                record.row = cell.row().unwrap();
                change(&mut record);
                record
            };
            cells.iter().map(of).collect()
        };
        let first = run("1", |_| ());
        for (tables, change) in [
            (1, (|_| ()) as fn(&mut Record)),
            (2, |run| run.row.guest.ram_bytes *= 2),
            (2, |run| run.row.guest.fill = "/data".to_owned()),
            (2, |run| run.row.guest.kind = "kvm".to_owned()),
            (2, |run| run.row.guest.vcpus = 2),
            (2, |run| run.row.link = Some("1gbit".to_owned())),
            (2, |run| run.machine.cpu = "another".to_owned()),
        ] {
            let all = [first.clone(), run("2", change)].concat();
            let split = split(&all);
            assert_eq!(split.len(), tables);
            assert_eq!(split.concat().len(), all.len());
        }
    }

    #[test]
    fn what_the_rows_of_a_suite_set_is_not_for_with() {
        for (flag, refused) in [
            ("--with=multifd-channels=4", true),
            ("--with=zero-page-detection=none", true),
            ("--with=multifd-compression=zstd", true),
            ("--with=mem-prealloc=on", false),
            ("--with=accel-path=dsa-model:", false),
        ] {
            let line = Line::parse_from(["t", "--guest=threads", flag]);
            let base = Base::parse_from(["t", "--ram=64M"]).guest;
            let cells = dsa::SUITE.cells(&base, &line.matrix);
            assert_eq!(cells.is_err(), refused, "{flag}");
        }
    }

    #[test]
    fn rows_that_were_not_run_are_counted_unless_all_need_a_device() {
        let run = |cell: &Cell| {
            let mut record = super::super::record::tests::example();
            record.row = cell.row().unwrap();
            record
        };
        let runs: Vec<Record> = cells(&iaa::SUITE, &[]).iter().map(run).collect();
        let said = |runs: &[Record]| iaa::SUITE.differences(runs).join("\n");
        let one = said(&runs[..1]);
        assert!(one.contains("rows were not run") && !one.contains("need an accelerator"));
    }

    #[test]
    fn a_suite_without_runs_shows_what_was_published() {
        for suite in SUITES {
            let text = suite.sheet(&[]).to_string();
            for (block, row) in suite.rows() {
                assert!(text.contains(row.0) && text.contains(block.title), "{text}");
            }
        }
        assert!(find("das").unwrap_err().contains("dsa, multithread"));
    }
}
