//! A guest without a hypervisor: worker threads that write as the guest program does, and mark what
//! they wrote.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hotlift::guest::{DeviceState, Guest, GuestError};
use hotlift_mem::{DirtyBitmap, MemError, PAGE_SIZE, RamBlock, lock};

use crate::builtin::{BuiltinGuest, CreateError};
use crate::bytes::to_usize;
use crate::control::{Control, Want};
use crate::device::{self, DeviceError, FieldWriter, Fields};
use crate::fill::{self, FillError, FillSettings, Filled};
use crate::layout::{Layout, RAM_BLOCK, Record};
use crate::life::Life;
use crate::settings::{GuestKind, GuestSettings, Program};
use crate::throttle::Throttle;
use crate::verify::{self, Digest, Verified, VerifyError};
use crate::workload::{Generator, Position};

const WORKER: &str = "hotlift/worker";
const WORKER_VERSION: u32 = 1;
const COUNTERS: u32 = 1;

/// Ticks that a worker may be late before it forgives itself the rest.
const MAX_DEBT_TICKS: u32 = 100;

/// The threads guest.
pub struct ThreadsGuest {
    shared: Arc<Shared>,
    blocks: Vec<Arc<RamBlock>>,
    uuid: [u8; 16],
    /// Held by who starts, pauses or resumes, so that each finds done what it waits for.
    commands: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
    throttle: Throttle,
}

struct Shared {
    ram: Arc<RamBlock>,
    /// Pages written since the last fetch. Marked whether or not anybody listens: so there is no
    /// moment at which a write could slip between starting to listen and starting to mark.
    dirty: DirtyBitmap,
    control: Control,
    /// False as soon as workers are to stop: looked at before each write, where a lock would cost
    /// more than the write.
    run: AtomicBool,
    life: Mutex<Life>,
    workers: Vec<Worker>,
    death: Mutex<Option<String>>,
}

/// A worker's counters. Only its thread changes them while it runs.
#[derive(Default)]
struct Worker {
    writes: AtomicU64,
    errors: AtomicU64,
}

impl ThreadsGuest {
    /// A guest that has not run, with its threads parked.
    ///
    /// # Errors
    /// [`CreateError`] if the settings do not fit together, or memory or a thread cannot be had.
    pub fn new(settings: &GuestSettings) -> Result<Self, CreateError> {
        let program = Program::new(settings)?;
        let ram = RamBlock::new(RAM_BLOCK, to_usize(settings.ram_bytes), settings.backing)?;
        let ram = Arc::new(ram);
        let shared = Arc::new(Shared {
            dirty: DirtyBitmap::new(ram.pages()),
            control: Control::new(),
            run: AtomicBool::new(false),
            life: Mutex::new(Life::new(program)),
            workers: (0..settings.vcpus).map(|_| Worker::default()).collect(),
            death: Mutex::new(None),
            ram: Arc::clone(&ram),
        });
        // Made before its threads: if one of them cannot be started, dropping it ends the others.
        let mut guest = Self {
            shared,
            blocks: vec![ram],
            uuid: settings.uuid,
            commands: Mutex::new(()),
            threads: Vec::new(),
            throttle: Throttle::default(),
        };
        for index in 0..settings.vcpus {
            let shared = Arc::clone(&guest.shared);
            let thread = std::thread::Builder::new()
                .name(format!("vcpu-{index}"))
                .spawn(move || shared.run(index))
                .map_err(CreateError::Thread)?;
            guest.threads.push(thread);
        }
        Ok(guest)
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        lock(&self.shared.life)
    }

    fn command(&self) -> MutexGuard<'_, ()> {
        lock(&self.commands)
    }

    fn want(&self, want: Want) {
        self.shared.control.want(want, || {
            self.shared.run.store(want == Want::Run, Ordering::Release);
        });
    }

    fn check_block(&self, block: usize, action: &'static str) -> Result<(), GuestError> {
        if block == 0 {
            Ok(())
        } else {
            Err(GuestError::new(action, format!("no RAM block {block}")))
        }
    }
}

impl Drop for ThreadsGuest {
    fn drop(&mut self) {
        self.throttle(0);
        self.want(Want::Stop);
        for thread in self.threads.drain(..) {
            // A panic was recorded by the thread itself.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// A worker's thread.
    fn run(&self, index: u8) {
        self.control.started(index);
        while let Some(_running) = self.control.park(|| {}) {
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.work(index)));
            let reason = match outcome {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => format!("vCPU {index} cannot write: {error}"),
                Err(_) => format!("vCPU {index} panicked"),
            };
            lock(&self.death).get_or_insert(reason);
            return;
        }
    }

    /// Writes at the pace asked for until it is to stop.
    fn work(&self, index: u8) -> Result<(), MemError> {
        let program = lock(&self.life).program;
        let generator = Generator::new(program.workload, program.seed, &program.layout, index);
        let pace = program.pace();
        let tick = Duration::from_micros(pace.tick_us);
        let worker = &self.workers[usize::from(index)];
        let mut number = worker.writes.load(Ordering::Relaxed);
        let mut credit = 0;
        let mut next_tick = Instant::now();
        let mut slice = self.control.slice();
        while self.run.load(Ordering::Acquire) {
            credit = (credit & 0xffff) + pace.quota;
            for _ in 0..credit >> 16 {
                if !self.run.load(Ordering::Relaxed) {
                    return Ok(());
                }
                if self.control.slice() != slice {
                    slice = self.control.slice();
                    // What is taken is not made up for.
                    next_tick += self.control.sleep_off();
                }
                number += 1;
                if !self.write(&program.layout, &generator, index, number)? {
                    worker.errors.fetch_add(1, Ordering::Relaxed);
                }
                worker.writes.store(number, Ordering::Release);
            }
            next_tick += tick;
            let now = Instant::now();
            if now > next_tick + tick * MAX_DEBT_TICKS {
                next_tick = now;
            }
            if let Some(left) = next_tick.checked_duration_since(now) {
                self.control.sleep(left);
            }
        }
        Ok(())
    }

    /// Makes write `number`; false if the page's record was not what the table says.
    fn write(
        &self,
        layout: &Layout,
        generator: &Generator,
        index: u8,
        number: u64,
    ) -> Result<bool, MemError> {
        let page = generator.page(generator.own_page(number));
        let (entry, record) = (to_usize(layout.entry(page)), to_usize(layout.record(page)));
        let old = self.load(entry)?;
        let right = self.load(record)? == old;
        let new = old.next(index, number);
        for at in [entry, record] {
            self.ram.store_u64(at, new.version)?;
            self.ram.store_u64(at + 8, new.sequence)?;
            // After the stores: a page that is marked first could be fetched, cleared and read
            // before it changes.
            self.dirty.set(at / PAGE_SIZE);
        }
        Ok(right)
    }

    fn load(&self, at: usize) -> Result<Record, MemError> {
        Ok(Record {
            version: self.ram.load_u64(at)?,
            sequence: self.ram.load_u64(at + 8)?,
        })
    }
}

impl Guest for ThreadsGuest {
    fn machine(&self) -> &str {
        GuestKind::Threads.machine()
    }

    fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    fn ram(&self) -> &[Arc<RamBlock>] {
        &self.blocks
    }

    fn ram_is_fresh(&self) -> bool {
        self.life().ram_is_fresh()
    }

    fn start_dirty_log(&self) -> Result<(), GuestError> {
        self.shared.dirty.clear_range(0, self.shared.dirty.pages());
        Ok(())
    }

    fn stop_dirty_log(&self) -> Result<(), GuestError> {
        Ok(())
    }

    fn sync_dirty_log(&self, block: usize, into: &DirtyBitmap) -> Result<u64, GuestError> {
        self.check_block(block, "fetch its dirty log")?;
        let dirty = &self.shared.dirty;
        Ok((0..dirty.words())
            .map(|word| into.or_words(word, &[dirty.take_word(word)]))
            .sum())
    }

    fn clear_dirty_log(
        &self,
        block: usize,
        _first: usize,
        _pages: usize,
    ) -> Result<(), GuestError> {
        self.check_block(block, "clear its dirty log")
    }

    fn pause(&self) -> Result<(), GuestError> {
        let _command = self.command();
        self.want(Want::Pause);
        // Without the lock of `life`: a worker on its way into `work` needs it.
        self.shared.control.wait_until_parked();
        self.life().paused();
        self.health()
    }

    fn resume(&self) -> Result<(), GuestError> {
        let _command = self.command();
        self.life().resume()?;
        self.want(Want::Run);
        Ok(())
    }

    fn vcpu_threads(&self) -> Vec<u32> {
        self.shared.control.threads(self.shared.workers.len())
    }

    fn throttle(&self, percent: u8) -> bool {
        let shared = Arc::clone(&self.shared);
        self.throttle.set(percent, &self.shared.control, || {
            std::thread::Builder::new()
                .name("vcpu-throttle".to_owned())
                .spawn(move || shared.control.end_slices(|| {}))
        })
    }

    fn save_devices(&self) -> Result<Vec<DeviceState>, GuestError> {
        self.health()?;
        let life = self.life();
        life.check_paused("save its devices")?;
        let mut devices = vec![device::save_guest(&life.program, &life.digest)];
        for (instance, worker) in (0u32..).zip(&self.shared.workers) {
            let mut counters = [0; 16];
            counters[..8].copy_from_slice(&worker.writes.load(Ordering::Acquire).to_be_bytes());
            counters[8..].copy_from_slice(&worker.errors.load(Ordering::Acquire).to_be_bytes());
            let mut fields = FieldWriter::default();
            fields.put(COUNTERS, &counters);
            devices.push(fields.device(WORKER, instance, WORKER_VERSION));
        }
        Ok(devices)
    }

    #[allow(clippy::needless_pass_by_value)] // the trait gives the states away
    fn load_devices(&self, devices: Vec<DeviceState>) -> Result<(), GuestError> {
        let mut life = self.life();
        life.check_fresh("load its devices")?;
        let load = || -> Result<_, DeviceError> {
            let vcpus = life.program.layout.vcpus();
            let (guest, workers) = device::sort(&devices, WORKER, WORKER_VERSION, vcpus)?;
            let (program, digest) = device::load_guest(guest, &life.program.layout)?;
            let mut counters = Vec::new();
            for payload in workers {
                let mut fields = Fields::parse(WORKER, payload)?;
                let numbers = fields.take_u64s(COUNTERS, "counters")?;
                let [writes, errors] = *numbers.as_slice() else {
                    return Err(fields.wrong_length("counters", 16, numbers.len() * 8));
                };
                if writes > verify::MAX_WRITES {
                    return Err(fields.out_of_range("writes", writes));
                }
                fields.finish()?;
                counters.push((writes, errors));
            }
            Ok((program, digest, counters))
        };
        let (program, digest, counters) =
            load().map_err(|error| GuestError::new("load its devices", error))?;
        for (worker, (writes, errors)) in self.shared.workers.iter().zip(counters) {
            worker.writes.store(writes, Ordering::Release);
            worker.errors.store(errors, Ordering::Release);
        }
        life.loaded(program, digest);
        Ok(())
    }
}

impl BuiltinGuest for ThreadsGuest {
    fn kind(&self) -> GuestKind {
        GuestKind::Threads
    }

    fn layout(&self) -> Layout {
        self.life().program.layout
    }

    fn rate(&self) -> u64 {
        self.life().program.rate()
    }

    fn fill(&self, settings: &FillSettings) -> Result<Filled, FillError> {
        let mut life = self.life();
        life.begin_fill()?;
        let filled = fill::fill(&self.shared.ram, &life.program.layout, settings)?;
        life.digest.clone_from(&filled.digest);
        Ok(filled)
    }

    fn start(&self) -> Result<(), GuestError> {
        let _command = self.command();
        self.life().start()?;
        self.want(Want::Run);
        Ok(())
    }

    fn verify(&self) -> Result<Verified, VerifyError> {
        self.health()?;
        let life = self.life();
        life.check_paused("be verified")?;
        let mut positions = Vec::new();
        for (vcpu, worker) in (0u8..).zip(&self.shared.workers) {
            let errors = worker.errors.load(Ordering::Acquire);
            if errors > 0 {
                return Err(VerifyError::Guest { vcpu, errors });
            }
            positions.push(Position::between(worker.writes.load(Ordering::Acquire)));
        }
        let (program, digest): (Program, Digest) = (life.program, life.digest.clone());
        drop(life);
        verify::verify(&self.shared.ram, &program, &positions, &digest)
    }

    fn writes(&self) -> u64 {
        self.shared
            .workers
            .iter()
            .map(|worker| worker.writes.load(Ordering::Acquire))
            .sum()
    }

    fn throttled_time(&self) -> Duration {
        self.shared.control.slept()
    }

    fn health(&self) -> Result<(), GuestError> {
        match &*lock(&self.shared.death) {
            None => Ok(()),
            Some(reason) => Err(GuestError::new("go on running", reason.clone())),
        }
    }

    /// A line a worker, made up now: there is no serial port.
    fn serial(&self) -> Vec<String> {
        let line = |(vcpu, worker): (usize, &Worker)| {
            let writes = worker.writes.load(Ordering::Acquire);
            let errors = worker.errors.load(Ordering::Acquire);
            format!("hotlift vcpu={vcpu} writes={writes} errors={errors}")
        };
        self.shared.workers.iter().enumerate().map(line).collect()
    }
}
