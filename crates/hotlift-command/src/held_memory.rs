//! Memory reserved on this machine, for the destination of a migration within one host.
//!
//! A virtual machine returns memory that was free for two seconds to its host (Linux' free page reporting), and the next touch
//! of that memory costs a VM exit. In such a machine the destination of method none took 0.5 to 1.8 CPU s/GiB, depending on
//! memory that other processes had just freed. So a run's preparation touches memory, and its start frees it.

use std::path::Path;
use std::time::Duration;

use hotlift::Options;
use hotlift_mem::{Backing, RamBlock};

/// Exists where the kernel reports free pages to its host.
const REPORTING: &str = "/sys/module/page_reporting";

/// Time until the kernel has reported the pages that the processes of the previous run freed at their end: it reports all free
/// pages two seconds after a free (mm/page_reporting.c: `PAGE_REPORTING_DELAY`). Without this wait the destination of method
/// none took 0.30 or 0.65 core-s/GiB at random.
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
