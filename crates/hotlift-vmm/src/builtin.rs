//! Interface of both built-in guests (KVM and threads), in addition to that of migratable guests.

use std::time::Duration;

use hotlift::guest::{Guest, GuestError};
use hotlift_mem::MemError;

use crate::fill::{FillError, FillSettings, Filled};
use crate::kvm::error::KvmError;
use crate::layout::{Layout, LayoutError};
use crate::settings::GuestKind;
use crate::verify::{Verified, VerifyError};

/// A built-in guest.
///
/// A source is created, filled, and started. A destination is created from equal settings (see
/// [`GuestSettings`](crate::GuestSettings)), and neither filled nor started: the engine writes its RAM, loads its
/// devices, and resumes it.
pub trait BuiltinGuest: Guest {
    /// Returns the kind of guest.
    fn kind(&self) -> GuestKind;

    /// Returns the layout of the guest's RAM. On a destination, loading the devices replaces the layout by the
    /// source's.
    fn layout(&self) -> Layout;

    /// Returns the pages that the guest's workload writes per second; 0 for a guest that does not write. On a
    /// destination, loading the devices replaces the rate by the source's.
    fn rate(&self) -> u64;

    /// Fills the guest's RAM before the start.
    ///
    /// # Errors
    /// [`FillError`]; also if the guest was already filled, started or loaded.
    fn fill(&self, settings: &FillSettings) -> Result<Filled, FillError>;

    /// Boots the guest. Returns when all vCPUs run.
    ///
    /// # Errors
    /// If the guest was already started or loaded, or does not boot.
    fn start(&self) -> Result<(), GuestError>;

    /// Checks that the memory of the guest matches the state of its vCPUs. The guest must be paused.
    ///
    /// # Errors
    /// [`VerifyError`] with the mismatch and its location.
    fn verify(&self) -> Result<Verified, VerifyError>;

    /// Returns the number of page writes of all vCPUs so far. For a running guest, the number may lack writes since
    /// about the last tick.
    fn writes(&self) -> u64;

    /// Returns the time for which [`Guest::throttle`] has paused vCPUs so far, summed over all vCPUs.
    fn throttled_time(&self) -> Duration;

    /// Checks that no vCPU has failed.
    ///
    /// # Errors
    /// The reason why the first vCPU failed: a triple fault, an error of KVM, or a panic.
    fn health(&self) -> Result<(), GuestError>;

    /// Returns the lines on the guest's serial port since the last call, at most the last thousand. Each vCPU prints
    /// `hotlift vcpu=0 writes=123 errors=0` once per second.
    fn serial(&self) -> Vec<String>;
}

/// A built-in guest could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The sizes of RAM and working set do not fit together.
    #[error("inconsistent guest settings")]
    Layout(#[from] LayoutError),
    /// The guest's RAM could not be mapped.
    #[error("cannot map guest RAM")]
    Memory(#[from] MemError),
    /// KVM cannot be used on this host.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A vCPU thread could not be started.
    #[error("cannot start a vCPU thread")]
    Thread(#[source] std::io::Error),
}
