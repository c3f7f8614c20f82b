//! Intel's DSA and IAA as the Linux driver `idxd` shows them.
//!
//! | file | subject |
//! |---|---|
//! | `sysfs` | devices and their work queues: what there is, how it is set up, its limits |
//! | `attribute` | one attribute file of sysfs, as a number, a name or a set of operations |
//! | `descriptor`, `record` | what a device is told, and what it answers |
//! | `portal` | ways to hand a descriptor to a queue |
//! | `queue` | opens a work queue, and proves that it works |
//! | `zero` | zero pages, found by devices |
//! | `wait`, `sync` | how the thread that listens to devices waits; what threads share |
//! | `model`, `simulated` | a software model of a queue, and how it is opened: for tests, with the feature `simulated` |
//! | `cpu` | which instructions this CPU has to hand descriptors to a queue |
//!
//! Reading here has no effect on a device. A queue's node is never opened to see whether it can be: a
//! dedicated queue has one opener, and every opener binds its address space to the device.

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
