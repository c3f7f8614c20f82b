//! Measures the load of the destination's channel threads. The report goes to a source that selects the method of each packet.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hotlift_mem::{RunQueue, thread_cpu_time};
use hotlift_wire::multifd::Method;
use hotlift_wire::return_path::{Load, MethodLoad, ReturnMessage};

use crate::lock::lock;
use crate::stream::return_path::encode;

/// Interval of a thread's measurements. It is short, so that the source knows early if the network is a bottleneck.
const INTERVAL: Duration = Duration::from_millis(20);

/// Minimum interval between two load reports. The source must react within a second when the destination's host becomes busy.
const BETWEEN_MESSAGES: Duration = Duration::from_millis(50);

/// Load of all channel threads: sums of their measurements.
#[derive(Debug, Default)]
pub(crate) struct ReceiverLoad {
    elapsed: AtomicU64,
    busy: AtomicU64,
    methods: [(AtomicU64, AtomicU64); Method::ALL.len()],
    last_report: Mutex<Option<Instant>>,
}

impl ReceiverLoad {
    /// Returns the next load report for the source. Returns `None` if the last report was sent less than [`BETWEEN_MESSAGES`]
    /// ago.
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

/// Load measurement of one channel thread.
pub(crate) struct ChannelLoad<'a> {
    all: &'a ReceiverLoad,
    queue: RunQueue,
    /// CPU time of the thread at the start of the packet.
    cpu: Duration,
    /// Start of the current interval; `None` before the first packet of a round.
    since: Option<Since>,
}

/// Values of a thread's clocks at the start of an interval.
#[derive(Clone, Copy)]
struct Since {
    at: Instant,
    /// CPU time of the thread. `queued` is its time in the run queue.
    cpu: Duration,
    queued: Duration,
    /// Time in this interval for which `cpu-limit` or the page sink has blocked the thread.
    held: Duration,
}

impl<'a> ChannelLoad<'a> {
    /// Creates the measurement of the calling thread. Its results are added to `all`.
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

    /// Stops the clock at the end of a round, so that later time does not count for a packet.
    pub(crate) fn pause(&mut self) {
        self.since = None;
    }

    /// Records a finished packet of `pages` pages. `held` is the time in which the thread was blocked, but not by the source.
    /// Returns the next load report for the source, or `None` if none is due.
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
