//! A guest that runs here before all its pages are there.
//!
//! ```text
//! ADVISE    RAM is emptied                        pages of precopy, as ever
//! DISCARD   what the source has changed since is missing again
//! PACKAGED  {LISTEN devices PING RUN}             the guest runs
//!           pages as they are asked for, each once
//! END, EOF  what never came is zero               SHUT(0)
//! ```
//!
//! | file | what it does |
//! |---|---|
//! | `waits` | who waits for which page, and for how long |
//! | `lazy_ram` | places pages that have come, and reads which the guest touches |
//! | `blocktime` | how long vCPUs stand still for them |
//! | `link` | what is said to the source, over whichever connection there is |
//! | `run` | the threads: devices and RUN on `mig/dst/main`, pages on `mig/dst/listen`, faults on `mig/dst/fault` |
//! | `recovery` | another connection in the place of one that was lost |
//! | `agreement` | decides what is answered to a source that resumes, and for how long |
//!
//! RUN is this side's commit: up to there every failure leaves the guest with the source, and it never runs here. From
//! there on it is here for good, and what fails leaves it without pages that it waits for.

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

/// Takes pages back that have come.
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

/// Empties whatever lies between pages that hold something: a transparent huge page may have filled it.
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
