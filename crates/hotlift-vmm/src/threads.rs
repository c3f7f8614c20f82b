//! A guest without a hypervisor: worker threads write as the guest program does, and mark the written pages as dirty.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hotlift::guest::{DeviceState, GuestError};
use hotlift_mem::{DirtyBitmap, MemError, PAGE_SIZE, RamBlock, lock};

use crate::builtin::CreateError;
use crate::bytes::to_usize;
use crate::control::VcpuGoal;
use crate::device::{DeviceError, FieldWriter, Fields};
use crate::layout::{Layout, Record};
use crate::machine::{Common, Vcpus};
use crate::settings::{GuestKind, Program};
use crate::verify::{self, VerifyError};
use crate::workload::{Generator, Position};

const WORKER: &str = "hotlift/worker";
const WORKER_VERSION: u32 = 1;
const COUNTERS: u32 = 1;

/// Maximum delay that a worker makes up for by faster writes, in ticks.
const MAX_DEBT_TICKS: u32 = 100;

/// The worker threads of a threads guest.
pub(crate) struct Workers(Arc<Shared>);

struct Shared {
    ram: Arc<RamBlock>,
    /// Pages written since the last fetch. Pages are marked even while no dirty log is active. Otherwise writes between
    /// the start of the log and the start of marking would be lost.
    dirty: DirtyBitmap,
    common: Arc<Common>,
    /// False if workers must stop. Workers read it before each write, where a lock would cost more than the write.
    run: AtomicBool,
    workers: Vec<Worker>,
}

/// Counters of a worker thread. While the worker runs, only the worker changes the counters.
#[derive(Default)]
struct Worker {
    writes: AtomicU64,
    errors: AtomicU64,
}

impl Shared {
    /// Runs worker `index` on the calling thread, until the thread must end.
    fn run(&self, index: u8) {
        self.common.control.started(index);
        while let Some(_running) = self.common.control.park(|| {}) {
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.work(index)));
            let reason = match outcome {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => format!("vCPU {index} cannot write: {error}"),
                Err(_) => format!("vCPU {index} panicked"),
            };
            lock(&self.common.death).get_or_insert(reason);
            return;
        }
    }

    /// Writes at the requested rate, until the worker must stop.
    fn work(&self, index: u8) -> Result<(), MemError> {
        let program = lock(&self.common.life).program;
        let generator = Generator::new(program.workload, program.seed, &program.layout, index);
        let pace = program.pace();
        let tick = Duration::from_micros(pace.tick_us);
        let worker = &self.workers[usize::from(index)];
        let mut number = worker.writes.load(Ordering::Relaxed);
        let mut credit = 0;
        let mut next_tick = Instant::now();
        let mut slice = self.common.control.slice();
        while self.run.load(Ordering::Acquire) {
            credit = (credit & 0xffff) + pace.quota;
            for _ in 0..credit >> 16 {
                if !self.run.load(Ordering::Relaxed) {
                    return Ok(());
                }
                if self.common.control.slice() != slice {
                    slice = self.common.control.slice();
                    // Throttled time is not made up for.
                    next_tick += self.common.control.sleep_off();
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
                self.common.control.sleep(left);
            }
        }
        Ok(())
    }

    /// Executes write `number`. Returns false if the page's record differs from the record in the table.
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
            // Marked after the stores. If marked before, the page could be fetched, cleared and read before the stores.
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

impl Vcpus for Workers {
    const KIND: GuestKind = GuestKind::Threads;
    const SECTION: (&'static str, u32) = (WORKER, WORKER_VERSION);

    fn new(vcpus: u8, ram: &Arc<RamBlock>, common: &Arc<Common>) -> Result<Self, CreateError> {
        Ok(Self(Arc::new(Shared {
            dirty: DirtyBitmap::new(ram.pages()),
            common: Arc::clone(common),
            run: AtomicBool::new(false),
            workers: (0..vcpus).map(|_| Worker::default()).collect(),
            ram: Arc::clone(ram),
        })))
    }

    fn thread(&self, index: u8) -> Box<dyn FnOnce() + Send> {
        let shared = Arc::clone(&self.0);
        Box::new(move || shared.run(index))
    }

    fn want(&self, want: VcpuGoal) {
        self.0.common.control.want(want, || {
            self.0.run.store(want == VcpuGoal::Run, Ordering::Release);
        });
    }

    fn kick(_: &[JoinHandle<()>]) -> impl Fn() + Send + 'static {
        || {}
    }

    fn start_dirty_log(&self, _: &RamBlock) -> Result<(), GuestError> {
        self.0.dirty.clear_range(0, self.0.dirty.pages());
        Ok(())
    }

    fn stop_dirty_log(&self, _: &RamBlock) -> Result<(), GuestError> {
        Ok(())
    }

    fn sync_dirty_log(&self, _: &RamBlock, into: &DirtyBitmap) -> Result<u64, GuestError> {
        let dirty = &self.0.dirty;
        let fetch = |word| into.or_words(word, &[dirty.take_word(word)]);
        Ok((0..dirty.words()).map(fetch).sum())
    }

    fn clear_dirty_log(&self, _: &RamBlock, _: usize, _: usize) -> Result<(), GuestError> {
        Ok(())
    }

    fn boot(&self, _: &RamBlock, _: &Program) -> Result<(), GuestError> {
        Ok(())
    }

    fn save(&self) -> Result<Vec<DeviceState>, GuestError> {
        let save = |(instance, worker): (u32, &Worker)| {
            let mut counters = [0; 16];
            counters[..8].copy_from_slice(&worker.writes.load(Ordering::Acquire).to_be_bytes());
            counters[8..].copy_from_slice(&worker.errors.load(Ordering::Acquire).to_be_bytes());
            let mut fields = FieldWriter::default();
            fields.put(COUNTERS, &counters);
            fields.device(WORKER, instance, WORKER_VERSION)
        };
        Ok((0u32..).zip(&self.0.workers).map(save).collect())
    }

    fn load(&self, states: Vec<&[u8]>) -> Result<(), DeviceError> {
        let mut counters = Vec::new();
        for state in states {
            let mut fields = Fields::parse(WORKER, state)?;
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
        for (worker, (writes, errors)) in self.0.workers.iter().zip(counters) {
            worker.writes.store(writes, Ordering::Release);
            worker.errors.store(errors, Ordering::Release);
        }
        Ok(())
    }

    fn positions(&self, _: &RamBlock) -> Result<Vec<Position>, VerifyError> {
        let position = |(vcpu, worker): (u8, &Worker)| {
            let errors = worker.errors.load(Ordering::Acquire);
            if errors > 0 {
                return Err(VerifyError::Guest { vcpu, errors });
            }
            Ok(Position::between(worker.writes.load(Ordering::Acquire)))
        };
        (0u8..).zip(&self.0.workers).map(position).collect()
    }

    fn writes(&self, _: &RamBlock) -> u64 {
        let workers = self.0.workers.iter();
        workers
            .map(|worker| worker.writes.load(Ordering::Acquire))
            .sum()
    }

    /// Generates one line per worker, because the guest has no serial port.
    fn serial(&self) -> Vec<String> {
        let line = |(vcpu, worker): (usize, &Worker)| {
            let writes = worker.writes.load(Ordering::Acquire);
            let errors = worker.errors.load(Ordering::Acquire);
            format!("hotlift vcpu={vcpu} writes={writes} errors={errors}")
        };
        self.0.workers.iter().enumerate().map(line).collect()
    }
}
