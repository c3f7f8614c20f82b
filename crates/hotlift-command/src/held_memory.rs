//! Memory reserved on this machine, for the destination of a migration within one host.
//!
//! A virtual machine returns memory that was free for two seconds to its host (Linux' free page reporting), and its next first
//! touch costs an exit. In such a machine the destination of method none took 0.5 to 1.8 CPU s/GiB, depending on memory that
//! other processes had just freed. So memory is touched while a run is prepared, and freed when it begins.

use std::path::Path;
use std::time::Duration;

use hotlift::Options;
use hotlift_mem::{Backing, RamBlock};

/// Exists where the kernel reports free pages to its host.
const REPORTING: &str = "/sys/module/page_reporting";

/// A pass over free pages follows two seconds after a free, and takes all pages that are free by then (mm/page_reporting.c:
/// `PAGE_REPORTING_DELAY`). The processes of the previous run have just ended, so their pass is awaited. Without this wait the
/// destination of none took 0.30 or 0.65 core-s/GiB at random.
const PASS: Duration = Duration::from_millis(2200);

/// Touched memory that is freed on drop.
pub struct HeldMemory(#[expect(dead_code, reason = "held")] RamBlock);

impl HeldMemory {
    /// Touches the `bytes` of memory that the destination will touch. `None` if this host has too little, or the destination
    /// touches its memory before the migration.
    ///
    /// Takes two seconds longer where the kernel reports free pages.
    pub fn new(bytes: u64, options: &Options) -> Option<Self> {
        if options.mem_prealloc {
            return None;
        }
        let bytes = usize::try_from(bytes).ok()?;
        let block = RamBlock::new("held", bytes, Backing::Private).ok()?;
        block.populate(0, bytes).ok()?;
        if Path::new(REPORTING).exists() {
            std::thread::sleep(PASS);
        }
        Some(Self(block))
    }
}
