//! Interface of both built-in guests, beyond that of migratable guests.

use std::time::Duration;

use hotlift::guest::{Guest, GuestError};
use hotlift_mem::MemError;

use crate::fill::{FillError, FillSettings, Filled};
use crate::kvm::error::KvmError;
use crate::layout::{Layout, LayoutError};
use crate::settings::GuestKind;
use crate::verify::{Verified, VerifyError};

/// A guest of this crate.
///
/// A source is created, filled, and started. A destination is created from settings that agree
/// (see [`GuestSettings`](crate::GuestSettings)) and neither filled nor started: the engine writes its RAM, loads its
/// devices, and resumes it.
pub trait BuiltinGuest: Guest {
    /// Returns the kind of guest.
    fn kind(&self) -> GuestKind;

    /// Returns the layout of its RAM, with its working set. On a destination, that of the source once the devices are loaded.
    fn layout(&self) -> Layout;

    /// Returns the pages that its workload writes per second; 0 if it writes none. On a destination, those of the source once
    /// the devices are loaded.
    fn rate(&self) -> u64;

    /// Fills RAM before the start.
    ///
    /// # Errors
    /// [`FillError`]; also if the guest was started or filled already.
    fn fill(&self, settings: &FillSettings) -> Result<Filled, FillError>;

    /// Boots the guest; when this returns, all its vCPUs run.
    ///
    /// # Errors
    /// If the guest was started or loaded already, or does not boot.
    fn start(&self) -> Result<(), GuestError>;

    /// Checks that the memory of the guest, which must be paused, matches its vCPUs' state.
    ///
    /// # Errors
    /// [`VerifyError`] with the defect and its location.
    fn verify(&self) -> Result<Verified, VerifyError>;

    /// Returns the writes of all vCPUs so far; for a running guest, up to about the last tick. It grows while the guest runs
    /// and has a workload.
    fn writes(&self) -> u64;

    /// Returns the time that [`Guest::throttle`] has taken so far, the sum over all vCPUs.
    fn throttled_time(&self) -> Duration;

    /// Checks that all vCPUs are alive.
    ///
    /// # Errors
    /// The reason of the first vCPU's death (a triple fault, an error of KVM, a panic).
    fn health(&self) -> Result<(), GuestError>;

    /// Returns the lines on the guest's serial port since the last call, at most the last thousand; `hotlift vcpu=0 writes=123
    /// errors=0` once per second and vCPU.
    fn serial(&self) -> Vec<String>;
}

/// A guest could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The settings are inconsistent.
    #[error("inconsistent guest settings")]
    Layout(#[from] LayoutError),
    /// Its RAM could not be mapped.
    #[error("cannot map guest RAM")]
    Memory(#[from] MemError),
    /// KVM cannot be used.
    #[error("cannot create a KVM guest")]
    Kvm(#[from] KvmError),
    /// A vCPU thread could not be started.
    #[error("cannot start a vCPU thread")]
    Thread(#[source] std::io::Error),
}
