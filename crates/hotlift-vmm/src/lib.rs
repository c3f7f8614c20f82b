//! Built-in guests: a KVM virtual machine, and worker threads where KVM cannot be used.
//!
//! Both write to their memory at a rate and check it as they go, and both can prove afterwards that
//! no write was lost, because the n-th write of a vCPU goes to a page that follows from n alone.
//!
//! | file | what |
//! |---|---|
//! | `settings` | what a guest is made from |
//! | `layout` | where things lie in its RAM; the record that each write leaves |
//! | `workload` | which page the n-th write goes to, and when |
//! | `fill` | what RAM holds before the start |
//! | `machine` | what both guests are |
//! | `kvm`, `threads` | the vCPUs of each |
//! | `guest/hotlift.s` | the program that the KVM guest runs, and any other VMM can |
//! | `life`, `control`, `throttle`, `device` | their phases, their threads, their device state |
//! | `verify` | the proof |

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod builtin;
mod bytes;
mod control;
mod device;
pub mod fill;
pub mod kvm;
pub mod layout;
mod life;
mod machine;
mod settings;
mod threads;
mod throttle;
pub mod verify;
pub mod workload;

pub use builtin::{BuiltinGuest, CreateError};
pub use device::DeviceError;
pub use settings::{GuestKind, GuestSettings, UnknownGuest};

/// Makes a guest of `kind`.
///
/// # Errors
/// [`CreateError`].
pub fn create(
    kind: GuestKind,
    settings: &GuestSettings,
) -> Result<Box<dyn BuiltinGuest>, CreateError> {
    Ok(match kind {
        GuestKind::Kvm => Box::new(machine::Machine::<kvm::KvmVcpus>::new(settings)?),
        GuestKind::Threads => Box::new(machine::Machine::<threads::Workers>::new(settings)?),
    })
}

/// The guest to take if none is asked for: KVM, or threads where it cannot be used, and then why.
pub fn best_kind() -> (GuestKind, Option<kvm::KvmError>) {
    match kvm::usable() {
        Ok(()) => (GuestKind::Kvm, None),
        Err(why) => (GuestKind::Threads, Some(why)),
    }
}
