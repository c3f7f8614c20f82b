//! Built-in guests: a KVM virtual machine, and worker threads for hosts without KVM.
//!
//! Both guests write to their memory at a fixed rate, and check it at the same time. After a migration, both can prove
//! that no write was lost, because n alone determines the page of a vCPU's n-th write.
//!
//! | file | subject |
//! |---|---|
//! | `settings` | settings of a guest |
//! | `layout` | layout of its RAM; the record of each write |
//! | `workload` | page and time of the n-th write |
//! | `fill` | content of RAM before the start |
//! | `machine` | common part of both guests |
//! | `kvm`, `threads` | vCPUs of each |
//! | `guest/hotlift.s` | program of the KVM guest, for any other VMM too |
//! | `life`, `control`, `throttle`, `device` | their phases, their threads, their device state |
//! | `verify` | proof that no write was lost |

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

/// Creates a guest of `kind`.
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

/// Returns the best kind of guest on this host: KVM, or threads with the reason why KVM cannot be used.
pub fn best_kind() -> (GuestKind, Option<kvm::KvmError>) {
    match kvm::usable() {
        Ok(()) => (GuestKind::Kvm, None),
        Err(why) => (GuestKind::Threads, Some(why)),
    }
}
