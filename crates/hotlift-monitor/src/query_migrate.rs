//! What `query-migrate` and `query-migrationthreads` answer: QEMU's members and units, and ours with the
//! prefix `x-hotlift-`.

use std::time::Duration;

use hotlift::figures::{
    ByteFigures, DestinationReport, JobFigures, SourceReport, ThreadCpu, XbzrleFigures,
};
use hotlift::progress::Progress;
use hotlift::relay::{RelayProgress, RelayReport};
use hotlift::{Options, Status};
use hotlift_console::progress::rounded;
use hotlift_mem::PAGE_SIZE;
use serde_json::{Map, Value, json};

/// How the threads of a migration's source are called.
const OF_A_SOURCE: &[&str] = &["mig/src/", "compress_", "dsa_completion"];

/// What goes into `ram`.
struct Ram {
    transferred: u64,
    remaining: u64,
    total: u64,
    normal: u64,
    zero: u64,
    dirty_pages_rate: f64,
    mbps: f64,
    dirty_syncs: u64,
    pages_per_second: f64,
    bytes: ByteFigures,
}

impl Ram {
    fn to_json(&self) -> Value {
        json!({
            "transferred": self.transferred,
            "remaining": self.remaining,
            "total": self.total,
            "duplicate": self.zero,
            "normal": self.normal,
            "normal-bytes": self.normal * PAGE_SIZE as u64,
            "dirty-pages-rate": rounded(self.dirty_pages_rate),
            "mbps": self.mbps,
            "dirty-sync-count": self.dirty_syncs,
            "postcopy-requests": 0,
            "page-size": PAGE_SIZE,
            "multifd-bytes": self.bytes.multifd,
            "pages-per-second": rounded(self.pages_per_second),
            "precopy-bytes": self.bytes.precopy,
            "downtime-bytes": self.bytes.downtime,
            "postcopy-bytes": 0,
            "dirty-sync-missed-zero-copy": 0,
        })
    }
}

/// What capability `compress` has done (QEMU's `CompressionStats`, up to 9.0), as far as the figures of the
/// migration tell: all of its pages travel on the main channel.
#[derive(Debug, Clone, Copy)]
pub struct Compression {
    /// Whether pages wait for a thread; if not, it is not known how many found none.
    pub waits: bool,
}

impl Compression {
    /// Of a migration with `options`; `None` without the capability.
    pub fn of(options: &Options) -> Option<Self> {
        options.compress.then_some(Self {
            waits: options.compress_wait_thread,
        })
    }

    /// `main` are the bytes of the main channel. Besides pages it carries some hundred bytes a round and the
    /// state of devices, which count as compressed here.
    fn to_json(self, main: u64, normal: u64, zero: u64) -> Value {
        /// Bytes before the content of a page, and of a page that is zero (`RAM_SAVE_FLAG_CONTINUE`).
        const HEADER: u64 = 8;
        const ZERO: u64 = HEADER + 1;
        let size = main.saturating_sub(normal * HEADER + zero * ZERO);
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let rate = match size {
            0 => 0.0,
            size => (normal * PAGE_SIZE as u64) as f64 / size as f64,
        };
        let mut value = json!({
            "pages": normal,
            "compressed-size": size,
            "compression-rate": rate,
        });
        if self.waits {
            value["busy"] = json!(0);
            value["busy-rate"] = json!(0.0);
        }
        value
    }
}

/// Pages that QEMU counts as normal, of those that have content: not those of `compression` and of XBZRLE, which have
/// counts of their own. Pages on multifd channels are normal, whatever the method.
fn uncompressed(
    with_content: u64,
    compression: Option<Compression>,
    xbzrle: Option<&XbzrleFigures>,
) -> u64 {
    match (compression, xbzrle) {
        (Some(_), _) => 0,
        (None, Some(xbzrle)) => with_content.saturating_sub(xbzrle.pages),
        (None, None) => with_content,
    }
}

fn add_compression(
    info: &mut Map<String, Value>,
    compression: Option<Compression>,
    main: u64,
    (normal, zero): (u64, u64),
) {
    if let Some(compression) = compression {
        let value = compression.to_json(main, normal, zero);
        info.insert("compression".to_owned(), value);
    }
}

/// A migration in this state, which nothing else is to be said of.
pub fn only_status(status: Status) -> Map<String, Value> {
    Map::from_iter([("status".to_owned(), json!(status.name()))])
}

/// What a source's migration of `total_bytes` of RAM says of itself before its first report.
pub fn not_begun(total_bytes: u64) -> Progress {
    Progress {
        status: Status::Setup,
        round: 1,
        total_bytes,
        remaining_bytes: total_bytes,
        transferred_bytes: 0,
        bytes_per_second: 0.0,
        pages_per_second: 0.0,
        dirty_pages_per_second: 0.0,
        elapsed: Duration::ZERO,
        time_left: None,
        setup: None,
        expected_downtime: None,
        normal_pages: 0,
        zero_pages: 0,
        dirty_syncs: 1,
        bytes: ByteFigures::default(),
        throttle_percent: 0,
        throttle_refused: false,
        auto_converge: false,
        bandwidth_limited: false,
        xbzrle: None,
        stalled: false,
    }
}

/// A source's migration that is under way.
pub fn under_way(
    status: Status,
    elapsed: Duration,
    progress: &Progress,
    jobs: &JobFigures,
    compression: Option<Compression>,
) -> Map<String, Value> {
    let mut info = only_status(status);
    let ram = Ram {
        transferred: progress.transferred_bytes,
        remaining: progress.remaining_bytes,
        total: progress.total_bytes,
        normal: uncompressed(progress.normal_pages, compression, progress.xbzrle.as_ref()),
        zero: progress.zero_pages,
        dirty_pages_rate: progress.dirty_pages_per_second,
        mbps: progress.bytes_per_second * 8.0 / 1e6,
        dirty_syncs: progress.dirty_syncs,
        pages_per_second: progress.pages_per_second,
        bytes: progress.bytes,
    };
    let mut add = |name: &str, value: Value| info.insert(name.to_owned(), value);
    add("ram", ram.to_json());
    add("total-time", json!(ms(elapsed)));
    add("setup-time", json!(ms(progress.setup.unwrap_or_default())));
    add(
        "expected-downtime",
        json!(ms(progress.expected_downtime.unwrap_or_default())),
    );
    if progress.throttle_percent > 0 {
        add("cpu-throttle-percentage", json!(progress.throttle_percent));
    }
    add("x-hotlift-round", json!(progress.round));
    if let Some(left) = progress.time_left {
        add("x-hotlift-time-left", json!(ms(left)));
    }
    if let Some(reason) = progress.stall_reason() {
        add("x-hotlift-stall-reason", json!(reason));
    }
    add_xbzrle(&mut info, progress.xbzrle.as_ref());
    let main = progress.bytes.precopy + progress.bytes.downtime;
    let pages = (progress.normal_pages, progress.zero_pages);
    add_compression(&mut info, compression, main, pages);
    add_jobs(&mut info, jobs, &JobFigures::default());
    add_threads(&mut info, &cpu_of_threads());
    info
}

/// A source's migration that has completed.
pub fn sent(
    report: &SourceReport,
    total: u64,
    dirty_pages_rate: f64,
    compression: Option<Compression>,
) -> Map<String, Value> {
    let mut info = only_status(Status::Completed);
    let ram = Ram {
        transferred: report.transferred_bytes,
        remaining: 0,
        total,
        normal: uncompressed(report.normal_pages, compression, report.xbzrle.as_ref()),
        zero: report.zero_pages,
        dirty_pages_rate,
        mbps: report.throughput_mbps,
        dirty_syncs: report.dirty_syncs,
        pages_per_second: report.pages_per_second,
        bytes: report.bytes,
    };
    let mut add = |name: &str, value: Value| info.insert(name.to_owned(), value);
    add("ram", ram.to_json());
    add("total-time", json!(rounded(report.total_ms)));
    add("setup-time", json!(rounded(report.setup_ms)));
    add("downtime", json!(rounded(report.downtime_ms)));
    add("x-hotlift-round", json!(report.rounds));
    add_xbzrle(&mut info, report.xbzrle.as_ref());
    let main = report.bytes.precopy + report.bytes.downtime;
    let pages = (report.normal_pages, report.zero_pages);
    add_compression(&mut info, compression, main, pages);
    add_jobs(&mut info, &report.side.jobs, &report.side.zero_jobs);
    add_threads(&mut info, &report.side.threads);
    info
}

/// A destination's that has completed.
pub fn received(report: &DestinationReport) -> Map<String, Value> {
    let mut info = only_status(Status::Completed);
    add_jobs(&mut info, &report.side.jobs, &report.side.zero_jobs);
    add_threads(&mut info, &report.side.threads);
    info
}

/// A migration that passes through a relay.
pub fn passing(
    status: Status,
    progress: &RelayProgress,
    jobs: &JobFigures,
    compression: Option<Compression>,
) -> Map<String, Value> {
    let seconds = progress.elapsed.as_secs_f64();
    let rate = |count: u64| {
        if seconds > 0.0 {
            count as f64 / seconds
        } else {
            0.0
        }
    };
    let pages = progress.normal_pages + progress.zero_pages;
    let mut info = only_status(status);
    let ram = Ram {
        transferred: progress.sent_bytes,
        remaining: 0,
        total: progress.total_bytes,
        normal: uncompressed(progress.normal_pages, compression, None),
        zero: progress.zero_pages,
        dirty_pages_rate: 0.0,
        mbps: rate(progress.sent_bytes) * 8.0 / 1e6,
        dirty_syncs: 0,
        pages_per_second: rate(pages),
        bytes: ByteFigures::default(),
    };
    info.insert("ram".to_owned(), ram.to_json());
    info.insert("total-time".to_owned(), json!(ms(progress.elapsed)));
    let received = json!(progress.received_bytes);
    info.insert("x-hotlift-received".to_owned(), received);
    let pages = (progress.normal_pages, progress.zero_pages);
    add_compression(&mut info, compression, progress.sent_bytes, pages);
    add_jobs(&mut info, jobs, &JobFigures::default());
    info
}

/// A migration that has passed through a relay.
pub fn passed(
    report: &RelayReport,
    total: u64,
    compression: Option<Compression>,
) -> Map<String, Value> {
    let elapsed = Duration::try_from_secs_f64(report.total_ms / 1e3).unwrap_or_default();
    let progress = RelayProgress {
        elapsed,
        received_bytes: report.received_bytes,
        sent_bytes: report.sent_bytes,
        normal_pages: report.normal_pages,
        zero_pages: report.zero_pages,
        total_bytes: total,
    };
    let mut info = passing(Status::Completed, &progress, &report.side.jobs, compression);
    add_threads(&mut info, &report.side.threads);
    info
}

fn add_xbzrle(info: &mut Map<String, Value>, xbzrle: Option<&XbzrleFigures>) {
    if let Some(xbzrle) = xbzrle {
        let value = json!({
            "cache-size": xbzrle.cache_bytes,
            "bytes": xbzrle.bytes,
            "pages": xbzrle.pages,
            "cache-miss": xbzrle.cache_misses,
            "cache-miss-rate": xbzrle.cache_miss_rate,
            "encoding-rate": xbzrle.encoding_rate,
            "overflow": xbzrle.overflows,
        });
        info.insert("xbzrle-cache".to_owned(), value);
    }
}

/// Only of methods and modes that have jobs at all.
fn add_jobs(info: &mut Map<String, Value>, jobs: &JobFigures, zero_jobs: &JobFigures) {
    let named = [
        ("x-hotlift-jobs", jobs),
        ("x-hotlift-zero-page-jobs", zero_jobs),
    ];
    for (name, jobs) in named {
        if *jobs == JobFigures::default() {
            continue;
        }
        let mut value = json!({
            "hardware": jobs.hardware,
            "software": jobs.software,
            "retries": jobs.retries,
            "raw-pages": jobs.raw_pages,
            "devices": jobs.devices,
        });
        if let Some(fallback) = &jobs.fallback {
            value["fallback"] = json!(fallback);
        }
        info.insert(name.to_owned(), value);
    }
}

/// CPU time in microseconds.
fn add_threads(info: &mut Map<String, Value>, threads: &[ThreadCpu]) {
    let threads = threads
        .iter()
        .map(|thread| json!({ "name": thread.name, "cpu-time": rounded(thread.cpu_s * 1e6) }))
        .collect();
    info.insert("x-hotlift-threads".to_owned(), threads);
}

fn ms(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

/// `query-migrationthreads`: those of a source that runs now.
pub fn threads() -> Value {
    let threads = source_threads().map(|(id, name)| json!({ "name": name, "thread-id": id }));
    threads.collect()
}

/// What the kernel has counted for each of them so far.
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

fn source_threads() -> impl Iterator<Item = (u32, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    tasks.filter_map(|task| {
        let task = task.ok()?;
        let id = task.file_name().to_str()?.parse().ok()?;
        // A thread that ends meanwhile has no name any more.
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let name = name.trim_end().to_owned();
        let is_one = OF_A_SOURCE.iter().any(|begin| name.starts_with(begin));
        is_one.then_some((id, name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compression_is_told_where_it_is_on_and_busy_threads_where_they_are_known() {
        let mut options = Options::default();
        assert!(Compression::of(&options).is_none());
        options.set("compress", "on").unwrap();
        let told = |options: &Options| {
            let progress = Progress {
                normal_pages: 1000,
                zero_pages: 10,
                bytes: ByteFigures {
                    multifd: 0,
                    precopy: 1000 * (8 + 1024) + 10 * 9,
                    downtime: 0,
                },
                ..not_begun(1 << 30)
            };
            let jobs = JobFigures::default();
            let compression = Compression::of(options);
            let info = under_way(
                Status::Active,
                Duration::ZERO,
                &progress,
                &jobs,
                compression,
            );
            assert_eq!(info["ram"]["normal"], json!(0), "QEMU counts them once");
            info["compression"].clone()
        };
        assert_eq!(
            told(&options),
            json!({
                "pages": 1000,
                "busy": 0,
                "busy-rate": 0.0,
                "compressed-size": 1000 * 1024,
                "compression-rate": 4.0,
            })
        );
        options.set("compress-wait-thread", "off").unwrap();
        assert_eq!(told(&options).get("busy"), None);
    }
}
