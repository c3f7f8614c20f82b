//! Postcopy at the destination: a guest that runs here before all its pages have arrived.
//!
//! ```text
//! ADVISE    empties RAM                           pages of precopy, as usual
//! DISCARD   drops pages that have changed since
//! PACKAGED  {LISTEN devices PING RUN}             starts the guest
//!           requested and other pages, each once
//! END, EOF  pages never sent are zero             SHUT(0)
//! ```
//!
//! | file | purpose |
//! |---|---|
//! | `waits` | threads that wait for pages, and the times of their waits |
//! | `lazy_ram` | places received pages, and reads the guest's page faults |
//! | `blocktime` | time for which vCPUs are paused by page faults |
//! | `link` | return path to the source, over the current connection |
//! | `run` | the threads: devices and RUN on `mig/dst/main`, pages on `mig/dst/listen`, faults on `mig/dst/fault` |
//! | `recovery` | replaces a lost connection |
//! | `agreement` | answers to a source that resumes, and their time limits |
//!
//! RUN is the destination's commit. A failure before RUN leaves the guest with the source, and the guest never runs here. After
//! RUN the guest stays here. A failure then leaves the guest without the pages that it waits for.

mod agreement;
mod blocktime;
mod lazy_ram;
mod link;
mod recovery;
mod run;
mod waits;

pub(crate) use lazy_ram::LazyRam;
pub(crate) use run::run;

use hotlift_mem::{DirtyBitmap, PAGE_SIZE, RamBlock};
use hotlift_wire::main_channel::postcopy::Ranges;

use crate::ends::guest_sink::sink::GuestSink;
use crate::error::MigrationError;

/// Discards received pages that have changed at the source since (DISCARD).
pub(crate) fn discard(
    sink: &GuestSink<'_>,
    block: usize,
    ranges: Ranges<'_>,
) -> Result<(), MigrationError> {
    let ram: &RamBlock = &sink.guest.ram()[block];
    for (start, length) in ranges.iter() {
        let offset = usize::try_from(start).unwrap_or(usize::MAX);
        let len = usize::try_from(length).unwrap_or(usize::MAX);
        ram.discard(offset, len)?;
        let mut bitmaps = vec![&sink.written[block]];
        bitmaps.extend(sink.received.get(block));
        for bitmap in bitmaps {
            bitmap.clear_range(offset / PAGE_SIZE, len / PAGE_SIZE);
        }
    }
    Ok(())
}

/// Discards all memory between pages with content. A transparent huge page may have allocated this memory, and accesses to it
/// would cause no page fault.
fn empty_gaps(ram: &RamBlock, written: &DirtyBitmap) -> Result<(), MigrationError> {
    let mut gap = None;
    for page in 0..=written.pages() {
        let is_gap = page < written.pages() && !written.test(page);
        match (gap, is_gap) {
            (None, true) => gap = Some(page),
            (Some(first), false) => {
                ram.discard(first * PAGE_SIZE, (page - first) * PAGE_SIZE)?;
                gap = None;
            }
            _ => {}
        }
    }
    Ok(())
}
