//! What the channel threads of a destination do: told to a source that chooses the method of each packet.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use hotlift_mem::{RunQueue, thread_cpu_time};
use hotlift_wire::multifd::Method;
use hotlift_wire::return_path::{Load, MethodLoad, ReturnMessage};

use crate::stream::return_path::encode;

/// Between two looks of a thread at what it has done. The first comes early: it tells a source whether it has to wait for
/// the wire at all.
const INTERVAL: Duration = Duration::from_millis(20);

/// Between two messages: the source is to follow a host that gets busy within a second.
const BETWEEN_MESSAGES: Duration = Duration::from_millis(50);

/// The sums of all channels.
#[derive(Debug, Default)]
pub(crate) struct ReceiverLoad {
    elapsed: AtomicU64,
    busy: AtomicU64,
    methods: [(AtomicU64, AtomicU64); Method::ALL.len()],
    told: Mutex<Option<Instant>>,
}

impl ReceiverLoad {
    /// What to tell the source, if it is time to.
    fn due(&self) -> Option<Vec<u8>> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_some_and(|told| told.elapsed() < BETWEEN_MESSAGES) {
            return None;
        }
        *told = Some(Instant::now());
        let read = |sum: &AtomicU64| sum.load(Ordering::Relaxed);
        let mut load = Load {
            elapsed: read(&self.elapsed),
            busy: read(&self.busy),
            ..Load::default()
        };
        for (row, (pages, nanos)) in load.methods.iter_mut().zip(&self.methods) {
            *row = MethodLoad {
                pages: read(pages),
                nanos: read(nanos),
            };
        }
        Some(encode(&[ReturnMessage::Load(load)]))
    }
}

/// One thread's part.
pub(crate) struct ChannelLoad<'a> {
    all: &'a ReceiverLoad,
    queue: RunQueue,
    /// CPU time up to the last packet.
    cpu: Duration,
    /// When this while began, with the thread's CPU time and its time in the run queue until then.
    began: (Instant, Duration, Duration),
}

impl<'a> ChannelLoad<'a> {
    /// That of the calling thread.
    pub(crate) fn new(all: &'a ReceiverLoad) -> Self {
        let queue = RunQueue::of_this_thread();
        let cpu = thread_cpu_time();
        Self {
            all,
            cpu,
            began: (Instant::now(), cpu, queue.waited()),
            queue,
        }
    }

    /// A packet of so many pages has been settled. What is to be told to the source now.
    pub(crate) fn settled(&mut self, method: Method, pages: usize) -> Option<Vec<u8>> {
        let cpu = thread_cpu_time();
        let index = Method::ALL.iter().position(|one| *one == method);
        let (all_pages, all_nanos) = &self.all.methods[index.unwrap_or(0)];
        all_pages.fetch_add(pages as u64, Ordering::Relaxed);
        all_nanos.fetch_add(nanos(cpu.saturating_sub(self.cpu)), Ordering::Relaxed);
        self.cpu = cpu;
        let (began, cpu_before, queued_before) = self.began;
        let elapsed = began.elapsed();
        if elapsed < INTERVAL {
            return None;
        }
        let queued = self.queue.waited();
        let busy = cpu.saturating_sub(cpu_before) + queued.saturating_sub(queued_before);
        self.all
            .elapsed
            .fetch_add(nanos(elapsed), Ordering::Relaxed);
        self.all
            .busy
            .fetch_add(nanos(busy.min(elapsed)), Ordering::Relaxed);
        self.began = (Instant::now(), cpu, queued);
        self.all.due()
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
