//! The figures of a migration, each defined once: in the doc of the field that holds it.
//!
//! The result table, the JSON and the progress display all read these structs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hotlift_wire::multifd::INITIAL_PACKET_LEN;
use serde::{Deserialize, Serialize};

/// Bytes in a GiB, the unit of memory in every figure.
const GIB: f64 = (1_u64 << 30) as f64;

/// CPU time of one thread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ThreadCpu {
    /// The thread's name, as `top -H` shows it and as QEMU 10.0 names it.
    pub name: String,
    /// User and system time, in seconds, from the thread's start to its end.
    pub cpu_s: f64,
}

/// Job statistics of one side's compression method. All are 0 or empty for a method that no accelerator supports.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFigures {
    /// Jobs of an accelerator. A job is a page for qpl and uadk, and a gzip member for qatzip.
    pub hardware: u64,
    /// Jobs done on the CPU, including jobs that an accelerator rejected or failed to do.
    pub software: u64,
    /// Submissions repeated because the accelerator was busy.
    pub retries: u64,
    /// Pages that did not shrink, and were sent uncompressed.
    pub raw_pages: u64,
    /// Drivers of the accelerators, as in "libqpl 1.9.0".
    pub devices: Vec<String>,
    /// Reason why an accelerator was not used, or not until the end; `None` without such a reason.
    pub fallback: Option<String>,
}

/// Bytes written, by channel and phase, as QEMU counts them. Their sum is `transferred_bytes`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteFigures {
    /// Bytes written to multifd channels.
    pub multifd: u64,
    /// Bytes written to the main channel while the guest ran at the source.
    pub precopy: u64,
    /// Bytes written to the main channel while the guest was paused.
    pub downtime: u64,
    /// Bytes written to the main channel while the guest ran at the destination, without some of its pages.
    #[serde(default)]
    pub postcopy: u64,
}

impl ByteFigures {
    /// Returns the sum of all four figures, in bytes.
    #[must_use]
    pub fn sum(self) -> u64 {
        self.multifd + self.precopy + self.downtime + self.postcopy
    }
}

/// Statistics of XBZRLE (QEMU's `XBZRLECacheStats`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct XbzrleFigures {
    /// Size of the cache, in bytes.
    pub cache_bytes: u64,
    /// Bytes of XBZRLE pages sent.
    pub bytes: u64,
    /// Pages sent as XBZRLE. They are also counted as normal pages. A page without any change is neither sent nor counted.
    pub pages: u64,
    /// Pages that were not found in the cache.
    pub cache_misses: u64,
    /// `cache_misses` divided by the pages looked up, in the last round.
    pub cache_miss_rate: f64,
    /// Bytes of the pages divided by the bytes sent for them, in the last round.
    pub encoding_rate: f64,
    /// Pages whose delta would have been longer than the page.
    pub overflows: u64,
}

/// Packets of one method and level that `auto` has selected.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MethodFigures {
    /// The method's name.
    pub name: String,
    /// Level of the method; `None` for a method without levels.
    pub level: Option<i8>,
    /// Packets sent with this method.
    pub packets: u64,
    /// Pages with content in these packets.
    pub pages: u64,
    /// Bytes of these pages before encoding.
    pub bytes_in: u64,
    /// Bytes of the packets' payloads, after encoding.
    pub bytes_out: u64,
    /// CPU time of encoding and sending the packets at the source, in seconds.
    pub core_seconds: f64,
}

/// Statistics of method `auto` for one interval of a migration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MethodMoment {
    /// End of the interval, in milliseconds since the request to migrate.
    pub ms: f64,
    /// Bytes that the link delivered, per second.
    pub link_bytes_per_s: f64,
    /// Share of each method and level in the pages with content, 0 to 1.
    pub shares: BTreeMap<String, f64>,
}

/// Returns the shares of the methods in the pages with content: "62 % zstd 3, 38 % none"; the largest share first.
#[must_use]
pub fn shares_of(methods: &[MethodFigures]) -> String {
    let all: u64 = methods.iter().map(|one| one.pages).sum();
    let mut methods: Vec<_> = methods.iter().collect();
    methods.sort_by_key(|one| std::cmp::Reverse(one.pages));
    // Shares below half a percent are left out.
    let shares = methods.iter().filter_map(|one| {
        let percent = ratio(to_f64(one.pages) * 100.0, to_f64(all));
        (percent >= 0.5).then(|| format!("{percent:.0} % {}", one.label()))
    });
    shares.collect::<Vec<_>>().join(", ")
}

impl MethodFigures {
    /// Returns the label for display: "zstd 3".
    #[must_use]
    pub fn label(&self) -> String {
        match self.level {
            Some(level) => format!("{} {level}", self.name),
            None => self.name.clone(),
        }
    }
}

/// Cost of a migration for one side.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SideFigures {
    /// CPU time of all migration threads, in seconds. The guest's own threads are not counted.
    pub cpu_s: f64,
    /// `cpu_s` divided by the migration's total time, in percent; 100 is one core.
    pub cpu_percent: f64,
    /// `cpu_s` per GiB of normal (non-zero) pages; 0 if there were none.
    pub core_s_per_gib: f64,
    /// CPU time of each migration thread.
    pub threads: Vec<ThreadCpu>,
    /// Statistics of the work of the method.
    #[serde(default)]
    pub jobs: JobFigures,
    /// Statistics of zero page detection by devices, if it is on: `hardware` counts pages checked by devices, `software` pages
    /// checked by the CPU instead.
    #[serde(default)]
    pub zero_jobs: JobFigures,
}

impl SideFigures {
    /// Sums up `threads` of a migration that took `total` and moved `normal_pages` pages.
    #[must_use]
    pub fn new(
        threads: Vec<ThreadCpu>,
        total: Duration,
        normal_pages: u64,
        jobs: JobFigures,
    ) -> Self {
        // The sum of an empty iterator is -0.0.
        let cpu_s = threads.iter().map(|thread| thread.cpu_s).sum::<f64>() + 0.0;
        Self {
            cpu_s,
            cpu_percent: ratio(cpu_s * 100.0, total.as_secs_f64()),
            core_s_per_gib: ratio(cpu_s, to_f64(normal_pages) * 4096.0 / GIB),
            threads,
            jobs,
            zero_jobs: JobFigures::default(),
        }
    }
}

/// The outcome of a migration, measured at the source.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceReport {
    /// Time from the request to migrate until the destination runs the guest, in milliseconds.
    pub total_ms: f64,
    /// Time from the request to migrate until the first page may be sent, in milliseconds.
    pub setup_ms: f64,
    /// Time from the request to stop the vCPUs at the source until the report that they run at the destination, in
    /// milliseconds.
    pub downtime_ms: f64,
    /// Number of rounds (passes over the dirty pages). The guest is stopped in the last round. At least 2.
    pub rounds: u64,
    /// Bytes written to all sockets.
    pub transferred_bytes: u64,
    /// `transferred_bytes` × 8 divided by (total time - setup time), in 10^6 bit/s.
    pub throughput_mbps: f64,
    /// Guest pages (zero and normal) sent per second of total time.
    pub pages_per_second: f64,
    /// Pages sent with their content.
    pub normal_pages: u64,
    /// Pages sent as zero.
    pub zero_pages: u64,
    /// Bytes of normal pages divided by `transferred_bytes`; 0 without normal pages.
    pub ratio: f64,
    /// Number of reads of the dirty log, including the start of the log: one more than `rounds`.
    #[serde(default)]
    pub dirty_syncs: u64,
    /// Bytes written, by channel and phase. `transferred_bytes` is their sum.
    #[serde(default)]
    pub bytes: ByteFigures,
    /// Largest share of the vCPUs' time that auto-converge removed, in percent; 0 if it was not needed.
    #[serde(default)]
    pub throttle_percent: u8,
    /// True if auto-converge had to slow the guest down, but the guest does not support this.
    #[serde(default)]
    pub throttle_refused: bool,
    /// Pages that the guest has requested in postcopy.
    #[serde(default)]
    pub postcopy_requests: u64,
    /// Statistics of XBZRLE; `None` if it was off.
    #[serde(default)]
    pub xbzrle: Option<XbzrleFigures>,
    /// Packets by method; empty without method `auto`, which selects a method for each packet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<MethodFigures>,
    /// Packets sent with a method that was not the best known, to learn the method's cost.
    #[serde(default)]
    pub explored_packets: u64,
    /// Statistics of method `auto` over time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<MethodMoment>,
    /// CPU cost at the source.
    pub side: SideFigures,
}

/// The outcome of a migration, measured at the destination.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DestinationReport {
    /// Time from the first connection until the guest runs at the destination, in milliseconds.
    pub total_ms: f64,
    /// Pages received with their content.
    pub normal_pages: u64,
    /// Pages received as zero.
    pub zero_pages: u64,
    /// Figures of postcopy; `None` if the guest did not run before all its pages had arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<Box<PostcopyFigures>>,
    /// CPU cost at the destination.
    pub side: SideFigures,
}

/// Figures of a guest that ran before all its pages had arrived (postcopy).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PostcopyFigures {
    /// Time from the first connection until all pages had arrived, in milliseconds.
    pub complete_ms: f64,
    /// Pages that arrived while the guest ran.
    pub pages: u64,
    /// Pages that the guest touched before they arrived.
    pub requests: u64,
    /// Wait for a page that the guest touched, in microseconds: the median, the 99th percentile, and the longest.
    pub wait_us: [f64; 3],
    /// Waits by thread; `None` without `postcopy-blocktime`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocktime: Option<BlocktimeFigures>,
}

/// Waits of vCPUs for pages (QEMU's `postcopy-blocktime` and related figures).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BlocktimeFigures {
    /// Time for which all vCPUs waited at once, in milliseconds.
    pub all_ms: f64,
    /// Time for which each vCPU waited, in milliseconds. Empty if the guest does not know the threads of its vCPUs.
    pub vcpu_ms: Vec<f64>,
    /// Number of waits of vCPUs.
    pub vcpu_waits: u64,
    /// Duration of a wait of a vCPU, in microseconds: the median, the 99th percentile, and the longest.
    pub vcpu_wait_us: [f64; 3],
    /// Mean wait of any thread, in nanoseconds.
    pub mean_ns: u64,
    /// Mean wait of each vCPU, in nanoseconds.
    pub vcpu_mean_ns: Vec<u64>,
    /// Mean wait of threads other than vCPUs, in nanoseconds.
    pub other_mean_ns: u64,
    /// Number of waits of all threads, by duration. Entry n counts the waits from 2^n to 2^(n+1) microseconds.
    pub by_time: Vec<u64>,
}

impl SourceReport {
    /// Creates a report with the figures that follow from the times (total, set-up and downtime), the counts, and the cost.
    pub(crate) fn new(
        [total, setup, downtime]: [Duration; 3],
        counts: Counts,
        side: SideFigures,
    ) -> Self {
        let bytes = to_f64(counts.transferred_bytes);
        let settled = to_f64(counts.normal_pages + counts.zero_pages);
        let sending = total.saturating_sub(setup);
        Self {
            total_ms: total.as_secs_f64() * 1e3,
            setup_ms: setup.as_secs_f64() * 1e3,
            downtime_ms: downtime.as_secs_f64() * 1e3,
            transferred_bytes: counts.transferred_bytes,
            throughput_mbps: ratio(bytes * 8.0 / 1e6, sending.as_secs_f64()),
            pages_per_second: ratio(settled, total.as_secs_f64()),
            normal_pages: counts.normal_pages,
            zero_pages: counts.zero_pages,
            ratio: ratio(to_f64(counts.normal_pages) * 4096.0, bytes),
            side,
            ..Self::default()
        }
    }
}

/// Running counters of one thread, which other threads read.
///
/// Aligned to two cache lines, because the CPU prefetches lines in pairs. Otherwise channels that count at the same time would
/// slow each other down.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counters {
    normal_pages: AtomicU64,
    zero_pages: AtomicU64,
    transferred_bytes: AtomicU64,
}

/// A reading of [`Counters`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub normal_pages: u64,
    pub zero_pages: u64,
    pub transferred_bytes: u64,
}

impl Counters {
    /// Creates the counters of each multifd channel. The bytes of the channel's opening packet are already counted.
    pub(crate) fn of_channels(channels: usize) -> Vec<Self> {
        let counters: Vec<_> = (0..channels).map(|_| Self::default()).collect();
        for channel in &counters {
            channel.add_bytes(INITIAL_PACKET_LEN);
        }
        counters
    }

    /// Creates the counters of one side: for each multifd channel, and then for main.
    pub(crate) fn of_side(channels: usize) -> Vec<Self> {
        let mut counters = Self::of_channels(channels);
        counters.push(Self::default());
        counters
    }

    pub(crate) fn add_pages(&self, normal: usize, zero: usize) {
        self.normal_pages
            .fetch_add(normal as u64, Ordering::Relaxed);
        self.zero_pages.fetch_add(zero as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_bytes(&self, bytes: usize) {
        self.transferred_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Counts {
        Counts {
            normal_pages: self.normal_pages.load(Ordering::Relaxed),
            zero_pages: self.zero_pages.load(Ordering::Relaxed),
            transferred_bytes: self.transferred_bytes.load(Ordering::Relaxed),
        }
    }
}

impl Counts {
    /// Returns the difference to an earlier reading.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            normal_pages: self.normal_pages - earlier.normal_pages,
            zero_pages: self.zero_pages - earlier.zero_pages,
            transferred_bytes: self.transferred_bytes - earlier.transferred_bytes,
        }
    }
}

impl std::iter::Sum for Counts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, next| Self {
            normal_pages: sum.normal_pages + next.normal_pages,
            zero_pages: sum.zero_pages + next.zero_pages,
            transferred_bytes: sum.transferred_bytes + next.transferred_bytes,
        })
    }
}

/// Returns `numerator / denominator`, or 0 if the denominator is 0.
pub(crate) fn ratio(numerator: f64, denominator: f64) -> f64 {
    if denominator > 0.0 {
        numerator / denominator
    } else {
        0.0
    }
}

/// Converts a count to a float; exact below 2^53.
#[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
pub(crate) fn to_f64(count: u64) -> f64 {
    count as f64
}

/// The latest durations, for percentiles; older ones are dropped.
#[derive(Debug, Default)]
pub(crate) struct LatestTimes(VecDeque<u32>);

impl LatestTimes {
    /// Maximum number of durations that are kept. They take 4 MiB.
    const KEPT: usize = 1 << 20;

    /// Adds a duration.
    pub(crate) fn add(&mut self, took: Duration) {
        if self.0.len() == Self::KEPT {
            self.0.pop_front();
        }
        self.0.push_back(micros(took));
    }

    /// Returns the median, the 99th percentile, and the longest duration, in microseconds; 0 without durations.
    pub(crate) fn percentiles(&self) -> [f64; 3] {
        let mut all: Vec<_> = self.0.iter().copied().collect();
        all.sort_unstable();
        [50, 99, 100].map(|share| {
            let index = (all.len() * share / 100).min(all.len().saturating_sub(1));
            all.get(index).copied().map_or(0.0, f64::from)
        })
    }
}

/// Converts a time to microseconds; times above 71 minutes become the maximum.
pub(crate) fn micros(took: Duration) -> u32 {
    u32::try_from(took.as_micros()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_follow_their_definitions() {
        let [total, setup, downtime] = [2100, 100, 30].map(Duration::from_millis);
        let counts = Counts {
            normal_pages: 1 << 18,
            zero_pages: 5,
            transferred_bytes: 1 << 28,
        };
        let thread = |(name, cpu_s): (&str, f64)| ThreadCpu {
            name: name.to_owned(),
            cpu_s,
        };
        let threads = [("a", 1.0), ("b", 0.5)].map(thread).to_vec();
        let jobs = JobFigures::default();
        let side = SideFigures::new(threads, total, counts.normal_pages, jobs);
        let report = SourceReport::new([total, setup, downtime], counts, side);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9 * b.abs().max(1.0), "{a} {b}");
        close(report.throughput_mbps, f64::from(1 << 28) * 8.0 / 2.0 / 1e6);
        close(report.pages_per_second, f64::from((1 << 18) + 5) / 2.1);
        close(report.ratio, 4.0);
        close(report.side.cpu_s, 1.5);
        close(report.side.cpu_percent, 150.0 / 2.1);
        close(report.side.core_s_per_gib, 1.5);
    }

    #[test]
    fn an_all_zero_guest_divides_nothing_by_zero() {
        let figures = SideFigures::new(Vec::new(), Duration::ZERO, 0, JobFigures::default());
        assert_eq!((figures.cpu_percent, figures.core_s_per_gib), (0.0, 0.0));
    }
}
