//! Intel's DSA and IAA through the Linux driver `idxd`.
//!
//! | file | subject |
//! |---|---|
//! | `sysfs` | devices and their work queues: inventory, setup, limits |
//! | `attribute` | one attribute file of sysfs, as a number, a name or a set of operations |
//! | `descriptor`, `record` | commands to a device, and its results |
//! | `portal` | submission of a descriptor to a queue |
//! | `queue` | opens a work queue and checks that it works |
//! | `zero` | detection of zero pages by devices |
//! | `wait`, `sync` | waits of the completion thread; types that threads share |
//! | `model`, `simulated` | a software model of a queue, and a function that opens it; for tests (feature `simulated`) |
//! | `cpu` | CPU instructions that submit descriptors |
//!
//! Reading sysfs has no effect on a device. A queue's node in `/dev` is opened only for use, never for a check: a dedicated
//! queue permits one opener, and every opener binds its address space to the device.

mod attribute;
pub mod cpu;
pub mod descriptor;
#[cfg(feature = "simulated")]
pub mod model;
pub mod portal;
pub mod queue;
pub mod record;
#[cfg(feature = "simulated")]
pub mod simulated;
mod sync;
pub mod sysfs;
mod wait;
pub mod zero;

pub use attribute::{OpSet, SysfsError};
pub use cpu::CpuFeatures;
pub use sysfs::{Device, DeviceKind, Engine, Mode, Place, State, WorkQueue, devices};
