//! Time for which missing pages pause vCPUs, counted as QEMU does (capability `postcopy-blocktime`).

use std::time::{Duration, Instant};

use crate::figures::{BlocktimeFigures, LatestTimes, micros};

/// Number of buckets for the duration of waits, in powers of two of microseconds (QEMU's `BLOCKTIME_LATENCY_BUCKET_N`).
const BUCKETS: usize = 32;

/// Waits of one or more threads.
#[derive(Debug, Default)]
struct Waits {
    count: u64,
    sum: Duration,
}

impl Waits {
    fn add(&mut self, took: Duration) {
        self.count += 1;
        self.sum += took;
    }

    /// Returns the mean in nanoseconds; 0 without waits.
    fn mean_ns(&self) -> u64 {
        let mean = self.sum.as_nanos().checked_div(self.count.into());
        mean.map_or(0, |mean| mean.try_into().unwrap_or(u64::MAX))
    }
}

#[derive(Debug)]
struct Vcpu {
    thread: u32,
    /// Number of pages that the vCPU waits for. More than one if the kernel reports the next fault before the previous arrival
    /// is recorded.
    open: usize,
    since: Instant,
    blocked: Duration,
    waits: Waits,
}

/// Statistics of the waits of a guest's threads.
#[derive(Debug)]
pub(super) struct Blocktime {
    vcpus: Vec<Vcpu>,
    /// Waits of threads that are not vCPUs, e.g. of devices.
    others: Waits,
    /// Number of waiting vCPUs, and the time since which all of them wait.
    blocked: usize,
    all_since: Instant,
    all_blocked: Duration,
    by_time: [u64; BUCKETS],
    /// Latest wait times of vCPUs.
    kept: LatestTimes,
}

impl Blocktime {
    /// Creates the statistics. `threads` has the thread id of each vCPU; it is empty if the ids are unknown.
    pub(super) fn new(threads: &[u32], now: Instant) -> Self {
        let vcpu = |thread: &u32| Vcpu {
            thread: *thread,
            open: 0,
            since: now,
            blocked: Duration::ZERO,
            waits: Waits::default(),
        };
        Self {
            vcpus: threads.iter().map(vcpu).collect(),
            others: Waits::default(),
            blocked: 0,
            all_since: now,
            all_blocked: Duration::ZERO,
            by_time: [0; BUCKETS],
            kept: LatestTimes::default(),
        }
    }

    /// Records that `thread` begins to wait for a page.
    pub(super) fn begins(&mut self, thread: u32, now: Instant) {
        let Some(vcpu) = self.vcpus.iter_mut().find(|vcpu| vcpu.thread == thread) else {
            return;
        };
        vcpu.open += 1;
        if vcpu.open == 1 {
            vcpu.since = now;
            self.blocked += 1;
            if self.blocked == self.vcpus.len() {
                self.all_since = now;
            }
        }
    }

    /// Records the arrival of a page that `thread` has waited for since `since`.
    pub(super) fn ends(&mut self, thread: u32, since: Instant, now: Instant) {
        let took = now.saturating_duration_since(since);
        let bucket = micros(took).checked_ilog2().unwrap_or(0);
        self.by_time[usize::try_from(bucket).map_or(0, |bucket| bucket.min(BUCKETS - 1))] += 1;
        let all = self.blocked == self.vcpus.len();
        let Some(vcpu) = self.vcpus.iter_mut().find(|vcpu| vcpu.thread == thread) else {
            self.others.add(took);
            return;
        };
        vcpu.waits.add(took);
        vcpu.open -= 1;
        if vcpu.open == 0 {
            vcpu.blocked += now.saturating_duration_since(vcpu.since);
            self.blocked -= 1;
            if all {
                self.all_blocked += now.saturating_duration_since(self.all_since);
            }
        }
        self.kept.add(took);
    }

    pub(super) fn figures(&self) -> BlocktimeFigures {
        let vcpus = self.vcpus.iter();
        let mut all = Waits {
            count: self.others.count,
            sum: self.others.sum,
        };
        for vcpu in vcpus.clone() {
            all.count += vcpu.waits.count;
            all.sum += vcpu.waits.sum;
        }
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        BlocktimeFigures {
            all_ms: ms(self.all_blocked),
            vcpu_ms: vcpus.clone().map(|vcpu| ms(vcpu.blocked)).collect(),
            vcpu_waits: vcpus.clone().map(|vcpu| vcpu.waits.count).sum(),
            vcpu_wait_us: self.kept.percentiles(),
            mean_ns: all.mean_ns(),
            vcpu_mean_ns: vcpus.map(|vcpu| vcpu.waits.mean_ns()).collect(),
            other_mean_ns: self.others.mean_ns(),
            by_time: self.by_time.to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_vcpus_are_blocked_only_while_each_of_them_waits() {
        let start = Instant::now();
        let mut blocktime = Blocktime::new(&[10, 11], start);
        let at = |ms| start + Duration::from_millis(ms);
        blocktime.begins(10, at(0));
        blocktime.begins(99, at(1));
        blocktime.begins(11, at(2));
        blocktime.ends(10, at(0), at(5));
        // The first page has arrived, and the thread waits for its next one, before the arrival is recorded.
        blocktime.begins(11, at(6));
        blocktime.ends(11, at(2), at(7));
        blocktime.ends(99, at(1), at(8));
        blocktime.ends(11, at(6), at(10));
        let figures = blocktime.figures();
        assert_eq!(figures.all_ms, 3.0);
        assert_eq!(figures.vcpu_ms, [5.0, 8.0]);
        assert_eq!(figures.vcpu_waits, 3);
        assert_eq!(figures.vcpu_wait_us, [5e3, 5e3, 5e3]);
        assert_eq!(figures.vcpu_mean_ns, [5_000_000, 4_500_000]);
        assert_eq!(figures.other_mean_ns, 7_000_000);
        assert_eq!(figures.mean_ns, 5_250_000);
        let counted: Vec<_> = figures
            .by_time
            .iter()
            .zip(0..)
            .filter(|one| *one.0 > 0)
            .collect();
        // 4, 5 and 5, 7 ms: up to 4.096, and up to 8.192 ms.
        assert_eq!(counted, [(&1, 11), (&3, 12)]);
    }

    #[test]
    fn a_guest_with_unknown_vcpus_has_waits_too() {
        let mut blocktime = Blocktime::new(&[], Instant::now());
        let now = Instant::now();
        blocktime.begins(7, now);
        blocktime.ends(7, now, now + Duration::from_micros(3));
        let figures = blocktime.figures();
        assert_eq!((figures.mean_ns, figures.other_mean_ns), (3000, 3000));
        assert_eq!((figures.all_ms, figures.by_time[1]), (0.0, 1));
    }
}
