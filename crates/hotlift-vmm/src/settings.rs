//! Settings of a built-in guest.

use std::fmt;
use std::str::FromStr;

use hotlift_mem::Backing;

use crate::layout::{Layout, LayoutError};
use crate::workload::{Pace, Workload};

/// Settings of a built-in guest. `kind`, `ram_bytes`, `vcpus` and `uuid` must be equal on source and destination. All
/// other settings are migrated with the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestSettings {
    /// Size of RAM in bytes, whole pages, from [`crate::layout::MIN_RAM`] to [`crate::layout::MAX_RAM`].
    pub ram_bytes: u64,
    /// Kind of host memory for the guest's RAM.
    pub backing: Backing,
    /// Number of vCPUs or worker threads, 1 to [`crate::layout::MAX_VCPUS`].
    pub vcpus: u8,
    /// Distribution of the page writes.
    pub workload: Workload,
    /// Pages written per second by all vCPUs together, 0 to [`Pace::MAX_RATE`]. A guest that cannot reach the rate
    /// writes as fast as it can.
    pub rate: u64,
    /// Size of the working set in bytes, rounded down to pages; `None` is all available RAM.
    pub working_set: Option<u64>,
    /// Seed of the guest's random numbers.
    pub seed: u64,
    /// UUID of the VM, which the destination compares with its own; may be zero.
    pub uuid: [u8; 16],
}

impl Default for GuestSettings {
    /// Returns the default: 256 MiB of RAM, one vCPU, 1000 pages per second written at random in all available RAM.
    fn default() -> Self {
        Self {
            ram_bytes: 256 << 20,
            backing: Backing::Private,
            vcpus: 1,
            workload: Workload::Random,
            rate: 1000,
            working_set: None,
            seed: 1,
            uuid: [0; 16],
        }
    }
}

/// The part of [`GuestSettings`] that is migrated, with the layout of RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Program {
    pub workload: Workload,
    pub rate: u64,
    pub seed: u64,
    pub layout: Layout,
}

impl Program {
    pub fn new(settings: &GuestSettings) -> Result<Self, LayoutError> {
        Ok(Self {
            workload: settings.workload,
            rate: settings.rate.min(Pace::MAX_RATE),
            seed: settings.seed,
            layout: Layout::new(settings.ram_bytes, settings.vcpus, settings.working_set)?,
        })
    }

    pub fn pace(&self) -> Pace {
        Pace::new(self.workload, self.rate, self.layout.vcpus())
    }

    /// Returns the pages written per second, by all vCPUs together.
    pub fn rate(&self) -> u64 {
        match self.workload {
            Workload::Idle => 0,
            Workload::Random | Workload::Sequential | Workload::Hotset => self.rate,
        }
    }
}

/// Kind of a built-in guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GuestKind {
    /// A KVM virtual machine.
    Kvm,
    /// Worker threads of this process.
    Threads,
}

impl GuestKind {
    /// All kinds of built-in guests.
    pub const ALL: [Self; 2] = [Self::Kvm, Self::Threads];

    /// Returns the name of the kind, as used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Threads => "threads",
        }
    }

    /// Returns the machine type name that a guest of this kind sends to the destination.
    pub fn machine(self) -> &'static str {
        match self {
            Self::Kvm => "hotlift-kvm-v1",
            Self::Threads => "hotlift-threads-v1",
        }
    }
}

impl fmt::Display for GuestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The text is not the name of a kind of built-in guest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown guest {0:?}, known are kvm, threads")]
pub struct UnknownGuest(pub String);

impl FromStr for GuestKind {
    type Err = UnknownGuest;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| UnknownGuest(name.to_owned()))
    }
}
