//! The matrix: every combination of the listed values of each axis.

use clap::Args;
use hotlift::options::{OptionError, Role, option};
use hotlift_command::args::{Fill, GuestArgs, GuestChoice, share};
use hotlift_command::migration_args::{Given, MigrationArgs};
use hotlift_vmm::GuestKind;
use hotlift_vmm::workload::Workload;

use super::cell::{Cell, with_method};
use super::record::Engine;
use crate::error::BenchError;

/// Flags of the matrix. Each takes a list with commas; every combination is run.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Matrix (lists with commas)")]
pub struct MatrixArgs {
    /// Page compression methods; "compress" is QEMU's old capability, which compresses on the main channel
    #[arg(
        long = "method",
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "none,zlib,zstd,lz4"
    )]
    methods: Vec<String>,
    /// Levels, for methods with levels [default: the default level of each method]
    #[arg(long = "level", value_name = "LEVELS", value_delimiter = ',')]
    levels: Vec<u8>,
    /// Numbers of multifd channels
    #[arg(long = "channels", value_name = "NUMBERS", value_delimiter = ',', default_value = "2",
          value_parser = clap::value_parser!(u8).range(1..))]
    channels: Vec<u8>,
    /// Modes of zero page detection
    #[arg(
        long = "zero-page-detection",
        value_name = "MODES",
        value_delimiter = ',',
        default_value = "multifd"
    )]
    zero_pages: Vec<String>,
    /// Bandwidth limits in bytes/s, with suffix K, M or G; 0 is unlimited
    #[arg(
        long = "max-bandwidth",
        value_name = "RATES",
        value_delimiter = ',',
        default_value = "0"
    )]
    bandwidths: Vec<String>,
    /// Kinds of guests
    #[arg(
        long = "guest",
        value_enum,
        value_name = "KINDS",
        value_delimiter = ',',
        default_value = "auto"
    )]
    guests: Vec<GuestChoice>,
    /// Write pattern of the guest: idle, random, sequential or hotset
    #[arg(
        long = "workload",
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "idle"
    )]
    workloads: Vec<Workload>,
    /// Folders or memory images to fill RAM with; "generated" is a mix like that of a server, "mixed" alternates text and
    /// random bytes
    #[arg(
        long = "fill",
        value_name = "PATHS",
        value_delimiter = ',',
        default_value = "generated"
    )]
    fills: Vec<Fill>,
    /// Shares of zero pages, 0 to 1 [default: 0.25; of an image, the share that it has]
    #[arg(
        long = "zero-share",
        value_name = "SHARES",
        value_delimiter = ',',
        value_parser = share
    )]
    zero_shares: Vec<f64>,
    /// Any other option of a migration with its values, as in --with mem-prealloc=off,on; repeatable
    #[arg(long = "with", value_name = "NAME=VALUES", value_parser = axis)]
    with: Vec<Axis>,
}

/// An option of a migration, and the values to run.
#[derive(Debug, Clone)]
struct Axis {
    name: &'static str,
    values: Vec<Given>,
}

fn axis(text: &str) -> Result<Axis, String> {
    let (name, values) = text
        .split_once('=')
        .ok_or_else(|| "expected NAME=VALUES".to_owned())?;
    let info = option(name).map_err(|error| error.to_string())?;
    if let Some(instead) = info.refusal(Role::Pair) {
        return Err(format!("it is not for a benchmark: {instead}"));
    }
    let values = values.split(',').map(|value| Given::parse(name, value));
    let values = values.collect::<Result<_, _>>();
    let values = values.map_err(|error| error.to_string())?;
    Ok(Axis {
        name: info.name,
        values,
    })
}

impl MatrixArgs {
    /// Returns a cell for every combination, each once. `base` supplies the guest settings that the matrix does not list.
    ///
    /// # Errors
    /// If a value is out of range, or options conflict.
    pub fn cells(&self, base: &GuestArgs) -> Result<Vec<Cell>, BenchError> {
        let mut cells: Vec<Cell> = Vec::new();
        let migrations = self.migrations()?;
        for guest in self.guests(base) {
            let kind = guest.kind();
            for migration in &migrations {
                let cell = Cell {
                    engine: Engine::Hotlift,
                    kind,
                    guest: guest.clone(),
                    migration: migration.clone(),
                    link: None,
                    neighbour: None,
                };
                add_new(&mut cells, cell)?;
            }
        }
        Ok(cells)
    }

    /// Returns each of `migrations` with every combination of `--with`, except the options named in `but`. Removes
    /// options that have no effect: some methods use no levels, channels or devices.
    ///
    /// # Errors
    /// If options conflict, or an option of `--with` has no effect in any of the results.
    pub fn with_each(
        &self,
        mut migrations: Vec<MigrationArgs>,
        but: &[&str],
    ) -> Result<Vec<MigrationArgs>, OptionError> {
        for axis in self.with.iter().filter(|axis| !but.contains(&axis.name)) {
            migrations = each(&migrations, &axis.values, |migration, value| {
                migration.set(value.clone());
            });
        }
        let effective: Vec<_> = migrations
            .iter()
            .map(MigrationArgs::without_ineffective)
            .collect::<Result<_, _>>()?;
        for axis in self.with.iter().filter(|axis| !but.contains(&axis.name)) {
            if effective.iter().all(|migration| !migration.has(axis.name)) {
                let mut all = migrations.iter();
                all.try_for_each(|migration| migration.reject_if_ineffective(axis.name))?;
            }
        }
        Ok(effective)
    }

    /// Returns the first value that `--with` gives for option `name`; `None` if `--with` does not name the option.
    pub fn given(&self, name: &str) -> Option<&str> {
        let axis = self.with.iter().find(|axis| axis.name == name)?;
        axis.values.first().map(|given| given.text.as_str())
    }

    /// Returns the names of the options of `--with`.
    pub fn with_names(&self) -> impl Iterator<Item = &'static str> {
        self.with.iter().map(|axis| axis.name)
    }

    /// Returns the first value of `--fill`, which suites use.
    pub fn fill(&self) -> Fill {
        self.fills.first().cloned().unwrap_or(Fill::Generated)
    }

    /// Returns the first value of `--fill` that is a memory image; `None` without an image.
    pub fn image(&self) -> Option<Fill> {
        self.fills.iter().find(|fill| fill.is_file()).cloned()
    }

    /// Returns the first value of `--guest`.
    pub fn guest(&self) -> GuestChoice {
        self.guests.first().copied().unwrap_or(GuestChoice::Auto)
    }

    fn guests(&self, base: &GuestArgs) -> Vec<GuestArgs> {
        let mut guests = vec![base.clone()];
        guests = each(&guests, &self.guests, |guest, choice| guest.guest = *choice);
        guests = each(&guests, &self.workloads, |guest, workload| {
            guest.workload = *workload;
        });
        guests = each(&guests, &self.fills, |guest, fill| {
            guest.fill = fill.clone();
        });
        match self.zero_shares.as_slice() {
            [] => guests,
            shares => each(&guests, shares, |guest, share| {
                guest.zero_share = Some(*share);
            }),
        }
    }

    fn migrations(&self) -> Result<Vec<MigrationArgs>, OptionError> {
        let mut levels: Vec<_> = self.levels.iter().copied().map(Some).collect();
        if levels.is_empty() {
            levels.push(None);
        }
        let mut migrations = Vec::new();
        for method in &self.methods {
            for level in &levels {
                migrations.push(with_method(&MigrationArgs::default(), method, *level)?);
            }
        }
        let channels: Vec<_> = self.channels.iter().map(u8::to_string).collect();
        let axes = [
            ("multifd-channels", &channels),
            ("zero-page-detection", &self.zero_pages),
            ("max-bandwidth", &self.bandwidths),
        ];
        for (name, values) in axes {
            let values = values.iter().map(|value| Given::parse(name, value));
            let values: Vec<_> = values.collect::<Result<_, _>>()?;
            migrations = each(&migrations, &values, |migration, value| {
                migration.set(value.clone());
            });
        }
        self.with_each(migrations, &[])
    }
}

/// Returns a copy of each of `bases` for each of `values`. `set` writes the value into the copy.
pub fn each<T: Clone, V>(bases: &[T], values: &[V], set: impl Fn(&mut T, &V)) -> Vec<T> {
    let mut all = Vec::new();
    for base in bases {
        for value in values {
            let mut one = base.clone();
            set(&mut one, value);
            all.push(one);
        }
    }
    all
}

/// Adds `cell` unless `cells` has a cell with an equal row. Equal rows occur because some methods use no levels or
/// channels.
///
/// # Errors
/// If options of the cell conflict.
pub fn add_new(cells: &mut Vec<Cell>, cell: Cell) -> Result<(), OptionError> {
    let row = cell.row()?;
    for known in cells.iter() {
        if known.row()? == row {
            return Ok(());
        }
    }
    cells.push(cell);
    Ok(())
}

/// Returns `cells` and the same cells for QEMU. With `relays`, also adds cells for QEMUs with two relays between them.
///
/// # Errors
/// If options conflict.
pub fn beside_qemu(cells: Vec<Cell>, relays: bool) -> Result<Vec<Cell>, OptionError> {
    let mut both = Vec::new();
    for cell in cells {
        let of_qemu = Cell {
            engine: Engine::Qemu,
            kind: match hotlift_vmm::best_kind() {
                (GuestKind::Kvm, _) => GuestKind::Kvm,
                (GuestKind::Threads, _) => GuestKind::Threads,
            },
            ..cell.clone()
        };
        let relayed = Cell {
            engine: Engine::Relay,
            ..of_qemu.clone()
        };
        add_new(&mut both, cell)?;
        // Two kinds of Hotlift's guest map to one kind of QEMU's guest.
        add_new(&mut both, of_qemu)?;
        if relays {
            add_new(&mut both, relayed)?;
        }
    }
    Ok(both)
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

    fn base() -> GuestArgs {
        #[derive(Parser)]
        struct Base {
            #[command(flatten)]
            guest: GuestArgs,
        }
        Base::parse_from(["t"]).guest
    }

    fn cells(flags: &[&str]) -> Vec<Cell> {
        let line = Line::parse_from(std::iter::once(&"t").chain(flags));
        line.matrix.cells(&base()).unwrap()
    }

    #[test]
    fn every_combination_is_one_cell() {
        let all = cells(&[
            "--guest=threads",
            "--method=none,zstd,compress",
            "--level=1,3",
            "--channels=2,4",
            "--max-bandwidth=0,125M",
            "--with=mem-prealloc=off,on",
        ]);
        // none: 2 channels; zstd: 2 levels x 2 channels; compress: 2 levels; each x 2 x 2.
        assert_eq!(all.len(), (2 + 4 + 2) * 4);
        let devices = cells(&[
            "--guest=threads",
            "--method=none",
            "--zero-page-detection=multifd,dsa-accel",
            "--with=accel-path=dsa-model:",
        ]);
        let with_devices = devices
            .iter()
            .filter(|cell| cell.migration.has("accel-path"));
        assert_eq!((devices.len(), with_devices.count()), (2, 1));
        let workloads = cells(&["--guest=threads", "--method=none", "--workload=idle,random"]);
        assert_eq!(workloads.len(), 2);
    }

    #[test]
    fn qemu_has_each_cell_once_whatever_guests_hotlift_has() {
        let ours = cells(&["--guest=threads,kvm", "--method=none,zstd"]);
        let number = |relays, engine| {
            let both = beside_qemu(ours.clone(), relays).unwrap();
            both.iter().filter(|cell| cell.engine == engine).count()
        };
        assert_eq!(number(false, Engine::Hotlift), 4);
        assert_eq!(
            [number(false, Engine::Qemu), number(false, Engine::Relay)],
            [2, 0]
        );
        assert_eq!(
            [number(true, Engine::Qemu), number(true, Engine::Relay)],
            [2, 2]
        );
    }

    #[test]
    fn an_axis_that_no_cell_uses_is_refused() {
        let flags = [
            "--guest=threads",
            "--method=none",
            "--with=compress-threads=2,4",
        ];
        let line = Line::parse_from(std::iter::once("t").chain(flags));
        let error = line.matrix.cells(&base()).unwrap_err().line();
        assert!(error.contains("needs compress=on"), "{error}");
    }

    #[test]
    fn an_axis_of_an_unknown_option_or_value_is_refused_by_name() {
        for bad in ["mem-prealoc=on", "mem-prealloc=perhaps", "mem-prealloc"] {
            let line = Line::try_parse_from(["t", "--with", bad]);
            assert!(line.is_err(), "{bad}");
        }
    }
}
