//! Settings of a built-in guest.

use std::fmt;
use std::str::FromStr;

use hotlift_mem::Backing;

use crate::layout::{Layout, LayoutError};
use crate::workload::{Pace, Workload};

/// Settings of a built-in guest. Both ends of a migration must agree in `kind`, `ram_bytes`, `vcpus` and `uuid`; the rest is
/// migrated with the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestSettings {
    /// Bytes of RAM, whole pages, from [`crate::layout::MIN_RAM`] to [`crate::layout::MAX_RAM`].
    pub ram_bytes: u64,
    /// Kind of memory behind the RAM.
    pub backing: Backing,
    /// Number of vCPUs (or worker threads), 1 to [`crate::layout::MAX_VCPUS`].
    pub vcpus: u8,
    /// Distribution of the writes.
    pub workload: Workload,
    /// Pages written per second, all vCPUs together; 0 to [`Pace::MAX_RATE`]. A guest that cannot keep up writes as fast as it
    /// can.
    pub rate: u64,
    /// Bytes of the working set, rounded down to pages; `None`: all available RAM.
    pub working_set: Option<u64>,
    /// Seed of the guest's random numbers.
    pub seed: u64,
    /// UUID of the VM, compared by the destination; may be zero.
    pub uuid: [u8; 16],
}

impl Default for GuestSettings {
    /// Returns 256 MiB, one vCPU, 1000 random pages per second in all RAM.
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

/// Migrated part of [`GuestSettings`], with its layout.
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

    /// Returns the pages written per second.
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
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::Kvm, Self::Threads];

    /// Returns the name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Threads => "threads",
        }
    }

    /// Returns the machine name that a guest of this kind sends to the destination.
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

/// A name of no built-in guest.
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
