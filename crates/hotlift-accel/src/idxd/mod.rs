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
//! | `wait`, `sync` | waiting of the completion thread; types shared by threads |
//! | `model`, `simulated` | a software model of a queue, and its opening: for tests, with the feature `simulated` |
//! | `cpu` | CPU instructions that submit descriptors |
//!
//! Reads here have no effect on a device. A queue's node is never opened as a mere check: a dedicated queue has one opener, and
//! every opener binds its address space to the device.

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
