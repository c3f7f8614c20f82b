//! Zero pages, found by devices.
//!
//! ```text
//! channel thread: fill a batch -> submit -> (encode and send the batch before) -> wait -> verdicts
//! completion thread:            poll the records of all that is in flight, wake who waits; sleep if none
//! ```
//!
//! A batch goes to one device, the next batch to the next one. Whatever a device does not settle is left
//! to the CPU, with the bytes that are still to be looked at: page faults, refused descriptors, a full
//! queue, a device that errs or does not answer. The last two end its service.

use std::marker::PhantomData;
use std::time::Duration;

use hotlift_mem::{GuestRun, PAGE_SIZE};

use crate::cpu::CpuFeatures;
use crate::descriptor::Descriptor;
use crate::portal::{Portal, Submitted};
use crate::record::{Completion, Record};
use crate::sync::{
    Arc, AtomicU32, AtomicU64, AtomicUsize, Condvar, Instant, Mutex, MutexGuard, OnceLock,
    Ordering, PoisonError, spin_loop,
};
use crate::wait::Waiter;

/// How often a full queue is tried again: QEMU's series gives a batch of 128 so many turns for each.
/// After that the CPU does the rest of the batch, which gives the queue time, too.
const FULL_RETRIES: u32 = 12_800;

/// Batches in a row that find the queue full until it is left: other users leave it sooner, a dead or
/// disabled shared queue says no more than that it is full.
const REFUSED: u32 = 64;

/// How long a batch may take. A device looks at 128 pages in 20 us; a page fault that the system serves
/// takes a millisecond at worst.
const DEADLINE: Duration = Duration::from_secs(1);

/// Bytes of a page, as a descriptor has them.
const PAGE: u32 = 4096;
const _: () = assert!(PAGE as usize == PAGE_SIZE);

/// A device that takes work.
pub struct Device {
    /// Its node, as in "/dev/dsa/wq4.0".
    pub name: String,
    /// Its entrance.
    pub portal: Box<dyn Portal>,
    /// Longest batch; below 2 it takes none.
    pub max_batch: u32,
    /// Its NUMA node; `None` if the host has one only.
    pub node: Option<u32>,
}

/// What has been done by devices, and what not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ZeroJobs {
    /// Pages that a device has settled.
    pub hardware: u64,
    /// Pages that the CPU has settled, in whole or from where a device stopped.
    pub software: u64,
    /// Submissions repeated because a queue was full.
    pub retries: u64,
}

/// Devices, and what they work on.
pub struct ZeroFinder {
    devices: Vec<Service>,
    next: AtomicUsize,
    flights: Mutex<Flights>,
    more: Condvar,
    hardware: AtomicU64,
    software: AtomicU64,
    retries: AtomicU64,
    deadline: Duration,
    waiter: Waiter,
}

/// Batches that devices work on.
#[derive(Default)]
struct Flights {
    list: Vec<(Box<Flight>, Arc<Slot>)>,
    /// Batches that are about to be in the list.
    coming: usize,
    closed: bool,
    /// Nobody looks at them any more.
    deaf: bool,
}

/// A device and whether it is still used.
struct Service {
    device: Device,
    /// On the node of the memory that it is to look at.
    near: bool,
    /// Batches in a row of which it took nothing.
    refused: AtomicU32,
    out: OnceLock<String>,
}

/// Where a batch comes back to.
#[derive(Default)]
struct Slot {
    landed: Mutex<Option<Landing>>,
    wake: Condvar,
}

enum Landing {
    Done(Box<Flight>),
    /// The device did not answer. It may still write to the flight's memory, which is never freed.
    Lost(usize),
}

/// One batch: what a device reads, and what it writes to.
struct Flight {
    pages: Vec<Page>,
    descriptors: Box<[Descriptor]>,
    records: Box<[Record]>,
    /// What was submitted: so many pages each, from the first on. A head of one page has the page's own
    /// record, a longer one the batch record of its number.
    heads: Vec<usize>,
    head_records: Box<[Record]>,
    /// Index of the device.
    device: usize,
    begun: Option<Instant>,
}

/// A page's address. It is a number here; who gave it answers for what lies there.
#[derive(Debug, Clone, Copy)]
struct Page(*const u8);

// SAFETY: an address is a number.
unsafe impl Send for Page {}

// SAFETY: descriptors hold addresses, of the flight's own memory and of pages that are only read.
unsafe impl Send for Flight {}

/// A channel's batch of pages; it is kept from packet to packet. A batch that is in flight is waited for
/// when it is dropped.
pub struct ZeroBatch<'a> {
    finder: &'a ZeroFinder,
    flight: Option<Box<Flight>>,
    slot: Arc<Slot>,
    /// Pages at most.
    room: usize,
    pages: PhantomData<GuestRun<'a>>,
}

/// What is known of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is zero.
    Zero,
    /// It is not.
    Normal,
    /// The bytes before this one are zero; the CPU is to look at the rest.
    LookFrom(usize),
}

impl ZeroFinder {
    /// Work for `devices` on memory of NUMA node `home`, if it is known. Those of that node are used in
    /// turn, and the others in turn when none of them is in service: a page that crosses to another
    /// socket costs both sockets bandwidth. Some thread must [`ZeroFinder::listen`] to them.
    #[must_use]
    pub fn new(devices: Vec<Device>, home: Option<u32>) -> Self {
        Self::with_deadline(devices, home, DEADLINE)
    }

    /// The same with another deadline for a batch.
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
            flights: Mutex::default(),
            more: Condvar::new(),
            hardware: AtomicU64::new(0),
            software: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            deadline,
            waiter: Waiter::of(CpuFeatures::of_this_cpu()),
        }
    }

    /// A batch of at most `pages` pages.
    #[must_use]
    pub fn batch(&self, pages: usize) -> ZeroBatch<'_> {
        ZeroBatch {
            finder: self,
            flight: Some(Flight::new(pages)),
            slot: Arc::default(),
            room: pages,
            pages: PhantomData,
        }
    }

    /// What was done so far, and by what.
    #[must_use]
    pub fn jobs(&self) -> ZeroJobs {
        ZeroJobs {
            hardware: self.hardware.load(Ordering::Relaxed),
            software: self.software.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
        }
    }

    /// Devices that were taken out of service, each with the reason.
    #[must_use]
    pub fn out_of_service(&self) -> Vec<String> {
        let out =
            |service: &Service| Some(format!("{}: {}", service.device.name, service.out.get()?));
        self.devices.iter().filter_map(out).collect()
    }

    /// The devices' names.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let name = |service: &Service| service.device.name.clone();
        self.devices.iter().map(name).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends [`ZeroFinder::listen`] as soon as nothing is in flight. Batches that are submitted later are
    /// left to the CPU.
    pub fn close(&self) {
        self.lock().closed = true;
        self.more.notify_all();
    }

    /// Sends every batch back that has landed: what the completion thread does.
    pub fn listen(&self) {
        let mut flying = Flying {
            finder: self,
            list: Vec::new(),
        };
        let Flying { list: flying, .. } = &mut flying;
        loop {
            let mut flights = self.lock();
            while flights.list.is_empty() && flying.is_empty() {
                if flights.closed && flights.coming == 0 {
                    return;
                }
                flights = self
                    .more
                    .wait(flights)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            flying.append(&mut flights.list);
            drop(flights);
            // Only what is complete is taken out; the rest keeps its order.
            let mut at = 0;
            while at < flying.len() {
                match self.look(&flying[at].0) {
                    Look::Flies => at += 1,
                    Look::Landed => {
                        self.completed(&flying[at].0);
                        let (flight, slot) = flying.remove(at);
                        slot.put(Landing::Done(flight));
                    }
                    Look::Late => {
                        let (flight, slot) = flying.remove(at);
                        let service = &self.devices[flight.device];
                        let _ = service
                            .out
                            .set(format!("no answer within {:?}", self.deadline));
                        slot.lose(flight);
                    }
                }
            }
            // The oldest is the likeliest to end next.
            let mut heads = flying.iter().flat_map(|(flight, _)| flight.head_records());
            if let Some(record) = heads.find(|record| record.read() == Completion::Pending) {
                self.waiter.wait(record);
            }
        }
    }

    fn look(&self, flight: &Flight) -> Look {
        // Asked first: a thread that got no processor for long must not take what has ended for lost.
        let late = flight
            .begun
            .is_some_and(|begun| begun.elapsed() >= self.deadline);
        let mut heads = flight.head_records();
        if heads.all(|record| record.read() != Completion::Pending) {
            return Look::Landed;
        }
        if late { Look::Late } else { Look::Flies }
    }

    fn completed(&self, flight: &Flight) {
        for _ in &flight.heads {
            self.devices[flight.device].device.portal.completed();
        }
    }

    /// The next device in turn that is in service.
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

/// What the completion thread looks at. If that panics, nothing is left with it: its batches come back
/// lost, and later ones find nobody to land with.
struct Flying<'a> {
    finder: &'a ZeroFinder,
    list: Vec<(Box<Flight>, Arc<Slot>)>,
}

impl Drop for Flying<'_> {
    fn drop(&mut self) {
        let mut flights = self.finder.lock();
        flights.deaf = true;
        self.list.append(&mut flights.list);
        drop(flights);
        for (flight, slot) in self.list.drain(..) {
            slot.lose(flight);
        }
    }
}

/// A batch on its way to a device, which has a part of it already.
struct Leaving<'a> {
    finder: &'a ZeroFinder,
    slot: &'a Slot,
    flight: Option<Box<Flight>>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        // The submission has panicked; the device may have what it was given.
        if let Some(flight) = self.flight.take() {
            self.slot.lose(flight);
        }
        self.finder.lock().coming -= 1;
        self.finder.more.notify_one();
    }
}

enum Look {
    Flies,
    Landed,
    Late,
}

impl Service {
    /// The queue was full for a whole batch's turns.
    fn was_full(&self) {
        if self.refused.fetch_add(1, Ordering::Relaxed) + 1 >= REFUSED {
            let reason = format!("its queue was full for {REFUSED} batches in a row");
            let _ = self.out.set(reason);
        }
    }
}

impl Slot {
    fn put(&self, landing: Landing) {
        *self.landed.lock().unwrap_or_else(PoisonError::into_inner) = Some(landing);
        self.wake.notify_all();
    }

    /// A flight that a device may still write to.
    fn lose(&self, flight: Box<Flight>) {
        let pages = flight.pages.len();
        std::mem::forget(flight);
        self.put(Landing::Lost(pages));
    }

    fn wait(&self) -> Landing {
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(landing) = landed.take() {
                return landing;
            }
            landed = self
                .wake
                .wait(landed)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Flight {
    /// Room for so many pages.
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

    /// The records that tell when everything submitted is complete.
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

    /// Pages that were handed to the device, from the first on.
    fn submitted(&self) -> usize {
        self.heads.iter().sum()
    }
}

impl<'a> ZeroBatch<'a> {
    /// Adds a page.
    ///
    /// # Panics
    ///
    /// If the batch is in flight or full, or the page has another size.
    pub fn push(&mut self, page: GuestRun<'a>) {
        assert_eq!(page.len(), PAGE_SIZE, "a page");
        let Some(flight) = &mut self.flight else {
            panic!("a batch in flight takes no page");
        };
        assert!(flight.pages.len() < self.room, "a full batch takes no page");
        flight.pages.push(Page(page.as_ptr()));
    }

    /// Hands the pages to a device and returns at once.
    pub fn submit(&mut self) {
        let Some(mut flight) = self.flight.take() else {
            return;
        };
        flight.heads.clear();
        let mut flights = self.finder.lock();
        let listened_to = !flights.closed && !flights.deaf;
        let Some(device) = self.finder.choose().filter(|_| listened_to) else {
            drop(flights);
            return self.slot.put(Landing::Done(flight));
        };
        flights.coming += 1;
        drop(flights);
        flight.device = device;
        let mut leaving = Leaving {
            finder: self.finder,
            slot: &self.slot,
            flight: Some(flight),
        };
        let Some(flight) = &mut leaving.flight else {
            return;
        };
        self.submit_to(flight);
        flight.begun = Some(Instant::now());
        let Some(flight) = leaving.flight.take() else {
            return;
        };
        if flight.heads.is_empty() {
            return self.slot.put(Landing::Done(flight));
        }
        let mut flights = self.finder.lock();
        if flights.deaf {
            drop(flights);
            return self.slot.lose(flight);
        }
        flights.list.push((flight, Arc::clone(&self.slot)));
    }

    fn submit_to(&self, flight: &mut Flight) {
        let service = &self.finder.devices[flight.device];
        let device = &service.device;
        for (at, page) in flight.pages.iter().enumerate() {
            let record = &flight.records[at];
            record.clear();
            flight.descriptors[at] = Descriptor::is_zero(page.0, PAGE, record);
        }
        let longest = usize::try_from(device.max_batch)
            .unwrap_or(usize::MAX)
            .max(1);
        let (mut first, mut batches, mut retries) = (0, 0, 0);
        while first < flight.pages.len() {
            let pages = longest.min(flight.pages.len() - first);
            let head = if pages == 1 {
                flight.descriptors[first]
            } else {
                let record = &flight.head_records[batches];
                record.clear();
                let count = u32::try_from(pages).unwrap_or(u32::MAX);
                Descriptor::batch(&raw const flight.descriptors[first], count, record)
            };
            // SAFETY: a flight is on the heap, and only a complete one is used again or freed. Its pages
            // are guest memory, borrowed until the batch has been waited for. A device that has not
            // answered by then only reads them, and finds no memory if it is gone.
            match unsafe { device.portal.submit(&head) } {
                Ok(Submitted::Accepted) => {
                    service.refused.store(0, Ordering::Relaxed);
                    batches += usize::from(pages > 1);
                    flight.heads.push(pages);
                    first += pages;
                }
                Ok(Submitted::Full) if retries < FULL_RETRIES => {
                    retries += 1;
                    spin_loop();
                }
                Ok(Submitted::Full) => {
                    if flight.heads.is_empty() {
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

    /// Waits for the device and gives the verdict on each page, in order; the batch is empty then, and is
    /// so at once if it was not submitted. A `verdict` that panics leaves an empty batch, too.
    pub fn wait(&mut self, mut verdict: impl FnMut(Verdict)) {
        if self.flight.is_some() {
            return;
        }
        let (mut hardware, mut software) = (0, 0);
        // The batch is whole and empty before the first verdict: `verdict` may panic, and a batch without its flight
        // would be waited for when it is dropped.
        let flight = match self.slot.wait() {
            Landing::Done(flight) => self.flight.insert(flight),
            Landing::Lost(pages) => {
                self.flight = Some(Flight::new(self.room));
                for _ in 0..pages {
                    verdict(Verdict::LookFrom(0));
                }
                let count = pages as u64;
                self.finder.software.fetch_add(count, Ordering::Relaxed);
                return;
            }
        };
        let (pages, submitted) = (flight.pages.len(), flight.submitted());
        flight.pages.clear();
        let service = &self.finder.devices[flight.device];
        for at in 0..pages {
            let completion = if at < submitted {
                flight.records[at].read()
            } else {
                Completion::Pending
            };
            let what = match completion {
                Completion::Done { differs: true } | Completion::Fault { differs: true, .. } => {
                    Verdict::Normal
                }
                Completion::Done { differs: false } => Verdict::Zero,
                Completion::Fault { completed, .. } => {
                    let done = usize::try_from(completed.min(PAGE)).unwrap_or(0);
                    Verdict::LookFrom(done)
                }
                Completion::Pending => Verdict::LookFrom(0),
                Completion::Failed(code) => {
                    let _ = service.out.set(format!("status {code:#04x}"));
                    Verdict::LookFrom(0)
                }
                Completion::BatchFailed => Verdict::LookFrom(0),
            };
            match what {
                Verdict::LookFrom(_) => software += 1,
                Verdict::Zero | Verdict::Normal => hardware += 1,
            }
            verdict(what);
        }
        for record in flight.head_records() {
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
