//! `zero-page-detection=dsa-accel`: zero-page detection by devices, and its pipeline in a channel.
//!
//! ```text
//! pages of packet n+1 -> device        while packet n, whose results are there, is encoded and sent
//! ```
//!
//! A channel has two batches: one is with a device, the other is filled or sent. Untouched pages are not sent to a device,
//! because the kernel has reported them as zero.

#[cfg(feature = "accel")]
mod dsa;

use std::error::Error;

use hotlift_mem::{GuestRun, PAGE_SIZE, RamBlock};
use hotlift_methods::Accelerator;

use crate::control::Control;
use crate::ends::guest_source::normal_share::NormalShare;
use crate::error::MigrationError;
use crate::figures::JobFigures;
use crate::guest::Guest;
use crate::options::ZeroPageOptions;

#[cfg(feature = "accel")]
use dsa::find;

/// The opened devices, if any, and the error of the first device that could not be opened.
type Found = (
    Option<Box<dyn FindZeros>>,
    Option<Box<dyn Error + Send + Sync>>,
);

/// Finds no devices, in a program without accelerators.
#[cfg(not(feature = "accel"))]
fn find(_: &[crate::options::AccelPath], _: Option<u32>) -> Found {
    (None, Some(hotlift_methods::NOT_BUILT_IN.into()))
}

/// Devices that detect zero pages. Pages without a result from a device are checked on the CPU.
pub(crate) trait FindZeros: Send + Sync {
    /// Creates a batch for at most `pages` pages, which the caller reuses for all packets.
    fn batch<'a>(&'a self, pages: usize) -> Box<dyn PageBatch<'a> + 'a>;

    /// Body of a thread: passes results of the devices to the batches until [`FindZeros::close`] is called.
    fn listen(&self);

    /// Ends [`FindZeros::listen`] after the jobs in flight.
    fn close(&self);

    /// Returns the job statistics so far.
    fn figures(&self) -> JobFigures;
}

/// Pages that a device checks for zeros together. Each page has its byte offset.
pub(crate) trait PageBatch<'a> {
    /// Submits pages to a device and returns without waiting.
    fn submit(&mut self, pages: &[(u64, GuestRun<'a>)]);

    /// Waits for the results of the submitted `pages`. Appends one value for each page: true for a zero page.
    fn wait(&mut self, pages: &[(u64, GuestRun<'a>)], are_zero: &mut Vec<bool>);
}

/// Devices of one migration.
pub(crate) struct ZeroDevices {
    pub finder: Box<dyn FindZeros>,
    /// Error of a device that could not be opened.
    missing: Option<String>,
}

/// Opens the devices of `accel-path` for the guest's RAM. Returns `None` if the CPU must detect zero pages.
///
/// # Errors
/// [`MigrationError::ZeroDevice`] if devices are required and one cannot be used.
pub(crate) fn open(
    guest: &dyn Guest,
    options: &ZeroPageOptions,
    accelerator: Accelerator,
    control: &Control,
) -> Result<Option<ZeroDevices>, MigrationError> {
    if !options.devices || matches!(accelerator, Accelerator::Off) {
        return Ok(None);
    }
    let largest = guest.ram().iter().max_by_key(|block| block.len());
    let home = largest.and_then(|block| block.numa_node());
    let (finder, missing) = find(&options.accel_path, home);
    let missing = match missing.map(|source| MigrationError::ZeroDevice { source }) {
        Some(error) if matches!(accelerator, Accelerator::Required(_)) => return Err(error),
        error => error.map(|error| error.chain()),
    };
    let Some(finder) = finder else {
        control.accelerator_stats().set_zero(JobFigures {
            fallback: missing,
            ..JobFigures::default()
        });
        return Ok(None);
    };
    Ok(Some(ZeroDevices { finder, missing }))
}

impl ZeroDevices {
    /// Returns the job statistics so far.
    pub(crate) fn figures(&self) -> JobFigures {
        let figures = self.finder.figures();
        JobFigures {
            fallback: figures.fallback.or_else(|| self.missing.clone()),
            ..figures
        }
    }
}

/// The two batches of a channel.
pub(crate) struct Pipeline<'a> {
    batches: [Filling<'a>; 2],
    /// Index of the batch that is being filled. The second batch is with a device, or empty.
    filled: usize,
    /// Pages of a packet.
    pages: usize,
}

/// Pages gathered for one packet.
struct Filling<'a> {
    batch: Box<dyn PageBatch<'a> + 'a>,
    block: usize,
    /// Byte offsets and memory of the pages in the batch.
    asked: Vec<(u64, GuestRun<'a>)>,
    /// Results for these pages: true for a zero page.
    are_zero: Vec<bool>,
    /// Offsets of pages that are known to be zero.
    untouched: Vec<u64>,
}

impl<'a> Pipeline<'a> {
    /// Creates batches of `pages` pages.
    pub(crate) fn new(devices: &'a ZeroDevices, pages: usize) -> Self {
        let filling = || Filling {
            batch: devices.finder.batch(pages),
            block: 0,
            asked: Vec::with_capacity(pages),
            are_zero: Vec::with_capacity(pages),
            untouched: Vec::with_capacity(pages),
        };
        Self {
            batches: [filling(), filling()],
            filled: 0,
            pages,
        }
    }

    /// Returns the RAM block of the pages in the filling batch, if any.
    pub(crate) fn block(&self) -> Option<usize> {
        let filling = &self.batches[self.filled];
        (filling.len() > 0).then_some(filling.block)
    }

    /// Adds a page; returns true if the packet is then full.
    pub(crate) fn add(
        &mut self,
        block: usize,
        ram: &'a RamBlock,
        offset: usize,
        untouched: bool,
    ) -> Result<bool, MigrationError> {
        let filling = &mut self.batches[self.filled];
        filling.block = block;
        if untouched {
            filling.untouched.push(offset as u64);
        } else {
            let page = ram.run(offset, PAGE_SIZE)?;
            filling.asked.push((offset as u64, page));
        }
        Ok(filling.len() == self.pages)
    }

    /// Submits the filled batch to a device, and waits for the results of the previous batch. Returns the RAM block of the
    /// previous batch, and appends the offsets of its pages to `normal` and `zero`.
    pub(crate) fn turn(
        &mut self,
        share: &mut NormalShare,
        normal: &mut Vec<u64>,
        zero: &mut Vec<u64>,
    ) -> usize {
        let filling = &mut self.batches[self.filled];
        filling.batch.submit(&filling.asked);
        self.filled = 1 - self.filled;
        let before = &mut self.batches[self.filled];
        let mut sort = |is_zero, offset| {
            let as_zero = is_zero && !share.takes();
            if as_zero { &mut *zero } else { &mut *normal }.push(offset);
        };
        before
            .untouched
            .drain(..)
            .for_each(|offset| sort(true, offset));
        before.batch.wait(&before.asked, &mut before.are_zero);
        let asked = before.asked.drain(..).zip(before.are_zero.drain(..));
        asked.for_each(|((offset, _), is_zero)| sort(is_zero, offset));
        before.block
    }
}

impl Filling<'_> {
    fn len(&self) -> usize {
        self.asked.len() + self.untouched.len()
    }
}
