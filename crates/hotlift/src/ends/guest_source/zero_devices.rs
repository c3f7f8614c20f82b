//! `zero-page-detection=dsa-accel`: zero-page detection by devices, and its pipeline in a channel.
//!
//! ```text
//! pages of packet n+1 -> device        while packet n, whose results are there, is encoded and sent
//! ```
//!
//! A channel has two batches: one is with a device, the other is filled or sent. Untouched pages are not sent to a device,
//! because the kernel has reported them as zero.

use std::path::Path;

use hotlift_accel::idxd::zero::{PageResult, ZeroBatch, ZeroFinder};
use hotlift_accel::idxd::{CpuFeatures, queue};
use hotlift_mem::{GuestRun, PAGE_SIZE, RamBlock};
use hotlift_methods::Accelerator;

use crate::control::Control;
use crate::ends::guest_source::normal_share::NormalShare;
use crate::error::MigrationError;
use crate::figures::JobFigures;
use crate::guest::Guest;
use crate::options::{AccelPath, ZeroPageOptions};

/// Devices of one migration.
pub(crate) struct ZeroDevices {
    pub finder: ZeroFinder,
    /// Devices that could not be opened.
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
    if !options.devices || accelerator == Accelerator::Off {
        return Ok(None);
    }
    let (mut devices, mut missing) = (Vec::new(), None);
    for path in &options.accel_path {
        let opened = match path {
            AccelPath::Dsa(path) => queue::open(Path::new("/"), path, CpuFeatures::of_this_cpu()),
            #[cfg(feature = "simulated")]
            AccelPath::DsaModel { behaviour, .. } => {
                hotlift_accel::idxd::simulated::open(*behaviour)
            }
        };
        match opened {
            Ok(device) => devices.push(device),
            Err(source) => {
                let error = MigrationError::ZeroDevice { source };
                if matches!(accelerator, Accelerator::Required(_)) {
                    return Err(error);
                }
                missing.get_or_insert(error.chain());
            }
        }
    }
    if devices.is_empty() {
        control.accelerator_stats().set_zero(JobFigures {
            fallback: missing,
            ..JobFigures::default()
        });
        return Ok(None);
    }
    let largest = guest.ram().iter().max_by_key(|block| block.len());
    let home = largest.and_then(|block| block.numa_node());
    Ok(Some(ZeroDevices {
        finder: ZeroFinder::new(devices, home),
        missing,
    }))
}

impl ZeroDevices {
    /// Returns the job statistics so far.
    pub(crate) fn figures(&self) -> JobFigures {
        let jobs = self.finder.jobs();
        let out = self.finder.out_of_service().into_iter().next();
        JobFigures {
            hardware: jobs.hardware,
            software: jobs.software,
            retries: jobs.retries,
            raw_pages: 0,
            devices: self.finder.names(),
            fallback: out.or_else(|| self.missing.clone()),
        }
    }

    /// Ends the thread that polls devices, after the jobs in flight.
    pub(crate) fn close(&self) {
        self.finder.close();
    }
}

/// The two batches of a channel.
pub(crate) struct Pipeline<'a> {
    batches: [Filling<'a>; 2],
    /// Index of the batch that is being filled; the other one is with a device, or empty.
    filled: usize,
    /// Pages of a packet.
    pages: usize,
}

/// Known pages of one packet.
struct Filling<'a> {
    batch: ZeroBatch<'a>,
    block: usize,
    /// Offsets of the pages in the batch.
    asked: Vec<(u64, GuestRun<'a>)>,
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
            filling.batch.push(page);
        }
        Ok(filling.len() == self.pages)
    }

    /// Submits the filled batch to a device, and takes the results of the previous one. Returns its RAM block, and appends the
    /// offsets of its normal pages and of its zero pages.
    pub(crate) fn turn(
        &mut self,
        share: &mut NormalShare,
        normal: &mut Vec<u64>,
        zero: &mut Vec<u64>,
    ) -> usize {
        self.batches[self.filled].batch.submit();
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
        let mut asked = before.asked.drain(..);
        before.batch.wait(|verdict| {
            let Some((offset, page)) = asked.next() else {
                return;
            };
            let is_zero = match verdict {
                PageResult::Zero => true,
                PageResult::Normal => false,
                PageResult::LookFrom(at) => page.split_at(at).1.is_zero(),
            };
            sort(is_zero, offset);
        });
        before.block
    }
}

impl Filling<'_> {
    fn len(&self) -> usize {
        self.asked.len() + self.untouched.len()
    }
}
