//! Interface between the engine and a virtual machine.
//!
//! The trait fits a guest in this process (the built-in guests, a Rust VMM that embeds the crate), and one in another process
//! that shares its memory as memfds. Hence memory is a list of [`RamBlock`]s, dirty pages are added to a bitmap that the engine
//! owns, and pausing is a request. A relay needs no guest: its pages are only in transit.

use std::error::Error;
use std::sync::Arc;

use hotlift_mem::{DirtyBitmap, RamBlock};

/// A guest's failure to do what the engine asked for.
#[derive(Debug, thiserror::Error)]
#[error("guest could not {action}")]
pub struct GuestError {
    /// Requested action, as a verb phrase ("pause its vCPUs").
    pub action: &'static str,
    /// Cause.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}

impl GuestError {
    /// Wraps `source`, the reason why `action` (a verb phrase) failed.
    pub fn new(action: &'static str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            action,
            source: source.into(),
        }
    }
}

/// One device section of the stream (QEMU's FULL section). The destination's device with the same `idstr` and `instance_id`
/// loads it before its vCPUs run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    /// Name of the device, 1 to 255 bytes.
    pub idstr: String,
    /// Distinguishes devices of one name (the vCPU's index, for vCPUs).
    pub instance_id: u32,
    /// Version of the payload's layout.
    pub version_id: u32,
    /// The state itself, in the device's own layout.
    pub payload: Vec<u8>,
}

/// Announces a guest once, see [`Guest::announcer`].
pub type Announcer = Box<dyn FnMut() + Send>;

/// A virtual machine that can be migrated.
///
/// Dirty pages follow QEMU's order of events: a bit is fetched and cleared *before* its page is
/// read, so a write during the read marks it again. `sync_dirty_log` fetches; where the hypervisor
/// clears separately (KVM's manual protect), `clear_dirty_log` clears, and the engine calls it for a
/// range before it reads any page of that range.
pub trait Guest: Send + Sync {
    /// Returns the machine name, which the destination compares (QEMU's configuration record).
    fn machine(&self) -> &str;

    /// Returns the VM's UUID, which is compared on each channel; zero if it has none.
    fn uuid(&self) -> [u8; 16];

    /// Returns the RAM blocks, in the order in which they are sent.
    fn ram(&self) -> &[Arc<RamBlock>];

    /// Returns true if no page was written since the RAM was mapped. Then a page that is never sent, or is sent as zero, needs
    /// no work on the destination.
    fn ram_is_fresh(&self) -> bool;

    /// Starts logging writes. Writes from now on appear in a later [`Guest::sync_dirty_log`].
    fn start_dirty_log(&self) -> Result<(), GuestError>;

    /// Stops logging writes. Called at every end of a migration.
    fn stop_dirty_log(&self) -> Result<(), GuestError>;

    /// Fetches the pages of RAM block `block` (index into [`Guest::ram`]) written since the last
    /// call, ORs them into `into`, and returns how many bits were newly set there.
    fn sync_dirty_log(&self, block: usize, into: &DirtyBitmap) -> Result<u64, GuestError>;

    /// Re-arms logging for the pages that the last `sync_dirty_log` fetched, among `pages` pages from `first_page` (a multiple
    /// of 64). Called concurrently from channel threads, at most once per range and round, before a page of the range is read.
    /// A guest whose fetch also clears does nothing.
    fn clear_dirty_log(
        &self,
        block: usize,
        first_page: usize,
        pages: usize,
    ) -> Result<(), GuestError>;

    /// Stops the vCPUs. On return, none of their writes is in progress. Idempotent.
    fn pause(&self) -> Result<(), GuestError>;

    /// Lets the vCPUs run (again). Idempotent.
    fn resume(&self) -> Result<(), GuestError>;

    /// Takes `percent` of the vCPUs' time away from them until the next call, 0 to 99, for auto-converge; 0 ends it. Called a
    /// few times a second at most. Returns false if this guest cannot be slowed down.
    fn throttle(&self, percent: u8) -> bool {
        let _ = percent;
        false
    }

    /// Returns the kernel's ids of the vCPUs' threads, in the order of the vCPUs, for `postcopy-blocktime`. Empty if they are
    /// not known.
    fn vcpu_threads(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Returns the function that announces the guest's new location to the network (ARP, RARP). The destination calls it
    /// `announce-rounds` times once the guest runs, on a thread of its own that may outlive the migration. `None` if there is
    /// nothing to announce, as without a network card.
    fn announcer(&self) -> Option<Announcer> {
        None
    }

    /// Returns the state of all devices, vCPUs included, of a paused guest.
    fn save_devices(&self) -> Result<Vec<DeviceState>, GuestError>;

    /// Loads the state of all devices into a guest that has not run. Nothing in it is trusted.
    fn load_devices(&self, devices: Vec<DeviceState>) -> Result<(), GuestError>;
}
