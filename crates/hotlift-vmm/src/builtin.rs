//! What both built-in guests are, beside guests that can be migrated.

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
    /// Which guest it is.
    fn kind(&self) -> GuestKind;

    /// Where things lie in its RAM, and how much of it is its working set. On a destination, that
    /// of the source once the devices are loaded.
    fn layout(&self) -> Layout;

    /// Pages that its workload writes in a second; 0 if it writes none. On a destination, that of the
    /// source once the devices are loaded.
    fn rate(&self) -> u64;

    /// Fills RAM before the start.
    ///
    /// # Errors
    /// [`FillError`]; also if the guest was started or filled already.
    fn fill(&self, settings: &FillSettings) -> Result<Filled, FillError>;

    /// Boots the guest; when this returns all its vCPUs run.
    ///
    /// # Errors
    /// If the guest was started or loaded already, or does not boot.
    fn start(&self) -> Result<(), GuestError>;

    /// Proves that the memory of the guest, which must be paused, is what its vCPUs say.
    ///
    /// # Errors
    /// [`VerifyError`], which says what is wrong and where.
    fn verify(&self) -> Result<Verified, VerifyError>;

    /// Writes of all vCPUs so far; of a running guest, up to the last tick or so. It grows as long
    /// as the guest runs and has a workload.
    fn writes(&self) -> u64;

    /// Time that [`Guest::throttle`] has taken from its vCPUs so far, from all of them together.
    fn throttled_time(&self) -> Duration;

    /// Whether all vCPUs are alive.
    ///
    /// # Errors
    /// Why the first one died that did (a triple fault, an error of KVM, a panic).
    fn health(&self) -> Result<(), GuestError>;

    /// Lines that the guest has written to its serial port since the last call, at most the last
    /// thousand; `hotlift vcpu=0 writes=123 errors=0` once a second and vCPU.
    fn serial(&self) -> Vec<String>;
}

/// A guest could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The settings do not fit together.
    #[error("guest settings do not fit together")]
    Layout(#[from] LayoutError),
    /// Its RAM could not be mapped.
    #[error("cannot map guest RAM")]
    Memory(#[from] MemError),
    /// KVM cannot be used.
    #[error("cannot make a KVM guest")]
    Kvm(#[from] KvmError),
    /// A vCPU thread could not be started.
    #[error("cannot start a vCPU thread")]
    Thread(#[source] std::io::Error),
}
