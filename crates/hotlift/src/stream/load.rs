//! Load of the destination's channel threads, reported to a source that selects the method of each packet.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hotlift_mem::{RunQueue, thread_cpu_time};
use hotlift_wire::multifd::Method;
use hotlift_wire::return_path::{Load, MethodLoad, ReturnMessage};

use crate::lock::lock;
use crate::stream::return_path::encode;

/// Interval of a thread's measurements. The first comes early: it shows the source whether the network is a bottleneck at all.
const INTERVAL: Duration = Duration::from_millis(20);

/// Interval of the messages: the source must follow a host that becomes busy within a second.
const BETWEEN_MESSAGES: Duration = Duration::from_millis(50);

/// Sums of all channels.
#[derive(Debug, Default)]
pub(crate) struct ReceiverLoad {
    elapsed: AtomicU64,
    busy: AtomicU64,
    methods: [(AtomicU64, AtomicU64); Method::ALL.len()],
    last_report: Mutex<Option<Instant>>,
}

impl ReceiverLoad {
    /// Returns the message to the source, if one is due.
    fn due(&self) -> Option<Vec<u8>> {
        let mut last_report = lock(&self.last_report);
        if last_report.is_some_and(|last_report| last_report.elapsed() < BETWEEN_MESSAGES) {
            return None;
        }
        *last_report = Some(Instant::now());
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

/// Measurement of one thread.
pub(crate) struct ChannelLoad<'a> {
    all: &'a ReceiverLoad,
    queue: RunQueue,
    /// CPU time at the start of the packet.
    cpu: Duration,
    /// Start of the current interval, once there was something to read in this round.
    since: Option<Since>,
}

/// Start of an interval.
#[derive(Clone, Copy)]
struct Since {
    at: Instant,
    /// CPU time and run queue time of the thread at that moment.
    cpu: Duration,
    queued: Duration,
    /// Time since then for which `cpu-limit` or the page sink has blocked the thread.
    held: Duration,
}

impl<'a> ChannelLoad<'a> {
    /// Creates the measurement of the calling thread.
    pub(crate) fn new(all: &'a ReceiverLoad) -> Self {
        Self {
            all,
            queue: RunQueue::of_this_thread(),
            cpu: Duration::ZERO,
            since: None,
        }
    }

    /// Records the start of a packet.
    pub(crate) fn begins(&mut self) {
        self.cpu = thread_cpu_time();
        if self.since.is_none() {
            self.since = Some(self.now(self.cpu));
        }
    }

    fn now(&self, cpu: Duration) -> Since {
        Since {
            at: Instant::now(),
            cpu,
            queued: self.queue.waited(),
            held: Duration::ZERO,
        }
    }

    /// Stops the clock at the end of a round: the following time belongs to no packet.
    pub(crate) fn pause(&mut self) {
        self.since = None;
    }

    /// Records a finished packet of `pages` pages; `held` is the time in which anything but the source blocked the thread.
    /// Returns the message to send to the source, if one is due.
    pub(crate) fn settled(
        &mut self,
        method: Method,
        pages: usize,
        held: Duration,
    ) -> Option<Vec<u8>> {
        let cpu = thread_cpu_time();
        let index = Method::ALL.iter().position(|one| *one == method);
        let (all_pages, all_nanos) = &self.all.methods[index.unwrap_or(0)];
        all_pages.fetch_add(pages as u64, Ordering::Relaxed);
        all_nanos.fetch_add(nanos(cpu.saturating_sub(self.cpu)), Ordering::Relaxed);
        let since = self.since.as_mut()?;
        since.held += held;
        let (since, elapsed) = (*since, since.at.elapsed());
        if elapsed < INTERVAL {
            return None;
        }
        let now = self.now(cpu);
        let queued = now.queued.saturating_sub(since.queued);
        let busy = cpu.saturating_sub(since.cpu) + queued + since.held;
        self.all
            .elapsed
            .fetch_add(nanos(elapsed), Ordering::Relaxed);
        self.all
            .busy
            .fetch_add(nanos(busy.min(elapsed)), Ordering::Relaxed);
        self.since = Some(now);
        self.all.due()
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
