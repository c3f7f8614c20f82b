//! Answers of `query-migrate` and `query-migrationthreads`: converts the engine's figures to QMP's types.

use std::time::Duration;

use hotlift::figures::{
    BlocktimeFigures, ByteFigures, DestinationReport, JobFigures, SourceReport, ThreadCpu,
    XbzrleFigures, shares_of,
};
use hotlift::progress::{Progress, Stall};
use hotlift::relay::{RelayProgress, RelayReport};
use hotlift::{Options, Status};
use hotlift_mem::PAGE_SIZE;
use hotlift_qmp::{
    AcceleratorJobs, CompressionStats, MigrationInfo, MigrationStats, MigrationThreadInfo,
    ThreadTime, VcpuWaits, XbzrleCacheStats,
};
use hotlift_terminal::progress::rounded;

/// Prefixes of the names of a source's threads that belong to its migration.
const SOURCE_THREADS: &[&str] = &["mig/src/", "compress_", "dsa_completion"];

/// Computes the statistics of capability `compress` from the migration's figures: all pages are on the main channel.
#[derive(Debug, Clone, Copy)]
pub struct Compression {
    /// True if pages wait for a free thread. If false, the number of pages for which no thread was free is unknown.
    waits: bool,
}

impl Compression {
    /// Returns the value for a migration with `options`; `None` if the capability `compress` is off.
    pub fn of(options: &Options) -> Option<Self> {
        options.stream.compress.then_some(Self {
            waits: options.compress_wait_thread,
        })
    }

    /// Returns the statistics. `main` is the number of bytes of the main channel. This number includes some hundred bytes for
    /// each round and the device states, which are counted as compressed pages.
    fn stats(self, main: u64, pages: Pages) -> CompressionStats {
        /// Number of bytes before the content of a page; a zero page has one byte more (`RAM_SAVE_FLAG_CONTINUE`).
        const HEADER: u64 = 8;
        const ZERO: u64 = HEADER + 1;
        let size = main.saturating_sub(pages.with_content * HEADER + pages.zero * ZERO);
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let rate = match size {
            0 => 0.0,
            size => (pages.with_content * PAGE_SIZE as u64) as f64 / size as f64,
        };
        CompressionStats {
            pages: pages.with_content,
            compressed_size: size,
            compression_rate: rate,
            busy: self.waits.then_some(0),
            busy_rate: self.waits.then_some(0.0),
        }
    }
}

/// Numbers of pages sent.
#[derive(Debug, Clone, Copy)]
struct Pages {
    with_content: u64,
    zero: u64,
}

impl Pages {
    /// Returns the statistics of RAM with these page counts, and with `bytes` by channel and phase. As in QEMU, pages of
    /// `compress` and XBZRLE do not count as normal, but have their own counts. Pages on multifd channels are normal, with any
    /// method.
    fn stats(
        self,
        bytes: ByteFigures,
        compress: bool,
        xbzrle: Option<&XbzrleFigures>,
    ) -> MigrationStats {
        let normal = match (compress, xbzrle) {
            (true, _) => 0,
            (false, Some(xbzrle)) => self.with_content.saturating_sub(xbzrle.pages),
            (false, None) => self.with_content,
        };
        MigrationStats {
            duplicate: self.zero,
            normal,
            normal_bytes: normal * PAGE_SIZE as u64,
            page_size: PAGE_SIZE as u64,
            multifd_bytes: bytes.multifd,
            precopy_bytes: bytes.precopy,
            downtime_bytes: bytes.downtime,
            postcopy_bytes: bytes.postcopy,
            ..MigrationStats::default()
        }
    }
}

/// Returns the answer with only this state, without figures.
pub fn only_status(status: Status) -> MigrationInfo {
    MigrationInfo {
        status: Some(status.name().to_owned()),
        ..MigrationInfo::default()
    }
}

/// Returns the answer for a migration that has failed or was cancelled.
pub fn failed(status: Status, error_desc: &str) -> MigrationInfo {
    MigrationInfo {
        error_desc: Some(error_desc.to_owned()),
        ..only_status(status)
    }
}

/// Returns the progress of a source that has not reported yet, with `total_bytes` of RAM.
pub fn not_begun(total_bytes: u64) -> Progress {
    Progress {
        status: Status::Setup,
        round: 1,
        total_bytes,
        remaining_bytes: total_bytes,
        dirty_syncs: 1,
        ..Progress::default()
    }
}

/// Adds `stall`, a host that delays the migration, to an answer.
pub fn with_stall(info: MigrationInfo, stall: Option<Stall>) -> MigrationInfo {
    MigrationInfo {
        stall: stall.map(|stall| stall.to_string()),
        ..info
    }
}

/// Returns the answer for a source's active migration.
pub fn source_under_way(
    status: Status,
    elapsed: Duration,
    progress: &Progress,
    jobs: &JobFigures,
    compression: Option<Compression>,
) -> MigrationInfo {
    let pages = Pages {
        with_content: progress.normal_pages,
        zero: progress.zero_pages,
    };
    let xbzrle = progress.xbzrle.as_ref();
    let throttle = u64::from(progress.throttle_percent);
    MigrationInfo {
        ram: Some(MigrationStats {
            transferred: progress.transferred_bytes,
            remaining: progress.remaining_bytes,
            total: progress.total_bytes,
            dirty_pages_rate: rounded(progress.dirty_pages_per_second),
            mbps: progress.bytes_per_second * 8.0 / 1e6,
            dirty_sync_count: progress.dirty_syncs,
            pages_per_second: rounded(progress.pages_per_second),
            postcopy_requests: progress.postcopy_requests,
            ..pages.stats(progress.bytes, compression.is_some(), xbzrle)
        }),
        xbzrle_cache: xbzrle.map(xbzrle_cache),
        compression: compression.map(|one| one.stats(on_main(progress.bytes), pages)),
        total_time: Some(ms(elapsed)),
        setup_time: Some(ms(progress.setup.unwrap_or_default())),
        expected_downtime: Some(ms(progress.expected_downtime.unwrap_or_default())),
        cpu_throttle_percentage: (throttle > 0).then_some(throttle),
        methods: progress.methods.as_ref().map(ToString::to_string),
        round: Some(progress.round),
        time_left: progress.time_left.map(ms),
        stall_reason: progress.stall_reason(),
        jobs: accelerator_jobs(jobs),
        threads: Some(thread_times(&cpu_of_threads())),
        ..only_status(status)
    }
}

/// Returns the answer for a source's completed migration.
pub fn source_completed(
    report: &SourceReport,
    total_bytes: u64,
    dirty_pages_per_second: f64,
    compression: Option<Compression>,
) -> MigrationInfo {
    let pages = Pages {
        with_content: report.normal_pages,
        zero: report.zero_pages,
    };
    let xbzrle = report.xbzrle.as_ref();
    MigrationInfo {
        ram: Some(MigrationStats {
            transferred: report.transferred_bytes,
            total: total_bytes,
            dirty_pages_rate: rounded(dirty_pages_per_second),
            mbps: report.throughput_mbps,
            dirty_sync_count: report.dirty_syncs,
            pages_per_second: rounded(report.pages_per_second),
            postcopy_requests: report.postcopy_requests,
            ..pages.stats(report.bytes, compression.is_some(), xbzrle)
        }),
        xbzrle_cache: xbzrle.map(xbzrle_cache),
        compression: compression.map(|one| one.stats(on_main(report.bytes), pages)),
        total_time: Some(rounded(report.total_ms)),
        setup_time: Some(rounded(report.setup_ms)),
        downtime: Some(rounded(report.downtime_ms)),
        methods: (!report.methods.is_empty()).then(|| shares_of(&report.methods)),
        round: Some(report.rounds),
        jobs: accelerator_jobs(&report.side.jobs),
        zero_page_jobs: accelerator_jobs(&report.side.zero_jobs),
        threads: Some(thread_times(&report.side.threads)),
        ..only_status(Status::Completed)
    }
}

/// Returns the answer for a destination's completed migration.
pub fn destination_completed(report: &DestinationReport) -> MigrationInfo {
    let postcopy = report.postcopy.as_ref();
    MigrationInfo {
        jobs: accelerator_jobs(&report.side.jobs),
        zero_page_jobs: accelerator_jobs(&report.side.zero_jobs),
        threads: Some(thread_times(&report.side.threads)),
        ..match postcopy.and_then(|postcopy| postcopy.blocktime.as_ref()) {
            Some(blocktime) => with_blocktime(blocktime),
            None => only_status(Status::Completed),
        }
    }
}

fn with_blocktime(blocktime: &BlocktimeFigures) -> MigrationInfo {
    let [p50, p99, max] = blocktime.vcpu_wait_us.map(rounded);
    MigrationInfo {
        postcopy_blocktime: Some(rounded(blocktime.all_ms)),
        postcopy_vcpu_blocktime: Some(blocktime.vcpu_ms.iter().map(|ms| rounded(*ms)).collect()),
        postcopy_latency: Some(blocktime.mean_ns),
        postcopy_latency_dist: Some(blocktime.by_time.clone()),
        postcopy_vcpu_latency: Some(blocktime.vcpu_mean_ns.clone()),
        postcopy_non_vcpu_latency: Some(blocktime.other_mean_ns),
        vcpu_waits: Some(VcpuWaits {
            count: blocktime.vcpu_waits,
            p50,
            p99,
            max,
        }),
        ..only_status(Status::Completed)
    }
}

/// Returns the answer for a relay's active migration.
pub fn relay_under_way(
    status: Status,
    progress: &RelayProgress,
    jobs: &JobFigures,
    compression: Option<Compression>,
) -> MigrationInfo {
    let seconds = progress.elapsed.as_secs_f64();
    let rate = |count: u64| {
        if seconds > 0.0 {
            count as f64 / seconds
        } else {
            0.0
        }
    };
    let pages = Pages {
        with_content: progress.normal_pages,
        zero: progress.zero_pages,
    };
    MigrationInfo {
        ram: Some(MigrationStats {
            transferred: progress.sent_bytes,
            total: progress.total_bytes,
            mbps: rate(progress.sent_bytes) * 8.0 / 1e6,
            pages_per_second: rounded(rate(pages.with_content + pages.zero)),
            ..pages.stats(ByteFigures::default(), compression.is_some(), None)
        }),
        compression: compression.map(|one| one.stats(progress.sent_bytes, pages)),
        total_time: Some(ms(progress.elapsed)),
        received: Some(progress.received_bytes),
        jobs: accelerator_jobs(jobs),
        ..only_status(status)
    }
}

/// Returns the answer for a relay's completed migration.
pub fn relay_completed(
    report: &RelayReport,
    total_bytes: u64,
    compression: Option<Compression>,
) -> MigrationInfo {
    let elapsed = Duration::try_from_secs_f64(report.total_ms / 1e3).unwrap_or_default();
    let progress = RelayProgress {
        elapsed,
        received_bytes: report.received_bytes,
        sent_bytes: report.sent_bytes,
        normal_pages: report.normal_pages,
        zero_pages: report.zero_pages,
        barriers: report.barriers,
        total_bytes,
    };
    MigrationInfo {
        threads: Some(thread_times(&report.side.threads)),
        ..relay_under_way(Status::Completed, &progress, &report.side.jobs, compression)
    }
}

/// Returns the number of bytes sent on the main channel.
fn on_main(bytes: ByteFigures) -> u64 {
    bytes.precopy + bytes.downtime
}

fn xbzrle_cache(xbzrle: &XbzrleFigures) -> XbzrleCacheStats {
    XbzrleCacheStats {
        cache_size: xbzrle.cache_bytes,
        bytes: xbzrle.bytes,
        pages: xbzrle.pages,
        cache_miss: xbzrle.cache_misses,
        cache_miss_rate: xbzrle.cache_miss_rate,
        encoding_rate: xbzrle.encoding_rate,
        overflow: xbzrle.overflows,
    }
}

/// Returns the statistics of accelerator jobs; `None` if the method or the zero page detection uses no accelerator.
fn accelerator_jobs(jobs: &JobFigures) -> Option<AcceleratorJobs> {
    (*jobs != JobFigures::default()).then(|| AcceleratorJobs {
        hardware: jobs.hardware,
        software: jobs.software,
        retries: jobs.retries,
        raw_pages: jobs.raw_pages,
        devices: jobs.devices.clone(),
        fallback: jobs.fallback.clone(),
    })
}

fn thread_times(threads: &[ThreadCpu]) -> Vec<ThreadTime> {
    let threads = threads.iter().map(|thread| ThreadTime {
        name: thread.name.clone(),
        cpu_time: rounded(thread.cpu_s * 1e6),
    });
    threads.collect()
}

fn ms(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

/// Answers `query-migrationthreads`: lists the threads of an active migration of this source.
pub fn threads() -> Vec<MigrationThreadInfo> {
    let threads = source_threads().map(|(id, name)| MigrationThreadInfo {
        name,
        thread_id: id,
    });
    threads.collect()
}

/// Returns the CPU time of each thread of this process, as the kernel reports it.
fn cpu_of_threads() -> Vec<ThreadCpu> {
    source_threads()
        .filter_map(|(id, name)| {
            let text = std::fs::read_to_string(format!("/proc/self/task/{id}/schedstat")).ok()?;
            let time: u64 = text.split(' ').next()?.parse().ok()?;
            Some(ThreadCpu {
                name,
                cpu_s: Duration::from_nanos(time).as_secs_f64(),
            })
        })
        .collect()
}

fn source_threads() -> impl Iterator<Item = (u64, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    tasks.filter_map(|task| {
        let task = task.ok()?;
        let id = task.file_name().to_str()?.parse().ok()?;
        // Skips a thread that has ended in the meantime: its name cannot be read.
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let name = name.trim_end().to_owned();
        let is_one = SOURCE_THREADS.iter().any(|begin| name.starts_with(begin));
        is_one.then_some((id, name))
    })
}

#[cfg(test)]
mod tests {
    use hotlift::figures::PostcopyFigures;
    use serde_json::json;

    use super::*;

    #[test]
    fn blocktime_is_reported_in_qemus_members_and_units_if_measured() {
        let shown = |blocktime| {
            let report = DestinationReport {
                postcopy: Some(Box::new(PostcopyFigures {
                    blocktime,
                    ..PostcopyFigures::default()
                })),
                ..DestinationReport::default()
            };
            serde_json::to_value(destination_completed(&report)).unwrap()
        };
        let blocktime = BlocktimeFigures {
            all_ms: 1.2,
            vcpu_ms: vec![3.5, 1.2],
            vcpu_waits: 7,
            vcpu_wait_us: [100.0, 900.0, 2000.0],
            mean_ns: 150_000,
            vcpu_mean_ns: vec![160_000, 120_000],
            other_mean_ns: 90_000,
            by_time: vec![0, 3, 5],
        };
        assert_eq!(
            shown(Some(blocktime)),
            json!({
                "status": "completed",
                "postcopy-blocktime": 1,
                "postcopy-vcpu-blocktime": [3, 1],
                "postcopy-latency": 150_000,
                "postcopy-latency-dist": [0, 3, 5],
                "postcopy-vcpu-latency": [160_000, 120_000],
                "postcopy-non-vcpu-latency": 90_000,
                "x-hotlift-vcpu-waits": { "count": 7, "p50": 100, "p99": 900, "max": 2000 },
                "x-hotlift-threads": [],
            })
        );
        let plain = json!({ "status": "completed", "x-hotlift-threads": [] });
        assert_eq!(shown(None), plain);
    }

    #[test]
    fn the_host_that_delays_a_migration_is_in_its_member() {
        let stall = Stall {
            kind: hotlift::progress::StallKind::Silent,
            peer: std::net::Ipv4Addr::new(192, 0, 2, 2).into(),
            time: Duration::from_secs(12),
        };
        let shown = |stall| {
            let info = with_stall(only_status(Status::Active), stall);
            serde_json::to_value(info).unwrap()
        };
        assert_eq!(shown(None), json!({ "status": "active" }));
        assert_eq!(
            shown(Some(stall)),
            json!({ "status": "active", "x-hotlift-stall": "192.0.2.2 silent for 12 s" })
        );
    }

    #[test]
    fn compression_is_reported_if_on_and_busy_threads_if_known() {
        let mut options = Options::default();
        assert!(Compression::of(&options).is_none());
        options.set("compress", "on").unwrap();
        let shown = |options: &Options| {
            let progress = Progress {
                normal_pages: 1000,
                zero_pages: 10,
                bytes: ByteFigures {
                    multifd: 0,
                    precopy: 1000 * (8 + 1024) + 10 * 9,
                    ..ByteFigures::default()
                },
                ..not_begun(1 << 30)
            };
            let jobs = JobFigures::default();
            let compression = Compression::of(options);
            let info = source_under_way(
                Status::Active,
                Duration::ZERO,
                &progress,
                &jobs,
                compression,
            );
            let normal = info.ram.map(|ram| ram.normal);
            assert_eq!(normal, Some(0), "QEMU counts them once");
            serde_json::to_value(info.compression).unwrap()
        };
        assert_eq!(
            shown(&options),
            json!({
                "pages": 1000,
                "busy": 0,
                "busy-rate": 0.0,
                "compressed-size": 1000 * 1024,
                "compression-rate": 4.0,
            })
        );
        options.set("compress-wait-thread", "off").unwrap();
        assert_eq!(shown(&options).get("busy"), None);
    }
}
