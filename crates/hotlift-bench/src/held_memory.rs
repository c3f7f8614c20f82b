//! Memory that this machine surely has, for the destination to find.
//!
//! A virtual machine gives memory that lay free for two seconds back to its host (Linux' free page reporting), and
//! the next first touch of it costs an exit: in such a machine the destination of method none spent 0.5 to 1.8
//! CPU s/GiB, by what other processes had just freed. So memory is touched while a run is prepared, and given
//! back when it begins.

use std::path::Path;
use std::time::Duration;

use hotlift_mem::{Backing, RamBlock};

use super::cell::Cell;

/// Exists where the kernel reports free pages to its host.
const REPORTING: &str = "/sys/module/page_reporting";

/// A pass over free pages follows what was freed by two seconds, and takes everything that is free by then
/// (mm/page_reporting.c: `PAGE_REPORTING_DELAY`). The processes of the run before have just ended: their pass is waited for.
/// Without that the destination of none took 0.30 or 0.65 core-s/GiB, and which of the two was chance.
const PASS: Duration = Duration::from_millis(2200);

/// Memory that is given back when this is dropped.
pub struct HeldMemory(#[expect(dead_code, reason = "held")] Option<RamBlock>);

impl HeldMemory {
    /// As much as the destination of `cell` will touch; none if it does so before it is migrated to, or is on another host.
    pub fn for_destination(cell: &Cell, is_remote: bool) -> Self {
        let is_early = |options: hotlift::Options| options.mem_prealloc;
        if is_remote || cell.migration.options().is_ok_and(is_early) {
            return Self(None);
        }
        // That both guests fit has been looked at, and the destination takes what is given back here.
        let block = usize::try_from(cell.guest.ram).ok().and_then(|bytes| {
            let block = RamBlock::new("held", bytes, Backing::Private).ok()?;
            block.populate(0, bytes).ok()?;
            Some(block)
        });
        if block.is_some() && Path::new(REPORTING).exists() {
            std::thread::sleep(PASS);
        }
        Self(block)
    }
}
