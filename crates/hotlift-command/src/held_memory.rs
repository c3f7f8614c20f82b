//! Memory that this machine surely has, for the destination of a migration inside one host.
//!
//! A virtual machine gives memory that lay free for two seconds back to its host (Linux' free page reporting), and
//! the next first touch of it costs an exit: in such a machine the destination of method none spent 0.5 to 1.8
//! CPU s/GiB, by what other processes had just freed. So memory is touched while a run is prepared, and freed
//! when it begins.

use std::path::Path;
use std::time::Duration;

use hotlift::Options;
use hotlift_mem::{Backing, RamBlock};

/// Exists where the kernel reports free pages to its host.
const REPORTING: &str = "/sys/module/page_reporting";

/// A pass over free pages follows what was freed by two seconds, and takes everything that is free by then
/// (mm/page_reporting.c: `PAGE_REPORTING_DELAY`). The processes of the run before have just ended: their pass is waited for.
/// Without that the destination of none took 0.30 or 0.65 core-s/GiB, and which of the two was chance.
const PASS: Duration = Duration::from_millis(2200);

/// Touched memory that is freed when this is dropped.
pub struct HeldMemory(#[expect(dead_code, reason = "held")] RamBlock);

impl HeldMemory {
    /// Touches `bytes` of memory, as many as the destination will touch. `None` if this host has not enough, or the destination
    /// touches its memory before the migration.
    ///
    /// Takes two seconds more where the kernel reports free pages.
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
