//! Memory allocated ahead of its first use.

use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use crate::{GuestRun, PAGE_SIZE};

/// Allocates the memory of `run`, which starts on a page.
pub(crate) fn populate(run: GuestRun<'_>) -> rustix::io::Result<()> {
    loop {
        // SAFETY: the range is mapped; populating changes no byte of it.
        match unsafe { madvise(run.as_ptr().cast(), run.len(), Advice::LinuxPopulateWrite) } {
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Linux before 5.14, and mappings that it cannot populate.
            Err(Errno::INVAL) => {
                touch(run);
                return Ok(());
            }
            other => return other,
        }
    }
}

/// Writes to each page without changing it, whoever else writes there.
fn touch(run: GuestRun<'_>) {
    for offset in (0..run.len()).step_by(PAGE_SIZE) {
        // SAFETY: the byte is in the run; a byte is always aligned, and access to it is atomic.
        let byte = unsafe { AtomicU8::from_ptr(run.as_ptr().add(offset)) };
        byte.fetch_or(0, Ordering::Relaxed);
    }
}
