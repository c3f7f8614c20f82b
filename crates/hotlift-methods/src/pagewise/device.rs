//! A channel's use of an accelerator. After a permanent failure the CPU does all the work.

use std::iter::Peekable;

use hotlift_mem::PAGE_SIZE;

use super::Wrapper;
use crate::device::{Collected, Direction, Hardware, PageDevice, PageFailure, Submitted};
use crate::libdeflate::{self, Decompressor};
use crate::target::Extent;
use crate::{Accelerator, Jobs, MethodError, RunsOn};

/// Maximum retries of a page while the device's queue is full (QEMU: 3). Then the CPU processes the page, and the queue can
/// drain.
const RETRIES: u32 = 3;
/// Consecutive failures after which the channel stops using the device: too many for a chance error. The CPU repeats each
/// failed page.
const FAILURES: u32 = 8;
/// Consecutive pages rejected by a full queue after which the channel stops using the device. They are 64 packets, which the
/// CPU processes in a tenth of a second. A shared queue has free entries sooner. A dead device only reports a full queue.
const REFUSED: u32 = 64 * 128;

/// A channel's device, or the reason why it is missing, with its job counts.
pub(crate) struct Service {
    device: Option<Box<dyn PageDevice>>,
    direction: Direction,
    /// Slots with a job in flight.
    in_flight: Box<[bool]>,
    /// Consecutive failures.
    failures: u32,
    full_queue_pages: u32,
    last_failure: Option<PageFailure>,
    /// Reason to abandon the device as soon as no job is in flight.
    fallback_reason: Option<String>,
    runs_on: RunsOn,
    jobs: Jobs,
}

/// Result of the device for a page.
#[derive(Debug)]
pub(crate) enum Done<'a> {
    /// Output of the device: a whole page, or a compressed stream shorter than a page.
    Output(&'a [u8]),
    /// The compressed page is not smaller than the page.
    DoesNotFit,
    /// The device has no result: the CPU must process the page.
    ByCpu,
}

impl Service {
    /// Opens the accelerator of `method` for one channel. Without an accelerator the CPU does all jobs. `kind` is the device's
    /// name for messages.
    ///
    /// # Errors
    ///
    /// [`MethodError::Unavailable`] if a required device is missing.
    pub(crate) fn open(
        method: &'static str,
        kind: &'static str,
        accelerator: Accelerator,
        direction: Direction,
    ) -> Result<Self, MethodError> {
        let opened = accelerator.open(method, kind, |hardware| hardware.pages(direction));
        let (device, runs_on) = opened?;
        Ok(Self::new(device, direction, runs_on))
    }

    fn new(device: Option<Box<dyn PageDevice>>, direction: Direction, runs_on: RunsOn) -> Self {
        let slots = device.as_ref().map_or(0, |device| device.slots());
        Self {
            device,
            direction,
            in_flight: vec![false; slots].into_boxed_slice(),
            failures: 0,
            full_queue_pages: 0,
            last_failure: None,
            fallback_reason: None,
            runs_on,
            jobs: Jobs::default(),
        }
    }

    /// Starts a packet. `inputs` has one element for each page. The device does not process a page whose element is `None`.
    pub(crate) fn packet<'i, I>(&mut self, inputs: I) -> Packet<'_, 'i, I>
    where
        I: Iterator<Item = Option<&'i [u8]>>,
    {
        let slots = self.device.as_ref().map_or(0, |device| device.slots());
        Packet {
            slots,
            service: self,
            inputs: inputs.peekable(),
            offered: 0,
            was_rejected: false,
            page: 0,
        }
    }

    pub(crate) fn jobs(&self) -> Jobs {
        self.jobs
    }

    pub(crate) fn runs_on(&self) -> RunsOn {
        self.runs_on.clone()
    }

    /// Submits `input` as the job of a slot. Returns false only if the queue is full: a failed submission also returns true.
    ///
    /// # Safety
    ///
    /// As for [`PageDevice::submit`].
    unsafe fn offer(&mut self, slot: usize, input: &[u8]) -> bool {
        let Some(device) = self
            .device
            .as_mut()
            .filter(|_| self.fallback_reason.is_none())
        else {
            return true;
        };
        // SAFETY: guaranteed by the caller.
        match unsafe { device.submit(slot, input) } {
            Submitted::Accepted => {
                self.in_flight[slot] = true;
                self.full_queue_pages = 0;
            }
            Submitted::Busy => return false,
            Submitted::Failed(failure) => self.failed(failure),
        }
        true
    }

    /// Waits for the job of a slot. Returns its result; `None` if no job is in flight or the job failed.
    fn collect(&mut self, slot: usize) -> Option<Collected> {
        let device = self.device.as_mut()?;
        if !std::mem::take(self.in_flight.get_mut(slot)?) {
            return None;
        }
        let collected = device.collect(slot);
        let fits = match (&collected, self.direction) {
            (Collected::Done(len), Direction::Compress) => *len > 0,
            (Collected::Done(len), Direction::Decompress) => *len == PAGE_SIZE,
            (Collected::DoesNotFit, direction) => direction == Direction::Compress,
            (Collected::Failed(_) | Collected::NoAnswer, _) => false,
        };
        if fits {
            self.failures = 0;
            return Some(collected);
        }
        match collected {
            Collected::Done(len) => self.failed(PageFailure::Length(len)),
            Collected::DoesNotFit => self.failed(PageFailure::Length(PAGE_SIZE + 1)),
            Collected::Failed(failure) => self.failed(failure),
            Collected::NoAnswer => self.abandon(),
        }
        None
    }

    fn failed(&mut self, failure: PageFailure) {
        self.failures += 1;
        self.last_failure = Some(failure);
        if self.failures >= FAILURES {
            let reason = format!("{FAILURES} failures in a row, the last: {failure}");
            self.fallback_reason.get_or_insert(reason);
        }
    }

    /// Counts a page that a full queue rejected.
    fn was_full(&mut self) {
        self.full_queue_pages += 1;
        if self.full_queue_pages >= REFUSED {
            let reason = format!("its queue was full for {REFUSED} pages in a row");
            self.fallback_reason.get_or_insert(reason);
        }
    }

    fn abandon(&mut self) {
        if let Some(device) = self.device.take() {
            device.abandon();
        }
        self.in_flight.fill(false);
        self.leave("a job did not end");
    }

    /// Collects all jobs still in flight, and closes a device that failed.
    fn settle(&mut self) {
        for slot in 0..self.in_flight.len() {
            self.collect(slot);
        }
        if let Some(reason) = self.fallback_reason.take() {
            self.device = None;
            self.leave(&reason);
        }
    }

    fn leave(&mut self, reason: &str) {
        if let RunsOn::Hardware(what) = &self.runs_on {
            self.runs_on = RunsOn::Fallback(format!("{what}: {reason}").into());
        }
    }
}

/// One packet's pages on the device. Pages are submitted until the device accepts no more; then the packet waits for the first
/// page. Each returned page makes room for the submission of another.
///
/// Dropping the packet ends the device's use of the inputs, so a packet must not be leaked.
pub(crate) struct Packet<'s, 'i, I: Iterator<Item = Option<&'i [u8]>>> {
    service: &'s mut Service,
    /// Pages not yet submitted.
    inputs: Peekable<I>,
    /// Maximum jobs in flight; 0 without a device.
    slots: usize,
    /// Pages submitted to the device or skipped.
    offered: usize,
    /// True if a full queue has already rejected the next page.
    was_rejected: bool,
    /// Pages returned to the caller.
    page: usize,
}

impl<'i, I: Iterator<Item = Option<&'i [u8]>>> Packet<'_, 'i, I> {
    /// Returns the device's result for the next page. A page without a result is counted as a job of the CPU.
    pub(crate) fn next(&mut self) -> Done<'_> {
        let page = self.page;
        self.page += 1;
        let mut collected = None;
        if self.slots > 0 {
            while self.offered < page + self.slots && self.offer() {}
            let mut retries = 0;
            while self.offered == page && retries < RETRIES && !self.offer() {
                retries += 1;
            }
            if self.offered == page {
                self.service.was_full();
                self.pass();
            }
            collected = self.service.collect(page % self.slots);
        }
        let jobs = &mut self.service.jobs;
        match (collected, &self.service.device) {
            (Some(Collected::Done(len)), Some(device)) if len <= PAGE_SIZE => {
                jobs.hardware += 1;
                if self.service.direction == Direction::Compress && len == PAGE_SIZE {
                    return Done::DoesNotFit;
                }
                Done::Output(device.output(page % self.slots, len))
            }
            (Some(_), _) => {
                jobs.hardware += 1;
                Done::DoesNotFit
            }
            (None, _) => {
                jobs.software += 1;
                Done::ByCpu
            }
        }
    }

    /// Counts one page as sent uncompressed.
    pub(crate) fn is_raw(&mut self) {
        self.service.jobs.raw_pages += 1;
    }

    /// Submits the next page, or skips a page that the device must not process. Returns false if the queue is full or no page
    /// is left.
    fn offer(&mut self) -> bool {
        let slot = self.offered % self.slots;
        match self.inputs.peek() {
            None => return false,
            Some(None) => {}
            Some(Some(input)) => {
                if std::mem::replace(&mut self.was_rejected, true) {
                    self.service.jobs.retries += 1;
                }
                // SAFETY: the input lives for 'i, which is longer than this value. Dropping this value collects the job.
                if !unsafe { self.service.offer(slot, input) } {
                    return false;
                }
            }
        }
        self.pass();
        true
    }

    fn pass(&mut self) {
        self.inputs.next();
        self.offered += 1;
        self.was_rejected = false;
    }
}

impl<'i, I: Iterator<Item = Option<&'i [u8]>>> Drop for Packet<'_, 'i, I> {
    fn drop(&mut self) {
        self.service.settle();
    }
}

/// Tests an accelerator before use: one device compresses a page, another decompresses the result.
///
/// # Errors
///
/// The reason, if a device cannot be opened, fails, or returns a wrong result.
pub(crate) fn trial(wrapper: Wrapper, hardware: &Hardware) -> Result<(), String> {
    let page: Vec<u8> = (0..PAGE_SIZE)
        .map(|i| b"hotlift "[i * i % 11 % 8])
        .collect();
    let run = |direction, input: &[u8]| -> Result<Vec<u8>, String> {
        let mut service = Service::new(
            Some(hardware.pages(direction)?),
            direction,
            RunsOn::Hardware("trial".into()),
        );
        let output = match service.packet(std::iter::once(Some(input))).next() {
            Done::Output(output) => Some(output.to_vec()),
            Done::DoesNotFit | Done::ByCpu => None,
        };
        let reason = match (service.last_failure, service.runs_on()) {
            (Some(failure), _) => failure.to_string(),
            (None, RunsOn::Fallback(reason)) => reason.to_string(),
            (None, _) => "its queue is full, or a page of text does not shrink".to_owned(),
        };
        output.ok_or_else(|| format!("{direction:?} of a page: {reason}"))
    };
    let stream = run(Direction::Compress, &page)?;
    let mut decompressor = Decompressor::new("trial").map_err(|error| error.to_string())?;
    let mut back = vec![0; PAGE_SIZE];
    let place = Extent {
        ptr: back.as_mut_ptr(),
        len: back.len(),
    };
    let deflate = stream.get(wrapper.header().len()..).unwrap_or_default();
    // SAFETY: the place is all of `back`.
    unsafe { decompressor.decompress(libdeflate::Wrapper::Raw, deflate, place) };
    if back != page {
        return Err("a page that it compressed does not decompress to its input".to_owned());
    }
    if run(Direction::Decompress, &stream)? != page {
        return Err("a page that it decompressed is wrong".to_owned());
    }
    Ok(())
}
