//! Interface between the engine and a virtual machine.
//!
//! The trait supports a guest in this process (the built-in guests, a Rust VMM that embeds the crate), and a guest in another
//! process that shares its memory as memfds. For this reason:
//!
//! - memory is a list of [`RamBlock`]s
//! - dirty pages are added to a bitmap that the engine owns
//! - pausing is a request
//!
//! A relay needs no [`Guest`], because it only forwards pages.

use std::error::Error;
use std::sync::Arc;

use hotlift_mem::{DirtyBitmap, RamBlock};

/// Error of a guest that could not do what the engine requested.
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
/// loads it before the vCPUs run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    /// Name of the device, 1 to 255 bytes.
    pub idstr: String,
    /// Number that distinguishes devices with the same name; for a vCPU, its index.
    pub instance_id: u32,
    /// Version of the payload's layout.
    pub version_id: u32,
    /// The state itself, in the device's own layout.
    pub payload: Vec<u8>,
}

/// Function that announces a guest to the network once, see [`Guest::announcer`].
pub type Announcer = Box<dyn FnMut() + Send>;

/// A virtual machine that can be migrated.
///
/// The dirty log follows QEMU's order: a page's dirty bit is fetched and cleared *before* the page is read. So a write during
/// the read sets the bit again. `sync_dirty_log` fetches the bits. If the hypervisor clears them separately (KVM's manual
/// protect), `clear_dirty_log` clears them. The engine calls it for a range of pages before it reads any page of the range.
pub trait Guest: Send + Sync {
    /// Returns the name of the machine (in QEMU's configuration record). The destination compares the name with its own
    /// machine's.
    fn machine(&self) -> &str;

    /// Returns the VM's UUID, which the destination compares on each channel; zero if the VM has none.
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

    /// Fetches the pages of RAM block `block` (index into [`Guest::ram`]) that were written since the last call. Adds them to
    /// `into`, and returns the number of bits newly set there.
    fn sync_dirty_log(&self, block: usize, into: &DirtyBitmap) -> Result<u64, GuestError>;

    /// Clears the dirty log for the pages that the last `sync_dirty_log` fetched, among `pages` pages from `first_page` (a
    /// multiple of 64). Later writes to these pages are logged again. Called concurrently from channel threads, at most once
    /// per range and round, before a page of the range is read. A guest whose `sync_dirty_log` also clears does nothing.
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

    /// Reduces the vCPUs' time by `percent` (0 to 99) until the next call, for auto-converge; 0 ends the reduction. Called at
    /// most a few times a second. Returns false if this guest cannot be slowed down.
    fn throttle(&self, percent: u8) -> bool {
        let _ = percent;
        false
    }

    /// Returns the kernel's thread ids of the vCPUs, in the order of the vCPUs, for `postcopy-blocktime`. Empty if they are not
    /// known.
    fn vcpu_threads(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Returns the function that announces the guest's new location to the network (ARP, RARP); `None` if there is nothing to
    /// announce, as without a network card. The destination calls the function `announce-rounds` times once the guest runs, in
    /// a separate thread that may outlive the migration.
    fn announcer(&self) -> Option<Announcer> {
        None
    }

    /// Returns the state of all devices, vCPUs included, of a paused guest.
    fn save_devices(&self) -> Result<Vec<DeviceState>, GuestError>;

    /// Loads the state of all devices into a guest that has not run. The guest must validate the state, because it comes from a
    /// peer.
    fn load_devices(&self, devices: Vec<DeviceState>) -> Result<(), GuestError>;
}
