//! The published tables with Hotlift's figures next to each row, and Hotlift's own tables.
//!
//! | file | subject |
//! |---|---|
//! | `../../suites/*.toml` | the tables |
//! | `load` | reads and checks the tables |
//! | `columns` | our figures with the published definitions |
//! | `comparison` | a table with our figures next to it |
//! | `threads`, `counts` | the tables by thread of two suites |
//! | `sweep` | rows that are every combination of some lists |
//! | `added_by_tls` | the cost of rows with TLS over the same rows without |

mod added_by_tls;
mod columns;
mod comparison;
mod counts;
mod load;
mod sweep;
#[cfg(test)]
mod tests;
mod threads;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use hotlift::options::{OptionError, option, parse_size};
use hotlift_command::args::GuestArgs;
use hotlift_command::migration_args::MigrationArgs;

use super::cell::{Cell, with_method};
use super::machine;
use super::matrix::{MatrixArgs, add_new};
use super::record::{Engine, Record, Row};
use super::warn;
use crate::error::BenchError;
pub use load::Suite;
use load::{Block, DEVICES, Published};

/// The tables, in the order of `--suite all`.
const FILES: [&str; 7] = [
    include_str!("../../suites/dsa.toml"),
    include_str!("../../suites/multithread.toml"),
    include_str!("../../suites/iaa.toml"),
    include_str!("../../suites/qat.toml"),
    include_str!("../../suites/legacy-rework.toml"),
    include_str!("../../suites/tls.toml"),
    include_str!("../../suites/auto.toml"),
];

static SUITES: LazyLock<[Suite; 7]> = LazyLock::new(|| {
    FILES.map(|text| Suite::read(text).expect("it is compiled in, and a test reads it"))
});

/// The suites that a value of `--suite` selects.
#[derive(Debug, Clone)]
pub struct Choice(pub Vec<&'static Suite>);

/// Returns the suite `name`. For "all", returns every suite that does not require its name.
///
/// # Errors
/// If there is no such suite. The error lists the names.
pub fn choose(name: &str) -> Result<Choice, String> {
    match name {
        "all" => Ok(Choice(
            SUITES.iter().filter(|suite| !suite.by_name_alone).collect(),
        )),
        name => find(name)
            .map(|suite| Choice(vec![suite]))
            .map_err(|error| format!("{error}, all")),
    }
}

/// Returns the suite `name`.
///
/// # Errors
/// If there is no such suite. The error lists the names.
pub fn find(name: &str) -> Result<&'static Suite, String> {
    let found = SUITES.iter().find(|suite| suite.name == name);
    found.ok_or_else(|| {
        let names: Vec<_> = SUITES.iter().map(|suite| suite.name.as_str()).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// Splits records into groups that one table can show: by suite, machine and work. Groups are in the order of their
/// first record.
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

/// Settings that one call of the bench applies to all rows. Settings of the published rows are excluded.
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
            // The labels of a matrix already show the differences.
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

/// Maximum RAM of a suite's guest in bytes, for each core of this machine; `--ram` overrides it. The published hosts
/// had dozens of cores, and some thirty rows must complete in less than a day.
const RAM_PER_CORE: u64 = 1 << 30;

impl Suite {
    /// Returns the RAM of the suite's guests on this machine, in bytes. Free memory is not checked yet.
    pub fn ram(&self) -> u64 {
        let cores = u64::try_from(machine::cores()).unwrap_or(u64::MAX);
        (self.ram_gib << 30).min(RAM_PER_CORE.saturating_mul(cores))
    }

    /// Returns a cell for every row that this host can try. `base` supplies the guest settings that rows do not define.
    ///
    /// # Errors
    /// If a row sets an option of `--with` itself, if such an option has no effect in a row, or if options conflict.
    pub fn cells(&self, base: &GuestArgs, matrix: &MatrixArgs) -> Result<Vec<Cell>, BenchError> {
        if let Some(option) = matrix.with_names().find(|name| self.sets(name)) {
            return Err(self.sets_itself(&format!("--with {option}"), option));
        }
        let mut cells = Vec::new();
        let mut skipped: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
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
                    skipped.entry(why).or_default().insert(block.title.clone());
                    continue;
                }
            };
            let kind = guest.kind();
            // Only rows that use devices get the devices of `--with`.
            for migration in matrix.with_each(vec![migration], &["accel-path"])? {
                let cell = Cell {
                    engine: Engine::Hotlift,
                    kind,
                    guest: guest.clone(),
                    migration,
                    link: None,
                    neighbour: None,
                };
                add_new(&mut cells, cell)?;
            }
        }
        for sweep in &self.sweeps {
            let (all, missing) = sweep.cells(base, matrix)?;
            cells.extend(all);
            for (what, why) in missing {
                skipped.entry(why).or_default().insert(what);
            }
        }
        for (why, titles) in skipped {
            let titles: Vec<_> = titles.into_iter().collect();
            warn(format!("not run: {}: {why}", titles.join("; ")));
        }
        Ok(cells)
    }

    /// Returns the error for `flag`, whose `option` is set by the rows of the suite.
    pub fn sets_itself(&self, flag: &str, option: &'static str) -> BenchError {
        BenchError::SuiteSets {
            suite: self.name.clone(),
            option,
            flag: flag.to_owned(),
        }
    }

    /// Returns true if rows of the suite set this option. The value [`DEVICES`] does not count: it is a placeholder for
    /// the devices of this host or of `--with`.
    fn sets(&self, name: &str) -> bool {
        let is = |(set, value): (&str, &str)| {
            value != DEVICES && option(set).is_ok_and(|info| info.name == name)
        };
        ["multifd-compression", "compress"].contains(&name)
            || self
                .rows()
                .any(|(block, row)| block.options_of(row).any(is))
            || self.sweeps.iter().any(|sweep| sweep.options().any(is))
    }
}

/// Returns the options of a row; `None` if the row uses devices and this host has none.
///
/// # Errors
/// If the options require an accelerator that this host lacks.
fn own_options(
    block: &Block,
    row: &Published,
    matrix: &MatrixArgs,
) -> Result<Option<MigrationArgs>, OptionError> {
    let mut migration = MigrationArgs::default();
    for (name, value) in block.options_of(row) {
        migration = match value {
            DEVICES => match matrix.given(name).map_or_else(devices, str::to_owned) {
                none if none.is_empty() => return Ok(None),
                devices => migration.with(name, &devices)?,
            },
            value => migration.with(name, value)?,
        };
    }
    with_method(&migration, &block.method, None).map(Some)
}

/// Returns the DSA work queues of this host, in the format of `accel-path`; empty without work queues.
fn devices() -> String {
    let queues = std::fs::read_dir("/dev/dsa")
        .into_iter()
        .flatten()
        .flatten();
    let mut paths: Vec<String> = queues
        .map(|queue| format!("dsa:{}", queue.path().display()))
        .collect();
    paths.sort();
    paths.join(" ")
}

/// Returns true if `row` ran with the settings of the row `published` in `block`.
fn is_of(block: &Block, published: &Published, row: &Row) -> bool {
    let guest = &row.guest;
    row.method == block.method
        && guest.workload == block.workload.name()
        && has_zero_share(row, block.zero_share)
        && block
            .options_of(published)
            .all(|(name, value)| has(row, name, value))
}

/// Returns true if `row` was run with this share of zero pages.
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

/// Returns true if a device of this row was the simulated device (software model).
fn is_simulated(row: &Row) -> bool {
    row.options
        .get("accel-path")
        .is_some_and(|paths| paths.contains("dsa-model"))
}
