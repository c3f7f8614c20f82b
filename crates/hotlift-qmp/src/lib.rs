//! QEMU's machine protocol (QMP): a client for QEMU 7.2 and later with the commands of migrations, and a [`server`].
//!
//! [`Client`] implements the protocol: lines of JSON over a UNIX or TCP socket, one command at a time; events are queued.
//! [`Qemu`] has typed commands for migrations. [`qapi`] describes the types of the answers, which client and server share.
//! [`GuestEvents`] summarises the events about the guest (`guest_events.rs`). `objects.rs` reads the memory backends and
//! virtio-mem devices of a machine. `inventory.rs` and `qtree.rs` read its CPUs, memory devices, disks and devices.
//! [`set_guest_time`] connects to the guest agent.
//!
//! All functions block, and every wait has a deadline. QEMU serves one connection at a time on a QMP socket, so a missing
//! greeting usually means that another client is connected.
//!
//! # Example
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use hotlift_qmp::{Qemu, QmpAddress};
//!
//! let address: QmpAddress = "/run/vm.qmp".parse()?;
//! let mut qemu = Qemu::connect(&address, Duration::from_secs(5))?;
//! println!("QEMU {} with {:?}", qemu.version(), qemu.machine_type()?);
//! qemu.set_capabilities(&[("multifd", true)])?;
//! qemu.migrate("tcp:192.0.2.2:4444")?;
//! println!("{:?}", qemu.query_migrate()?.status);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod address;
mod client;
mod error;
mod guest_agent;
mod guest_events;
mod http;
mod inventory;
mod lines;
mod machine;
mod machine_type;
mod migration;
mod objects;
pub mod qapi;
mod qemu;
mod qtree;
mod ram_blocks;
pub mod server;
mod uuid;

pub use address::QmpAddress;
pub use client::{ANSWER_TIMEOUT, Client, Event, MAX_LINE, MAX_QUEUED_EVENTS};
pub use error::{QmpError, one_line};
pub use guest_agent::{GuestAgentError, set_guest_time};
pub use guest_events::GuestEvents;
pub use http::{HTTP, is_http};
pub use inventory::{Cpu, Disk, MemoryDevice, MemoryLimits};
pub use lines::{Connection, Line, Lines, Socket};
pub use machine::{CommandInfo, NameInfo, RunState, StatusInfo, UuidInfo, Version, VersionInfo};
pub use machine_type::{LAST_FLUSHED_BY_SECTION, machine_version};
pub use migration::{
    AcceleratorJobs, CompressionStats, MigrationCapabilityStatus, MigrationInfo, MigrationStats,
    MigrationThreadInfo, SocketAddress, ThreadTime, VcpuWaits, XbzrleCacheStats,
};
pub use objects::{SharedBackend, VirtioMem};
pub use qemu::Qemu;
pub use qtree::{MachineDevice, general_type};
pub use ram_blocks::RamBlock;
pub use uuid::Uuid;

/// Iterates over all objects of answers, including nested ones.
pub fn all_objects() -> impl Iterator<Item = &'static qapi::Object> {
    machine::OBJECTS.iter().chain(migration::OBJECTS)
}
