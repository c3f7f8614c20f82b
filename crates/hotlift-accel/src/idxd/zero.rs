//! Detection of zero pages by devices.
//!
//! ```text
//! channel thread: fill a batch -> submit -> (encode and send the batch before) -> wait -> verdicts
//! completion thread:     poll the records of all batches in flight, wake their waiters; sleep if none
//! ```
//!
//! Devices get batches in turn. The CPU checks what a device did not check, from the first unchecked byte on. This happens
//! after:
//! - a page fault, or a refused descriptor
//! - a full queue
//! - a failure or a timeout of a device, which is then taken out of service

use std::marker::PhantomData;
use std::time::Duration;

use hotlift_mem::{GuestRun, PAGE_SIZE};

use super::cpu::CpuFeatures;
use super::descriptor::Descriptor;
use super::portal::{Portal, Submitted};
use super::record::{Completion, Record};
use super::sync::{
    Arc, AtomicU32, AtomicU64, AtomicUsize, Condvar, Instant, Mutex, MutexGuard, OnceLock,
    Ordering, PoisonError, spin_loop,
};
use super::wait::Waiter;

/// Maximum retries of a batch while the queue is full: the value of QEMU's patch series for a batch of 128 pages. Then the CPU
/// checks the rest of the batch, and the queue can drain.
const FULL_RETRIES: u32 = 12_800;

/// Consecutive batches rejected by a full queue after which the device is taken out of service. A queue that other processes
/// have filled has room sooner. A dead device, or a disabled shared queue, only reports a full queue.
const REFUSED: u32 = 64;

/// Timeout of a batch. A device checks 128 pages in 20 us; a page fault takes a millisecond at worst.
const DEADLINE: Duration = Duration::from_secs(1);

/// Bytes of a page, with the type of a descriptor's field.
const PAGE: u32 = 4096;
const _: () = assert!(PAGE as usize == PAGE_SIZE);

/// A device that executes batches.
pub struct Device {
    /// Node of the queue, as in "/dev/dsa/wq4.0".
    pub name: String,
    /// Portal of the queue.
    pub portal: Box<dyn Portal>,
    /// Maximum number of descriptors in a batch; below 2, the device accepts no batches.
    pub max_batch: u32,
    /// NUMA node of the device; `None` if the host has only one.
    pub node: Option<u32>,
}

/// Counts of pages, by device and by CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ZeroJobs {
    /// Pages checked by a device alone.
    pub hardware: u64,
    /// Pages checked by the CPU, completely or from the byte at which a device stopped.
    pub software: u64,
    /// Submissions repeated because a queue was full.
    pub retries: u64,
}

/// Finds zero pages by devices, for all channels of a migration.
pub struct ZeroFinder {
    devices: Vec<Service>,
    next: AtomicUsize,
    in_flight: Mutex<InFlightBatches>,
    more: Condvar,
    hardware: AtomicU64,
    software: AtomicU64,
    retries: AtomicU64,
    deadline: Duration,
    waiter: Waiter,
}

/// Submitted batches for which the completion thread waits.
#[derive(Default)]
struct InFlightBatches {
    list: Vec<(Box<BatchMemory>, Arc<Slot>)>,
    /// Batches that are being submitted, and are not in the list yet.
    submitting: usize,
    closed: bool,
    /// True if the completion thread has ended.
    poller_ended: bool,
}

/// A device and its service state.
struct Service {
    device: Device,
    /// True if the device is on the NUMA node of the checked memory.
    near: bool,
    /// Consecutive batches of which the device accepted nothing.
    refused: AtomicU32,
    out: OnceLock<String>,
}

/// Place through which the completion thread returns a batch to its channel.
#[derive(Default)]
struct Slot {
    returned: Mutex<Option<BatchReturn>>,
    wake: Condvar,
}

enum BatchReturn {
    Done(Box<BatchMemory>),
    /// The device did not answer. It may still write to the batch's memory, which is never freed.
    Lost(usize),
}

/// One batch: memory that a device reads and writes.
struct BatchMemory {
    pages: Vec<Page>,
    descriptors: Box<[Descriptor]>,
    records: Box<[Record]>,
    /// Number of pages of each submitted descriptor, in the order of the pages. A descriptor for one page uses the record of
    /// the page. A batch of several pages uses the next record of `head_records`.
    heads: Vec<usize>,
    head_records: Box<[Record]>,
    /// Index of the device in [`ZeroFinder`].
    device: usize,
    begun: Option<Instant>,
}

/// Address of a page. The [`ZeroBatch`] keeps the page borrowed.
#[derive(Debug, Clone, Copy)]
struct Page(*const u8);

// SAFETY: an address is a number.
unsafe impl Send for Page {}

// SAFETY: descriptors hold addresses of this batch's own memory, and of pages that are only read.
unsafe impl Send for BatchMemory {}

/// A channel's batch of pages, reused from packet to packet. Dropping the value waits until the device has finished.
pub struct ZeroBatch<'a> {
    finder: &'a ZeroFinder,
    batch: Option<Box<BatchMemory>>,
    slot: Arc<Slot>,
    /// Maximum number of pages in the batch.
    room: usize,
    pages: PhantomData<GuestRun<'a>>,
}

/// Result of the zero check of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageResult {
    /// The page is zero.
    Zero,
    /// The page is not zero.
    Normal,
    /// The bytes before this offset are zero; the CPU must check the rest of the page.
    CheckFrom(usize),
}

impl ZeroFinder {
    /// Creates a finder for memory on NUMA node `home` (`None`: unknown). It uses the devices of that node in turn. It uses
    /// devices of other nodes only if no device of `home` is in service: a page read from another socket costs bandwidth of
    /// both sockets. A thread must run [`ZeroFinder::listen`].
    #[must_use]
    pub fn new(devices: Vec<Device>, home: Option<u32>) -> Self {
        Self::with_deadline(devices, home, DEADLINE)
    }

    /// Creates a finder like [`ZeroFinder::new`], with another timeout of a batch.
    #[must_use]
    pub fn with_deadline(devices: Vec<Device>, home: Option<u32>, deadline: Duration) -> Self {
        let service = |device: Device| Service {
            near: home.is_none() || device.node.is_none() || device.node == home,
            device,
            refused: AtomicU32::new(0),
            out: OnceLock::new(),
        };
        Self {
            devices: devices.into_iter().map(service).collect(),
            next: AtomicUsize::new(0),
            in_flight: Mutex::default(),
            more: Condvar::new(),
            hardware: AtomicU64::new(0),
            software: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            deadline,
            waiter: Waiter::of(CpuFeatures::of_this_cpu()),
        }
    }

    /// Returns an empty batch for at most `pages` pages.
    #[must_use]
    pub fn batch(&self, pages: usize) -> ZeroBatch<'_> {
        ZeroBatch {
            finder: self,
            batch: Some(BatchMemory::new(pages)),
            slot: Arc::default(),
            room: pages,
            pages: PhantomData,
        }
    }

    /// Returns the counts of pages, by device and by CPU.
    #[must_use]
    pub fn jobs(&self) -> ZeroJobs {
        ZeroJobs {
            hardware: self.hardware.load(Ordering::Relaxed),
            software: self.software.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
        }
    }

    /// Returns the devices out of service, each with the reason.
    #[must_use]
    pub fn out_of_service(&self) -> Vec<String> {
        let out =
            |service: &Service| Some(format!("{}: {}", service.device.name, service.out.get()?));
        self.devices.iter().filter_map(out).collect()
    }

    /// Returns the devices' names.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let name = |service: &Service| service.device.name.clone();
        self.devices.iter().map(name).collect()
    }

    fn lock(&self) -> MutexGuard<'_, InFlightBatches> {
        self.in_flight
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends [`ZeroFinder::listen`] as soon as no batch is in flight. The CPU checks batches that are submitted later.
    pub fn close(&self) {
        self.lock().closed = true;
        self.more.notify_all();
    }

    /// Returns every completed batch to its channel, until [`ZeroFinder::close`] is called. The completion thread runs this
    /// function.
    pub fn listen(&self) {
        let mut polled = PolledBatches {
            finder: self,
            list: Vec::new(),
        };
        let PolledBatches { list: polled, .. } = &mut polled;
        loop {
            let mut in_flight = self.lock();
            while in_flight.list.is_empty() && polled.is_empty() {
                if in_flight.closed && in_flight.submitting == 0 {
                    return;
                }
                in_flight = self
                    .more
                    .wait(in_flight)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            polled.append(&mut in_flight.list);
            drop(in_flight);
            // Removes only completed batches; the rest keeps its order.
            let mut at = 0;
            while at < polled.len() {
                match self.poll(&polled[at].0) {
                    PollResult::Pending => at += 1,
                    PollResult::Complete => {
                        self.completed(&polled[at].0);
                        let (batch, slot) = polled.remove(at);
                        slot.put(BatchReturn::Done(batch));
                    }
                    PollResult::TimedOut => {
                        let (batch, slot) = polled.remove(at);
                        let service = &self.devices[batch.device];
                        let _ = service
                            .out
                            .set(format!("no answer within {:?}", self.deadline));
                        slot.lose(batch);
                    }
                }
            }
            // The oldest batch probably completes first.
            let mut heads = polled.iter().flat_map(|(batch, _)| batch.head_records());
            if let Some(record) = heads.find(|record| record.read() == Completion::Pending) {
                self.waiter.wait(record);
            }
        }
    }

    fn poll(&self, batch: &BatchMemory) -> PollResult {
        // The time is read first: a thread that was not scheduled for long must not count a completed batch as lost.
        let late = batch
            .begun
            .is_some_and(|begun| begun.elapsed() >= self.deadline);
        let mut heads = batch.head_records();
        if heads.all(|record| record.read() != Completion::Pending) {
            return PollResult::Complete;
        }
        if late {
            PollResult::TimedOut
        } else {
            PollResult::Pending
        }
    }

    fn completed(&self, batch: &BatchMemory) {
        for _ in &batch.heads {
            self.devices[batch.device].device.portal.completed();
        }
    }

    /// Returns the next device in turn that is in service; `None` if no device is in service.
    fn choose(&self) -> Option<usize> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let in_turn = |near| {
            let of_kind = |&k: &usize| self.devices[k].near == near;
            let all = (0..self.devices.len()).filter(of_kind).count();
            let mut kind = (0..self.devices.len()).filter(of_kind).cycle();
            (kind.by_ref().skip(first % all.max(1)))
                .take(all)
                .find(|&k| self.devices[k].out.get().is_none())
        };
        in_turn(true).or_else(|| in_turn(false))
    }
}

/// Batches that the completion thread polls. If this thread panics, the batches are returned as lost, and the CPU checks later
/// batches.
struct PolledBatches<'a> {
    finder: &'a ZeroFinder,
    list: Vec<(Box<BatchMemory>, Arc<Slot>)>,
}

impl Drop for PolledBatches<'_> {
    fn drop(&mut self) {
        let mut in_flight = self.finder.lock();
        in_flight.poller_ended = true;
        self.list.append(&mut in_flight.list);
        drop(in_flight);
        for (batch, slot) in self.list.drain(..) {
            slot.lose(batch);
        }
    }
}

/// A batch during its submission: the device may already have some of its descriptors.
struct Submission<'a> {
    finder: &'a ZeroFinder,
    slot: &'a Slot,
    batch: Option<Box<BatchMemory>>,
}

impl Drop for Submission<'_> {
    fn drop(&mut self) {
        // The submission panicked; the device may have accepted descriptors.
        if let Some(batch) = self.batch.take() {
            self.slot.lose(batch);
        }
        self.finder.lock().submitting -= 1;
        self.finder.more.notify_one();
    }
}

enum PollResult {
    Pending,
    Complete,
    TimedOut,
}

impl Service {
    /// Counts a batch that a full queue rejected. Takes the device out of service after [`REFUSED`] consecutive ones.
    fn was_full(&self) {
        if self.refused.fetch_add(1, Ordering::Relaxed) + 1 >= REFUSED {
            let reason = format!("its queue was full for {REFUSED} batches in a row");
            let _ = self.out.set(reason);
        }
    }
}

impl Slot {
    fn put(&self, batch: BatchReturn) {
        *self.returned.lock().unwrap_or_else(PoisonError::into_inner) = Some(batch);
        self.wake.notify_all();
    }

    /// Leaks the memory of a batch, to which a device may still write, and returns the batch to its channel as lost.
    fn lose(&self, batch: Box<BatchMemory>) {
        let pages = batch.pages.len();
        std::mem::forget(batch);
        self.put(BatchReturn::Lost(pages));
    }

    fn wait(&self) -> BatchReturn {
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(batch) = returned.take() {
                return batch;
            }
            returned = self
                .wake
                .wait(returned)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl BatchMemory {
    /// Allocates the memory of a batch of at most `pages` pages.
    fn new(pages: usize) -> Box<Self> {
        let records = |count| (0..count).map(|_| Record::default()).collect();
        Box::new(Self {
            pages: Vec::with_capacity(pages),
            descriptors: vec![Descriptor::noop(std::ptr::null()); pages].into(),
            records: records(pages),
            heads: Vec::with_capacity(pages),
            head_records: records(pages.div_ceil(2)),
            device: 0,
            begun: None,
        })
    }

    /// Returns the records of the submitted descriptors. The batch is complete when all these records are complete.
    fn head_records(&self) -> impl Iterator<Item = &Record> {
        let mut first = 0;
        let mut batch = 0;
        self.heads.iter().map(move |&pages| {
            let record = if pages == 1 {
                &self.records[first]
            } else {
                batch += 1;
                &self.head_records[batch - 1]
            };
            first += pages;
            record
        })
    }

    /// Returns the count of pages submitted to the device.
    fn submitted(&self) -> usize {
        self.heads.iter().sum()
    }
}

impl<'a> ZeroBatch<'a> {
    /// Adds a page to the batch.
    ///
    /// # Panics
    ///
    /// If the batch is in flight or full, or the page has another size.
    pub fn push(&mut self, page: GuestRun<'a>) {
        assert_eq!(page.len(), PAGE_SIZE, "a page");
        let Some(batch) = &mut self.batch else {
            panic!("a batch in flight takes no page");
        };
        assert!(batch.pages.len() < self.room, "a full batch takes no page");
        batch.pages.push(Page(page.as_ptr()));
    }

    /// Submits the pages to a device and returns without waiting. Does nothing if the batch is in flight.
    pub fn submit(&mut self) {
        let Some(mut batch) = self.batch.take() else {
            return;
        };
        batch.heads.clear();
        let mut in_flight = self.finder.lock();
        let is_polled = !in_flight.closed && !in_flight.poller_ended;
        let Some(device) = self.finder.choose().filter(|_| is_polled) else {
            drop(in_flight);
            return self.slot.put(BatchReturn::Done(batch));
        };
        in_flight.submitting += 1;
        drop(in_flight);
        batch.device = device;
        let mut submission = Submission {
            finder: self.finder,
            slot: &self.slot,
            batch: Some(batch),
        };
        let Some(batch) = &mut submission.batch else {
            return;
        };
        self.submit_to(batch);
        batch.begun = Some(Instant::now());
        let Some(batch) = submission.batch.take() else {
            return;
        };
        if batch.heads.is_empty() {
            return self.slot.put(BatchReturn::Done(batch));
        }
        let mut in_flight = self.finder.lock();
        if in_flight.poller_ended {
            drop(in_flight);
            return self.slot.lose(batch);
        }
        in_flight.list.push((batch, Arc::clone(&self.slot)));
    }

    fn submit_to(&self, batch: &mut BatchMemory) {
        let service = &self.finder.devices[batch.device];
        let device = &service.device;
        for (at, page) in batch.pages.iter().enumerate() {
            let record = &batch.records[at];
            record.clear();
            batch.descriptors[at] = Descriptor::is_zero(page.0, PAGE, record);
        }
        let longest = usize::try_from(device.max_batch)
            .unwrap_or(usize::MAX)
            .max(1);
        let (mut first, mut batches, mut retries) = (0, 0, 0);
        while first < batch.pages.len() {
            let pages = longest.min(batch.pages.len() - first);
            let head = if pages == 1 {
                batch.descriptors[first]
            } else {
                let record = &batch.head_records[batches];
                record.clear();
                let count = u32::try_from(pages).unwrap_or(u32::MAX);
                Descriptor::batch(&raw const batch.descriptors[first], count, record)
            };
            // SAFETY: the batch's memory is on the heap, and is reused or freed only after the batch is complete. Its pages are
            // guest memory, borrowed until the wait for the batch ends. The device never writes to the pages; its later reads
            // fail if they are unmapped.
            match unsafe { device.portal.submit(&head) } {
                Ok(Submitted::Accepted) => {
                    service.refused.store(0, Ordering::Relaxed);
                    batches += usize::from(pages > 1);
                    batch.heads.push(pages);
                    first += pages;
                }
                Ok(Submitted::Full) if retries < FULL_RETRIES => {
                    retries += 1;
                    spin_loop();
                }
                Ok(Submitted::Full) => {
                    if batch.heads.is_empty() {
                        service.was_full();
                    }
                    break;
                }
                Err(error) => {
                    let _ = service.out.set(error.to_string());
                    break;
                }
            }
        }
        self.finder
            .retries
            .fetch_add(retries.into(), Ordering::Relaxed);
    }

    /// Waits for the device and calls `verdict` with the result of each page, in order. The batch is empty afterwards, even if
    /// `verdict` panics. Returns at once, without a call, if the batch was not submitted.
    pub fn wait(&mut self, mut verdict: impl FnMut(PageResult)) {
        if self.batch.is_some() {
            return;
        }
        let (mut hardware, mut software) = (0, 0);
        // The batch gets its memory back, and is emptied, before the first verdict: `verdict` may panic, and dropping a batch
        // without its memory would wait for it again.
        let batch = match self.slot.wait() {
            BatchReturn::Done(batch) => self.batch.insert(batch),
            BatchReturn::Lost(pages) => {
                self.batch = Some(BatchMemory::new(self.room));
                for _ in 0..pages {
                    verdict(PageResult::CheckFrom(0));
                }
                let count = pages as u64;
                self.finder.software.fetch_add(count, Ordering::Relaxed);
                return;
            }
        };
        let (pages, submitted) = (batch.pages.len(), batch.submitted());
        batch.pages.clear();
        let service = &self.finder.devices[batch.device];
        for at in 0..pages {
            let completion = if at < submitted {
                batch.records[at].read()
            } else {
                Completion::Pending
            };
            let what = match completion {
                Completion::Done { differs: true } | Completion::Fault { differs: true, .. } => {
                    PageResult::Normal
                }
                Completion::Done { differs: false } => PageResult::Zero,
                Completion::Fault { completed, .. } => {
                    let done = usize::try_from(completed.min(PAGE)).unwrap_or(0);
                    PageResult::CheckFrom(done)
                }
                Completion::Pending => PageResult::CheckFrom(0),
                Completion::Failed(code) => {
                    let _ = service.out.set(format!("status {code:#04x}"));
                    PageResult::CheckFrom(0)
                }
                Completion::BatchFailed => PageResult::CheckFrom(0),
            };
            match what {
                PageResult::CheckFrom(_) => software += 1,
                PageResult::Zero | PageResult::Normal => hardware += 1,
            }
            verdict(what);
        }
        for record in batch.head_records() {
            if let Completion::Failed(code) = record.read() {
                let _ = service.out.set(format!("status {code:#04x}"));
            }
        }
        self.finder.hardware.fetch_add(hardware, Ordering::Relaxed);
        self.finder.software.fetch_add(software, Ordering::Relaxed);
    }
}

impl Drop for ZeroBatch<'_> {
    fn drop(&mut self) {
        self.wait(|_| {});
    }
}
