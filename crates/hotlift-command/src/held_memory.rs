//! Touches memory before a migration within one host, and frees it at the start of the migration, for the destination.
//!
//! A virtual machine returns memory that was free for two seconds to its host (Linux' free page reporting). The next touch of
//! that memory costs a VM exit. In such a machine the destination of method none took 0.5 to 1.8 CPU s/GiB, depending on the
//! memory that other processes had just freed. So the preparation of a run touches memory, and the start of the run frees it.

use std::path::Path;
use std::time::Duration;

use hotlift::Options;
use hotlift_mem::{Backing, RamBlock};

/// This path exists if the kernel reports free pages to its host.
const REPORTING: &str = "/sys/module/page_reporting";

/// Time until the kernel has reported the pages that the previous run's processes freed at their end. The kernel reports all
/// free pages two seconds after a free (mm/page_reporting.c: `PAGE_REPORTING_DELAY`). Without this wait the destination of
/// method none took 0.30 or 0.65 core-s/GiB at random.
const PASS: Duration = Duration::from_millis(2200);

/// Touched memory; the drop frees it for the destination.
pub struct HeldMemory(#[expect(dead_code, reason = "held")] RamBlock);

impl HeldMemory {
    /// Allocates and touches `bytes` of memory, as much as the destination will touch. Returns `None` if this host has too
    /// little memory, or if the destination touches its memory before the migration (`mem-prealloc`).
    ///
    /// If the kernel reports free pages, this takes two seconds longer.
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
