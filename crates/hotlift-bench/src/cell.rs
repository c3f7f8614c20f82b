//! A cell of the matrix: one combination of settings to run.

use std::collections::BTreeMap;
use std::time::Duration;

use hotlift::options::OptionError;
use hotlift_command::args::GuestArgs;
use hotlift_command::held_memory::HeldMemory;
use hotlift_command::migration_args::MigrationArgs;
use hotlift_vmm::GuestKind;
use hotlift_vmm::workload::Workload;

use super::link::Link;
use super::record::{Engine, GuestRow, Row};

/// Memory that a guest process needs in addition to its RAM: program, buffers, a batch of pages for each channel.
const PROCESS_BYTES: u64 = 192 << 20;

/// Options for which a [`Row`] has a separate field.
const IN_THE_ROW: &[&str] = &[
    "multifd-compression",
    "compress",
    "multifd-zlib-level",
    "multifd-zstd-level",
    "multifd-qatzip-level",
    "compress-level",
    "multifd-channels",
    "zero-page-detection",
    "max-bandwidth",
];

/// One combination of settings: guest, migration options, link.
#[derive(Debug, Clone)]
pub struct Cell {
    /// Program that migrates the guest.
    pub engine: Engine,
    /// Kind of guest. For QEMU, the kind selects KVM or TCG.
    pub kind: GuestKind,
    /// The guest.
    pub guest: GuestArgs,
    /// Options of the migration.
    pub migration: MigrationArgs,
    /// Rate and delay of the network link; `None` without a limit.
    pub link: Option<Link>,
    /// Time after the request to migrate at which a busy thread occupies a core; `None` without a busy thread.
    pub neighbour: Option<Duration>,
}

impl Cell {
    /// Allocates as much memory as the destination will touch during the migration. `None` if the destination touches
    /// its memory before the migration, or is on another host.
    pub fn held_memory(&self, is_remote: bool) -> Option<HeldMemory> {
        if is_remote {
            return None;
        }
        HeldMemory::new(self.guest.ram, &self.migration.options().ok()?)
    }

    /// Returns the settings of this cell as a row of the records.
    ///
    /// # Errors
    /// If the options conflict.
    pub fn row(&self) -> Result<Row, OptionError> {
        let options = self.migration.options()?;
        let guest = self.guest.settings();
        let idle = guest.workload == Workload::Idle;
        let kind = match (self.engine, self.kind) {
            (Engine::Qemu | Engine::Relay, GuestKind::Threads) => "tcg",
            (_, kind) => kind.name(),
        };
        let fill = match self.guest.zero_share() >= Some(1.0) {
            true => "zero".to_owned(),
            false => self.guest.fill.to_string(),
        };
        let others = self.migration.given().iter();
        let others = others.filter(|given| !IN_THE_ROW.contains(&given.option.name));
        let others = others.map(|given| (given.option.name.to_owned(), given.text.clone()));
        Ok(Row {
            engine: self.engine,
            method: options.stream.method_name().to_owned(),
            level: options.stream.level(),
            channels: options.stream.channels(),
            zero_page_detection: options.zero_page_detection_name(),
            max_bandwidth: options.stream.max_bandwidth,
            link: self.link.as_ref().map(Link::text),
            neighbour: self
                .neighbour
                .map(|at| humantime::format_duration(at).to_string()),
            guest: GuestRow {
                kind: kind.to_owned(),
                vcpus: guest.vcpus,
                ram_bytes: guest.ram_bytes,
                fill,
                zero_share: self.guest.zero_share(),
                zero_touched: self.guest.zero_touched,
                workload: guest.workload.name().to_owned(),
                rate: if idle { 0 } else { guest.rate },
                working_set: guest.working_set.unwrap_or(guest.ram_bytes),
            },
            options: others.collect::<BTreeMap<_, _>>(),
        })
    }

    /// Returns the memory that a run needs on this host, in bytes.
    pub fn memory(&self, destination_is_here: bool) -> u64 {
        let ends = if destination_is_here { 2 } else { 1 };
        memory(self.guest.ram, ends)
    }
}

/// Returns the memory in bytes that `ends` guest processes need, each with `ram` bytes of RAM.
pub fn memory(ram: u64, ends: u64) -> u64 {
    ram.saturating_add(PROCESS_BYTES).saturating_mul(ends)
}

/// Sets the compression method and its level in `migration`. Method "compress" sets QEMU's capability `compress`
/// instead.
///
/// # Errors
/// If the method does not exist, or has no such level.
pub fn with_method(
    migration: &MigrationArgs,
    method: &str,
    level: Option<u8>,
) -> Result<MigrationArgs, OptionError> {
    let (option, value) = match method {
        "compress" => ("compress", "on"),
        _ => ("multifd-compression", method),
    };
    let mut chosen = migration.with(option, value)?;
    let level_option = chosen.options()?.stream.level_option();
    if let (Some(level), Some((name, _))) = (level, level_option) {
        chosen = chosen.with(name, &level.to_string())?;
    }
    chosen.options()?;
    Ok(chosen)
}

#[cfg(test)]
pub mod tests {
    use clap::Parser;

    use super::*;

    /// Returns a cell that tests can modify.
    pub fn example() -> Cell {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            guest: GuestArgs,
        }
        Cell {
            engine: Engine::Hotlift,
            kind: GuestKind::Threads,
            guest: Line::parse_from(["t"]).guest,
            migration: MigrationArgs::default(),
            link: None,
            neighbour: None,
        }
    }

    #[test]
    fn a_level_applies_only_to_a_method_with_levels() {
        let plain = MigrationArgs::default();
        let level = |method, level| {
            let args = with_method(&plain, method, level).unwrap();
            args.options().unwrap().stream.level()
        };
        assert_eq!(level("zstd", Some(7)), Some(7));
        assert_eq!(level("compress", Some(9)), Some(9));
        assert_eq!(level("none", Some(3)), None);
        assert!(with_method(&plain, "zlib", Some(10)).is_err());
        assert!(with_method(&plain, "lz5", None).is_err());
    }
}
