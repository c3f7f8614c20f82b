//! A table of runs, mostly a published one, as it stands in `suites/*.toml`, and what is checked when it is read.
//!
//! A table is blocks of rows that share most of their settings. Each row has the options that it was measured with, by
//! their names in a migration, and the figures that were published, one for each column.

use std::collections::BTreeMap;

use hotlift::Options;
use hotlift::options::{OptionError, option};
use hotlift_vmm::workload::Workload;
use serde::Deserialize;

use super::columns::Column;
use super::sweep::{self, Sweep};
use crate::cell::with_method;
use hotlift_command::migration_args::MigrationArgs;

/// As the value of an option: the accelerators of this host, or those that `--with` names.
pub const DEVICES: &str = "devices";

/// A published table.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Suite {
    /// As typed.
    pub name: String,
    /// Who published it, where and when; or what it shows.
    pub source: String,
    /// What it was measured on, if it was published.
    #[serde(default)]
    pub machine: Option<String>,
    /// What differs here, apart from machine and size.
    pub differs: Vec<String>,
    /// GiB of RAM of the published guest.
    pub ram_gib: u64,
    /// What is shown of each run.
    pub columns: Vec<Column>,
    /// The table.
    #[serde(default, rename = "block")]
    pub blocks: Vec<Block>,
    /// Or every combination of some lists.
    #[serde(default, rename = "sweep")]
    pub sweeps: Vec<Sweep>,
    /// Whether it is left out of `--suite all`, since it takes hours.
    #[serde(default)]
    pub by_name_alone: bool,
    /// Published CPU time of each thread, in tables of their own.
    #[serde(default)]
    pub threads: Vec<ThreadTable>,
    /// Kinds of threads whose counts by the kernel are shown.
    #[serde(default)]
    pub kinds: Vec<Kind>,
}

/// Rows that share most of their settings.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Block {
    /// Begins the name of each row.
    pub title: String,
    /// Page compression method, or "compress" for threads on the main channel.
    pub method: String,
    /// Options of all rows.
    pub options: BTreeMap<String, String>,
    /// Where the guest writes; nowhere if nothing is said.
    #[serde(default = "sweep::idle", deserialize_with = "sweep::workload")]
    pub workload: Workload,
    /// Share of pages that stay zero, 0 to 1.
    pub zero_share: f64,
    /// Whether the zero pages are written once.
    #[serde(default)]
    pub zero_touched: bool,
    /// The rows.
    pub rows: Vec<Published>,
}

/// A row.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// What tells it from the others of its block.
    pub name: String,
    /// Options of its own.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
    /// A figure for each column, NaN where none was published; empty if none was at all.
    #[serde(default)]
    pub published: Vec<f64>,
}

/// Published CPU time by thread, for one share of zero pages.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ThreadTable {
    /// Its caption.
    pub title: String,
    /// Share of zero pages of the runs that it is of.
    pub zero_share: f64,
    /// The threads.
    pub rows: Vec<ThreadRow>,
}

/// Published CPU time of a thread, in ms.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ThreadRow {
    /// As QEMU named it.
    pub name: String,
    /// Where the CPU looks for zero pages.
    pub cpu: Option<f64>,
    /// Where DSA does.
    pub dsa: Option<f64>,
}

/// Threads whose counts are added up.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kind {
    /// What they do.
    pub name: String,
    /// Where they run.
    pub side: Side,
    /// How their names begin, in Hotlift and in QEMU.
    pub begins: Vec<String>,
}

/// A side of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// Where the guest was.
    Source,
    /// Where it goes.
    Destination,
}

/// A file that is no suite.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// It is not TOML, or not this TOML.
    #[error("not the format of a suite")]
    Format(#[from] toml::de::Error),
    /// A row does not have a figure for each column.
    #[error("{row}: {figures} figures for {columns} columns")]
    Figures {
        /// Block and row.
        row: String,
        /// Published figures.
        figures: usize,
        /// Columns.
        columns: usize,
    },
    /// A share of zero pages is not one.
    #[error("{title}: zero-share is not 0 to 1")]
    ZeroShare {
        /// The block.
        title: String,
    },
    /// A row asks for what no migration has.
    #[error("{row}")]
    Option {
        /// Block and row.
        row: String,
        /// What.
        #[source]
        source: OptionError,
    },
}

impl Suite {
    /// The suite that `text` is.
    ///
    /// # Errors
    /// If it is none; with the row that is wrong.
    pub fn read(text: &str) -> Result<Self, SuiteError> {
        let suite: Self = toml::from_str(text)?;
        for sweep in &suite.sweeps {
            sweep.check().map_err(|source| SuiteError::Option {
                row: sweep.title.clone(),
                source,
            })?;
        }
        for (block, row) in suite.rows() {
            let name = || format!("{}, {}", block.title, row.name);
            let (figures, columns) = (row.published.len(), suite.columns.len());
            if figures != 0 && figures != columns {
                return Err(SuiteError::Figures {
                    row: name(),
                    figures,
                    columns,
                });
            }
            if !(0.0..=1.0).contains(&block.zero_share) {
                let title = block.title.clone();
                return Err(SuiteError::ZeroShare { title });
            }
            check_options(block, row).map_err(|source| SuiteError::Option {
                row: name(),
                source,
            })?;
        }
        Ok(suite)
    }

    /// Every row with its block.
    pub fn rows(&self) -> impl Iterator<Item = (&Block, &Published)> {
        let blocks = self.blocks.iter();
        blocks.flat_map(|block| block.rows.iter().map(move |row| (block, row)))
    }
}

impl Block {
    /// Options of one of its rows: name and value, the row's own last.
    pub fn options_of<'a>(
        &'a self,
        row: &'a Published,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        let all = self.options.iter().chain(&row.options);
        all.map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// Each option by itself: whether this host has the accelerators is not the table's matter.
fn check_options(block: &Block, row: &Published) -> Result<(), OptionError> {
    with_method(&MigrationArgs::default(), &block.method, None)?;
    let mut options = Options::default();
    for (name, value) in block.options_of(row) {
        match value {
            DEVICES => option(name).map(|_| ())?,
            value => options.set(name, value)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A suite with one row, of which one line is another.
    fn with(line: &str, other: &str) -> Result<Suite, SuiteError> {
        let text = r#"
name = "one"
source = "somebody"
machine = "something"
differs = []
ram-gib = 1
columns = ["total ms", "down ms"]
[[block]]
title = "a block"
method = "zstd"
options = { multifd-channels = "2" }
workload = "random"
zero-share = 0.1
rows = [{ name = "a row", options = { accel-path = "devices" }, published = [nan, 2] }]
"#;
        assert!(line.is_empty() || text.contains(line), "{line}");
        Suite::read(&text.replace(line, other))
    }

    #[test]
    fn a_wrong_row_is_refused_by_its_name() {
        let good = with("columns", "columns").unwrap();
        let (block, row) = good.rows().next().unwrap();
        assert_eq!(block.workload, Workload::Random);
        assert!(row.published[0].is_nan() && row.published[1] == 2.0);
        for (line, other, says) in [
            (
                "published = [nan, 2]",
                "published = [2]",
                "a row: 1 figures for 2",
            ),
            (
                "zero-share = 0.1",
                "zero-share = 1.5",
                "a block: zero-share",
            ),
            (
                "multifd-channels = \"2\"",
                "multifd-channels = \"0\"",
                "multifd-channels",
            ),
            (
                "multifd-channels = \"2\"",
                "multifd-chanels = \"2\"",
                "multifd-chanels",
            ),
            (
                "accel-path = \"devices\"",
                "accel-paths = \"devices\"",
                "accel-paths",
            ),
            ("method = \"zstd\"", "method = \"zsdt\"", "zsdt"),
            ("workload = \"random\"", "workload = \"randum\"", "randum"),
            ("\"down ms\"", "\"dawn ms\"", "dawn ms"),
            ("ram-gib = 1", "ram-gig = 1", "ram-gig"),
        ] {
            let error = with(line, other).expect_err(other);
            let error = hotlift_terminal::error::error_line(&error);
            assert!(error.contains(says), "{other}: {error}");
        }
    }
}
