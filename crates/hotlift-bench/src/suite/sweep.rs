//! Sweeps: rows that are every combination of listed guests, links and methods.

use std::collections::BTreeMap;
use std::time::Duration;

use hotlift::Options;
use hotlift::options::{OptionError, parse_size};
use hotlift_command::args::{Fill, GuestArgs};
use hotlift_command::migration_args::MigrationArgs;
use hotlift_vmm::workload::Workload;
use serde::{Deserialize, Deserializer, de};

use crate::cell::{Cell, with_method};
use crate::error::BenchError;
use crate::link::Link;
use crate::matrix::{MatrixArgs, add_new, each};
use crate::record::Engine;

/// A list of values for each setting. Every combination is a row.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Sweep {
    /// Subject of the sweep, shown as its title.
    pub title: String,
    /// Contents of RAM to run with.
    fills: Vec<Content>,
    /// Sizes of RAM, in bytes.
    #[serde(deserialize_with = "sizes")]
    ram: Vec<u64>,
    /// The guest's write pattern; idle by default.
    #[serde(default = "idle", deserialize_with = "workload")]
    workload: Workload,
    /// Rates at which the guest writes, in pages per second.
    #[serde(default)]
    rates: Vec<u64>,
    /// Size of the working set, in bytes; `None` for the default.
    #[serde(default, deserialize_with = "maybe_size")]
    working_set: Option<u64>,
    /// Link limits, in the format of `--link`.
    #[serde(deserialize_with = "links")]
    links: Vec<Link>,
    /// Time after the request to migrate at which a busy thread occupies a core; `None` without a busy thread.
    #[serde(default, deserialize_with = "maybe_time")]
    neighbour: Option<Duration>,
    /// Page compression methods, each with a level; `None` is the default level.
    #[serde(deserialize_with = "methods")]
    methods: Vec<(String, Option<u8>)>,
    /// Options of all rows.
    options: BTreeMap<String, String>,
}

/// Combinations that this host cannot run, each with the reason.
pub type SkippedCombinations = Vec<(String, String)>;

/// Content of RAM: the source of the bytes, and the share of zero pages.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Content {
    from: From,
    /// Share of pages that stay zero, 0 to 1; `None` for a memory image, which has its own zero pages.
    zero_share: Option<f64>,
}

/// Source of the bytes in RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum From {
    /// The first value of `--fill`.
    Given,
    /// Text and random bytes alternate.
    Mixed,
    /// The first value of `--fill` that is a memory image.
    Image,
}

impl Sweep {
    /// Checks the options and methods of the sweep.
    ///
    /// # Errors
    /// If an option or a method is invalid.
    pub fn check(&self) -> Result<(), OptionError> {
        let mut options = Options::default();
        for (name, value) in self.options() {
            options.set(name, value)?;
        }
        for (method, level) in &self.methods {
            with_method(&MigrationArgs::default(), method, *level)?;
        }
        Ok(())
    }

    /// Returns the options that all rows share, by name and value.
    pub fn options(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.options.iter();
        all.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Returns a cell for every combination that this host can run, and the skipped combinations with reasons. `base`
    /// supplies the guest settings that the sweep does not list.
    ///
    /// # Errors
    /// If options conflict, or an option of `--with` has no effect in any combination.
    pub fn cells(
        &self,
        base: &GuestArgs,
        matrix: &MatrixArgs,
    ) -> Result<(Vec<Cell>, SkippedCombinations), BenchError> {
        let mut skipped = SkippedCombinations::new();
        let mut migrations = Vec::new();
        for (method, level) in &self.methods {
            let with = |all: MigrationArgs, (name, value)| all.with(name, value);
            let common = self.options().try_fold(MigrationArgs::default(), with)?;
            match with_method(&common, method, *level) {
                Ok(migration) => migrations.push(migration),
                Err(why) => skipped.push((format!("method {method}"), why.to_string())),
            }
        }
        let mut cells = Vec::new();
        for guest in self.guests(base, matrix, &mut skipped) {
            let kind = guest.kind();
            for link in &self.links {
                for migration in matrix.with_each(migrations.clone(), &["accel-path"])? {
                    let cell = Cell {
                        engine: Engine::Hotlift,
                        kind,
                        guest: guest.clone(),
                        migration,
                        link: Some(link.clone()),
                        neighbour: self.neighbour,
                    };
                    add_new(&mut cells, cell)?;
                }
            }
        }
        Ok((cells, skipped))
    }

    fn guests(
        &self,
        base: &GuestArgs,
        matrix: &MatrixArgs,
        skipped: &mut SkippedCombinations,
    ) -> Vec<GuestArgs> {
        let mut guests = Vec::new();
        for content in &self.fills {
            let fill = match content.from {
                From::Given => Some(matrix.fill()),
                From::Mixed => Some(Fill::Mixed),
                From::Image => matrix.image(),
            };
            match fill {
                Some(fill) => guests.push(GuestArgs {
                    guest: matrix.guest(),
                    fill,
                    zero_share: content.zero_share,
                    workload: self.workload,
                    working_set: self.working_set.or(base.working_set),
                    ..base.clone()
                }),
                None => skipped.push((
                    format!("{}, a memory image", self.title),
                    "no value of --fill is one: scripts/linux-guest-ram makes one".to_owned(),
                )),
            }
        }
        guests = each(&guests, &self.ram, |guest, ram| guest.ram = *ram);
        match self.rates.as_slice() {
            [] => guests,
            rates => each(&guests, rates, |guest, rate| guest.rate = *rate),
        }
    }
}

pub fn idle() -> Workload {
    Workload::Idle
}

pub fn workload<'de, D: Deserializer<'de>>(text: D) -> Result<Workload, D::Error> {
    String::deserialize(text)?
        .parse()
        .map_err(de::Error::custom)
}

/// Parses a size in bytes, with suffix: "512M".
fn size<E: de::Error>(text: &str) -> Result<u64, E> {
    parse_size(text).ok_or_else(|| de::Error::custom(format!("{text:?} is no size")))
}

fn sizes<'de, D: Deserializer<'de>>(text: D) -> Result<Vec<u64>, D::Error> {
    let texts = Vec::<String>::deserialize(text)?;
    texts.iter().map(|text| size(text)).collect()
}

fn maybe_size<'de, D: Deserializer<'de>>(text: D) -> Result<Option<u64>, D::Error> {
    size(&String::deserialize(text)?).map(Some)
}

fn maybe_time<'de, D: Deserializer<'de>>(text: D) -> Result<Option<Duration>, D::Error> {
    let time = humantime::parse_duration(&String::deserialize(text)?);
    time.map(Some).map_err(de::Error::custom)
}

fn links<'de, D: Deserializer<'de>>(text: D) -> Result<Vec<Link>, D::Error> {
    let texts = Vec::<String>::deserialize(text)?;
    let link = |text: &String| {
        text.parse()
            .map_err(|error| de::Error::custom(format!("{text:?}: {error}")))
    };
    texts.iter().map(link).collect()
}

/// Parses a list of methods with optional levels, such as "none", "zstd 3".
fn methods<'de, D: Deserializer<'de>>(text: D) -> Result<Vec<(String, Option<u8>)>, D::Error> {
    let method = |text: String| match text.split_once(' ') {
        None => Ok((text, None)),
        Some((name, level)) => {
            let level = level.parse().map_err(de::Error::custom)?;
            Ok((name.to_owned(), Some(level)))
        }
    };
    Vec::<String>::deserialize(text)?
        .into_iter()
        .map(method)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::{find, tests::cells};
    use super::*;

    #[test]
    fn every_combination_is_a_cell_unless_this_machine_lacks_the_method() {
        let suite = find("auto").unwrap();
        let image = tempfile::NamedTempFile::new().unwrap();
        let path = format!("--fill=generated,{}", image.path().display());
        let (without, with) = (cells(suite, &[]), cells(suite, &[&path]));
        let of_image = |cell: &&Cell| cell.guest.fill.is_file();
        assert_eq!(without.iter().filter(of_image).count(), 0);
        assert!(with.iter().filter(of_image).count() > 10);
        assert_eq!(
            with.len() - without.len(),
            with.iter().filter(of_image).count()
        );
        // Every combination of guest and link occurs with each method.
        let rows: Vec<_> = with.iter().map(|cell| cell.row().unwrap()).collect();
        let beside = rows.iter().filter(|row| row.is_comparable(&rows[0]));
        let methods: Vec<_> = beside.map(crate::record::Row::method_and_level).collect();
        assert!(
            methods.contains(&"zstd 3".to_owned()) && methods.len() >= 5,
            "{methods:?}"
        );
        assert_eq!(rows.len() % methods.len(), 0);
    }

    #[test]
    fn a_wrong_value_is_refused() {
        let good = r#"
title = "a sweep"
fills = [{ from = "mixed", zero-share = 0.0 }]
ram = ["512M"]
links = ["1gbit,200mbit@1s"]
neighbour = "2s"
methods = ["none", "zstd 3", "auto"]
options = { multifd-channels = "2" }
"#;
        let read = |text: &str| {
            let sweep: Sweep = toml::from_str(text).map_err(|error| error.to_string())?;
            sweep.check().map_err(|error| error.to_string())
        };
        assert_eq!(read(good), Ok(()));
        for (value, other) in [
            ("512M", "512X"),
            ("@1s", "@soon"),
            ("\"2s\"", "\"2\""),
            ("zstd 3", "zstd three"),
            ("zstd 3", "zstd 99"),
            ("zstd 3", "zsdt"),
            ("mixed", "mixt"),
            ("multifd-channels", "multifd-chanels"),
        ] {
            assert!(
                good.contains(value) && read(&good.replace(value, other)).is_err(),
                "{other}"
            );
        }
    }
}
