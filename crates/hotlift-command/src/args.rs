//! Flags that describe a built-in guest and the content of its memory.

use std::ffi::OsString;
use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use hotlift::options::parse_size;
use hotlift_mem::{Backing, FileError};
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::warn;
use hotlift_terminal::progress::bytes;
use hotlift_vmm::fill::{FillSettings, FillSource};
use hotlift_vmm::layout::{Layout, MAX_RAM, MAX_VCPUS, MIN_RAM};
use hotlift_vmm::workload::Workload;
use hotlift_vmm::{GuestKind, GuestSettings};

use crate::error::SharedError;

/// Default share of zero pages: between the shares of a busy guest and of a fresh one.
const ZERO_SHARE: f64 = 0.25;

/// Flags of the guest.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Guest")]
pub struct GuestArgs {
    /// Kind of guest: a KVM virtual machine, worker threads, or KVM where it can be used
    #[arg(long, value_enum, default_value = "auto")]
    pub guest: GuestChoice,
    /// Number of vCPUs, 1 to 8
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_VCPUS)))]
    pub vcpus: u8,
    /// Bytes of RAM, with suffix K, M or G
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = ram)]
    pub ram: u64,
    /// Kind of memory for the RAM: private anonymous memory, or a shared memfd
    #[arg(long, value_enum, default_value = "private", hide_short_help = true)]
    pub ram_backend: RamBackend,
    /// Write pattern of the guest: idle, random, sequential or hotset
    #[arg(long, value_name = "NAME", default_value = "random")]
    pub workload: Workload,
    /// Pages written per second by all vCPUs together
    #[arg(long, value_name = "PAGES/S", default_value_t = 20_000)]
    pub rate: u64,
    /// Size of the memory that the guest writes to, in bytes [default: an eighth of the RAM]
    #[arg(long, value_name = "SIZE", value_parser = size, hide_short_help = true)]
    pub working_set: Option<u64>,
    /// Content of RAM: a memory image, a folder whose files are read one after the other (.zst files are decompressed),
    /// "generated" (a mix like that of a server) or "mixed" (text and random bytes in turn)
    #[arg(long, value_name = "PATH", default_value = "generated")]
    pub fill: Fill,
    /// Share of zero pages, 0 to 1 [default: 0.25; of an image, its own share]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub zero_share: Option<f64>,
    /// Write the zero pages once, so that the host allocates them
    #[arg(long, hide_short_help = true)]
    pub zero_touched: bool,
    /// Seed of all random numbers
    #[arg(long, value_name = "N", default_value_t = 1, hide_short_help = true)]
    pub seed: u64,
}

/// Value of `--fill`: content of the guest's RAM at its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fill {
    /// "generated": [`FillSource::Generated`].
    Generated,
    /// "mixed": [`FillSource::Mixed`].
    Mixed,
    /// A folder, or a file. A file named like another value is given as `./NAME`.
    Path(PathBuf),
}

impl From<OsString> for Fill {
    fn from(text: OsString) -> Self {
        match text.to_str() {
            Some("generated") => Self::Generated,
            Some("mixed") => Self::Mixed,
            _ => Self::Path(text.into()),
        }
    }
}

/// Formats the value as it was typed.
impl Display for Fill {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Generated => f.write_str("generated"),
            Self::Mixed => f.write_str("mixed"),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

impl Fill {
    /// Returns true for a file. A file is copied page by page, unless `--zero-share` is given.
    #[must_use]
    pub fn is_file(&self) -> bool {
        matches!(self, Self::Path(path) if path.is_file())
    }

    /// Returns a description for the operator; `text` is the output of [`Display`].
    #[must_use]
    pub fn words(text: &str) -> &str {
        match text {
            "generated" => "a generated mix",
            "mixed" => "text and random bytes in turn",
            path => path,
        }
    }
}

/// `--guest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GuestChoice {
    /// KVM where it can be used, else threads
    Auto,
    /// A KVM virtual machine
    Kvm,
    /// Worker threads
    Threads,
}

/// `--ram-backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RamBackend {
    /// Private anonymous memory with transparent huge pages
    Private,
    /// A memfd that other processes can map
    Shared,
}

impl GuestArgs {
    /// Checks that RAM size, vCPUs and working set are compatible.
    ///
    /// # Errors
    /// [`SharedError::Layout`] if they are incompatible.
    pub fn check(&self) -> Result<(), SharedError> {
        let settings = self.settings();
        Layout::new(settings.ram_bytes, settings.vcpus, settings.working_set)?;
        Ok(())
    }

    /// Checks that the file or folder of `--fill` exists.
    ///
    /// # Errors
    /// If the file or folder cannot be inspected.
    pub fn check_fill(&self) -> Result<(), TerminalError> {
        let Fill::Path(path) = &self.fill else {
            return Ok(());
        };
        std::fs::metadata(path).map_err(FileError::of("inspect", path))?;
        Ok(())
    }

    /// Returns the kind of guest to create. With `auto`, prints a reason if KVM cannot be used.
    pub fn kind(&self) -> GuestKind {
        match self.guest {
            GuestChoice::Kvm => GuestKind::Kvm,
            GuestChoice::Threads => GuestKind::Threads,
            GuestChoice::Auto => {
                let (kind, why) = hotlift_vmm::best_kind();
                if let Some(why) = why {
                    let why = error_line(&why);
                    warn!(
                        "hotlift: the guest runs as worker threads, as KVM cannot be used: {why}"
                    );
                }
                kind
            }
        }
    }

    /// Returns the settings of the guest.
    pub fn settings(&self) -> GuestSettings {
        GuestSettings {
            ram_bytes: self.ram,
            backing: match self.ram_backend {
                RamBackend::Private => Backing::Private,
                RamBackend::Shared => Backing::Shared,
            },
            vcpus: self.vcpus,
            workload: self.workload,
            rate: self.rate,
            working_set: Some(self.working_set.unwrap_or(self.ram / 8)),
            seed: self.seed,
            uuid: [0; 16],
        }
    }

    /// Returns the share of pages (0 to 1) that are made zero in addition to the zero pages of the fill. `None` for a file,
    /// unless the share was given: the file has zero pages of its own.
    pub fn zero_share(&self) -> Option<f64> {
        self.zero_share
            .or((!self.fill.is_file()).then_some(ZERO_SHARE))
    }

    /// Returns the settings for the content of RAM at the guest's start.
    pub fn fill_settings(&self) -> FillSettings {
        let source = match (&self.fill, self.zero_share()) {
            (Fill::Generated, _) => FillSource::Generated,
            (Fill::Mixed, _) => FillSource::Mixed,
            (Fill::Path(file), None) => FillSource::Image(file.clone()),
            (Fill::Path(path), Some(_)) => FillSource::Folder(path.clone()),
        };
        FillSettings {
            source,
            zero_share: self.zero_share().unwrap_or_default(),
            zero_touched: self.zero_touched,
            seed: self.seed,
        }
    }

    /// Returns the flags that a child process needs for a guest of `kind`.
    pub fn to_flags(&self, kind: GuestKind) -> Vec<String> {
        let backend = match self.ram_backend {
            RamBackend::Private => "private",
            RamBackend::Shared => "shared",
        };
        let mut flags = vec![
            format!("--guest={kind}"),
            format!("--vcpus={}", self.vcpus),
            format!("--ram={}", self.ram),
            format!("--ram-backend={backend}"),
            format!("--workload={}", self.workload.name()),
            format!("--rate={}", self.rate),
            format!("--seed={}", self.seed),
            format!("--fill={}", self.fill),
        ];
        flags.extend(self.working_set.map(|size| format!("--working-set={size}")));
        flags.extend(self.zero_share.map(|share| format!("--zero-share={share}")));
        flags.extend(self.zero_touched.then(|| "--zero-touched".to_owned()));
        flags
    }
}

/// Parses a number of bytes, with an optional suffix.
pub fn size(text: &str) -> Result<u64, String> {
    parse_size(text)
        .ok_or_else(|| "expected a number of bytes with an optional suffix K, M, G or T".to_owned())
}

/// Parses a guest's RAM size.
pub fn ram(text: &str) -> Result<u64, String> {
    let ram = size(text)?;
    match (MIN_RAM..=MAX_RAM).contains(&ram) {
        true => Ok(ram),
        false => Err(format!("expected {} to {}", bytes(MIN_RAM), bytes(MAX_RAM))),
    }
}

/// Parses a share from 0 to 1.
pub fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok();
    let share = share.filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "expected a number from 0 to 1".to_owned())
}

/// Parses a time in seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok();
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| "expected a number of seconds".to_owned())
}
