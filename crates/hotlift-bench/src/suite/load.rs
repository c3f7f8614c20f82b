//! Reads and checks a suite: a table of runs in `suites/*.toml`, mostly a published one.
//!
//! A table has blocks of rows. The rows of a block share most settings. Each row has the migration options of its
//! measurement, and the published figures, one for each column.

use std::collections::BTreeMap;

use hotlift::Options;
use hotlift::options::{OptionError, option};
use hotlift_vmm::workload::Workload;
use serde::Deserialize;

use super::columns::Column;
use super::sweep::{self, Sweep};
use crate::cell::with_method;
use hotlift_command::migration_args::MigrationArgs;

/// Placeholder value of an option. It is replaced by the accelerators of this host, or those that `--with` names.
pub const DEVICES: &str = "devices";

/// A suite: a table of runs, published or Hotlift's own.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Suite {
    /// Name of the suite, as typed on the command line.
    pub name: String,
    /// Author, place and date of the publication. For Hotlift's own tables, the subject.
    pub source: String,
    /// Machine of the published measurement; `None` for Hotlift's own tables.
    #[serde(default)]
    pub machine: Option<String>,
    /// Differences of Hotlift's runs from the published measurement, apart from machine and guest size.
    pub differs: Vec<String>,
    /// RAM of the published guest, in GiB.
    pub ram_gib: u64,
    /// Figures shown for each run.
    pub columns: Vec<Column>,
    /// Blocks of rows of the table.
    #[serde(default, rename = "block")]
    pub blocks: Vec<Block>,
    /// Sweeps: rows for every combination of listed settings. A suite has either sweeps or blocks.
    #[serde(default, rename = "sweep")]
    pub sweeps: Vec<Sweep>,
    /// True if `--suite all` omits the suite, because its runs take hours.
    #[serde(default)]
    pub by_name_alone: bool,
    /// Published CPU time of each thread, in separate tables.
    #[serde(default)]
    pub threads: Vec<ThreadTable>,
    /// Kinds of threads for which the kernel's counts are shown.
    #[serde(default)]
    pub kinds: Vec<Kind>,
}

/// Rows that share most of their settings.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Block {
    /// Prefix of the name of each row.
    pub title: String,
    /// Page compression method; "compress" for compression threads on the main channel.
    pub method: String,
    /// Options of all rows.
    pub options: BTreeMap<String, String>,
    /// The guest's write pattern; idle by default.
    #[serde(default = "sweep::idle", deserialize_with = "sweep::workload")]
    pub workload: Workload,
    /// Share of pages that stay zero, 0 to 1.
    pub zero_share: f64,
    /// True if the zero pages are written once.
    #[serde(default)]
    pub zero_touched: bool,
    /// The rows.
    pub rows: Vec<Published>,
}

/// A row of a block.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Name that distinguishes the row from others of its block.
    pub name: String,
    /// Options of this row, which override those of its block.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
    /// A published figure for each column, NaN where none was published; empty if the row has no published figures.
    #[serde(default)]
    pub published: Vec<f64>,
}

/// Table of the published CPU time of each thread, for one share of zero pages.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ThreadTable {
    /// Caption of the table.
    pub title: String,
    /// Share of zero pages in the guest's RAM, 0 to 1.
    pub zero_share: f64,
    /// The threads.
    pub rows: Vec<ThreadRow>,
}

/// Published CPU time of a thread, in ms.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ThreadRow {
    /// Name of the thread in QEMU.
    pub name: String,
    /// CPU time when the CPU detects zero pages; `None` if not published.
    pub cpu: Option<f64>,
    /// CPU time when a DSA device detects zero pages; `None` if not published.
    pub dsa: Option<f64>,
}

/// A kind of thread. Tables show the sum of the counts of all threads of one kind.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kind {
    /// Work of the threads of this kind, as shown in the table.
    pub name: String,
    /// Side of the migration on which the threads of this kind run.
    pub side: Side,
    /// Prefixes of the thread names of this kind, in Hotlift and in QEMU.
    pub begins: Vec<String>,
}

/// A side of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The side that the guest leaves.
    Source,
    /// The side that the guest moves to.
    Destination,
}

/// An error in the file of a suite.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// The file is not TOML, or has an unknown structure.
    #[error("not the format of a suite")]
    Format(#[from] toml::de::Error),
    /// The number of published figures in a row differs from the number of columns.
    #[error("{row}: {figures} figures for {columns} columns")]
    Figures {
        /// Block and row.
        row: String,
        /// Number of published figures.
        figures: usize,
        /// Number of columns.
        columns: usize,
    },
    /// A share of zero pages is not between 0 and 1.
    #[error("{title}: zero-share is not 0 to 1")]
    ZeroShare {
        /// Title of the block.
        title: String,
    },
    /// A row has an invalid option.
    #[error("{row}")]
    Option {
        /// Block and row.
        row: String,
        /// The error of the option.
        #[source]
        source: OptionError,
    },
}

impl Suite {
    /// Parses the suite in `text`.
    ///
    /// # Errors
    /// If the text is invalid. The error names the row.
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

    /// Returns every row with its block.
    pub fn rows(&self) -> impl Iterator<Item = (&Block, &Published)> {
        let blocks = self.blocks.iter();
        blocks.flat_map(|block| block.rows.iter().map(move |row| (block, row)))
    }
}

impl Block {
    /// Returns the options of a row by name and value. Options of the row itself come last, and override those of its
    /// block.
    pub fn options_of<'a>(
        &'a self,
        row: &'a Published,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        let all = self.options.iter().chain(&row.options);
        all.map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// Checks each option separately, so that a table is valid even if this host lacks the accelerators.
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

    /// Returns a suite with one row, in which `other` replaces the line `line`.
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
        for (line, other, expected) in [
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
            assert!(error.contains(expected), "{other}: {error}");
        }
    }
}
