//! The published tables, row by row, with our own figures beside theirs; and tables of our own.
//!
//! | file | subject |
//! |---|---|
//! | `../../suites/*.toml` | the tables |
//! | `load` | what stands in them, read and checked |
//! | `columns` | figures of ours with the definitions of theirs |
//! | `sheet` | a table with ours beside it |
//! | `threads`, `counts` | what two of them show of their threads |
//! | `sweep` | rows that are every combination of some lists |
//! | `added_by_tls` | what rows with TLS take more than the same without |

mod added_by_tls;
mod columns;
mod counts;
mod load;
mod sheet;
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

/// `--suite`.
#[derive(Debug, Clone)]
pub struct Choice(pub Vec<&'static Suite>);

/// The suite with this name, or all of them but those that are run by name alone.
///
/// # Errors
/// If there is none; with those that there are.
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

/// The suite with this name.
///
/// # Errors
/// If there is none; with those that there are.
pub fn find(name: &str) -> Result<&'static Suite, String> {
    let found = SUITES.iter().find(|suite| suite.name == name);
    found.ok_or_else(|| {
        let names: Vec<_> = SUITES.iter().map(|suite| suite.name.as_str()).collect();
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
            return Err(self.sets_itself(&format!("--with {option}"), option));
        }
        let mut cells = Vec::new();
        let mut left_out: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
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
                    left_out.entry(why).or_default().insert(block.title.clone());
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
                    neighbour: None,
                };
                add_new(&mut cells, cell)?;
            }
        }
        for sweep in &self.sweeps {
            let (all, missing) = sweep.cells(base, matrix)?;
            cells.extend(all);
            for (what, why) in missing {
                left_out.entry(why).or_default().insert(what);
            }
        }
        for (why, titles) in left_out {
            let titles: Vec<_> = titles.into_iter().collect();
            warn(format!("not run: {}: {why}", titles.join("; ")));
        }
        Ok(cells)
    }

    /// The error that `flag` is for `option`, which its rows set.
    pub fn sets_itself(&self, flag: &str, option: &'static str) -> BenchError {
        BenchError::SuiteSets {
            suite: self.name.clone(),
            option,
            flag: flag.to_owned(),
        }
    }

    /// Whether its rows set this option themselves. Whose devices they name is the host's.
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
    for (name, value) in block.options_of(row) {
        migration = match value {
            DEVICES => match matrix.given(name).map_or_else(devices, str::to_owned) {
                none if none.is_empty() => return Ok(None),
                devices => migration.with(name, &devices),
            },
            value => migration.with(name, value),
        };
    }
    with_method(&migration, &block.method, None).map(Some)
}

/// DSA's work queues of this host, as `accel-path` takes them; empty if there are none.
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

/// Whether `row` ran with the settings of this row.
fn is_of(block: &Block, published: &Published, row: &Row) -> bool {
    let guest = &row.guest;
    row.method == block.method
        && guest.workload == block.workload.name()
        && has_zero_share(row, block.zero_share)
        && block
            .options_of(published)
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
