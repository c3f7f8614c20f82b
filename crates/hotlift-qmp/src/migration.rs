//! Types of answers about a migration. Only Hotlift sends the members with the prefix `x-hotlift-`.

use serde::{Deserialize, Deserializer};

use crate::qapi::{Type, objects};

objects! {
    /// Answer of `query-migrate`. A member that the answer does not contain is `None`.
    #[derive(Default)]
    MigrationInfo = "MigrationInfo" {
        needed {}
        optional {
            /// QEMU's name of the state (`MigrationStatus`); `None` if there was no migration yet.
            "status" status: String = Type::Enum("MigrationStatus"),
            /// RAM statistics; absent during set-up and after a failure.
            "ram" ram: MigrationStats,
            /// Statistics of XBZRLE; absent if XBZRLE is off.
            "xbzrle-cache" xbzrle_cache: XbzrleCacheStats,
            /// Statistics of `compress`; absent if `compress` is off.
            "compression" compression: CompressionStats,
            /// Time since the start of the migration, in milliseconds.
            #[serde(deserialize_with = "not_negative")]
            "total-time" total_time: u64,
            /// Expected downtime of a switchover now, in milliseconds; only while the migration is active.
            #[serde(deserialize_with = "not_negative")]
            "expected-downtime" expected_downtime: u64,
            /// Downtime in milliseconds; only when completed.
            #[serde(deserialize_with = "not_negative")]
            "downtime" downtime: u64,
            /// Time from the start of the migration until the first page could be sent, in milliseconds.
            #[serde(deserialize_with = "not_negative")]
            "setup-time" setup_time: u64,
            /// Percentage of time for which the guest is throttled, to make the migration converge.
            #[serde(deserialize_with = "not_negative")]
            "cpu-throttle-percentage" cpu_throttle_percentage: u64,
            /// Time in which all vCPUs waited for pages at the same time, in milliseconds. This member and the other
            /// `postcopy-` members come from a destination with `postcopy-blocktime`, after completion.
            "postcopy-blocktime" postcopy_blocktime: u64,
            /// Wait time of each vCPU, in milliseconds.
            "postcopy-vcpu-blocktime" postcopy_vcpu_blocktime: Vec<u64>,
            /// Average time to wait for a page, in nanoseconds (QEMU 10.1 and newer).
            "postcopy-latency" postcopy_latency: u64,
            /// Histogram of the times to wait for a page: the n-th bucket starts at 2^n microseconds (QEMU 10.1 and newer).
            "postcopy-latency-dist" postcopy_latency_dist: Vec<u64>,
            /// Average time of each vCPU to wait for a page, in nanoseconds.
            "postcopy-vcpu-latency" postcopy_vcpu_latency: Vec<u64>,
            /// Average time of other threads than vCPUs to wait for a page, in nanoseconds.
            "postcopy-non-vcpu-latency" postcopy_non_vcpu_latency: u64,
            /// Reason for the failure, in QEMU's text.
            "error-desc" error_desc: String,
            /// Reasons why QEMU cannot migrate this machine; absent if there are none.
            "blocked-reasons" blocked_reasons: Vec<String>,
            /// Addresses at which a destination listens for the source.
            "socket-address" socket_address: Vec<SocketAddress>,
            /// Number of the current round over the dirty pages, from 1.
            "x-hotlift-round" round: u64,
            /// Time to send the remaining pages of this round at the current rate, in milliseconds.
            "x-hotlift-time-left" time_left: u64,
            /// Reason why the migration does not converge, as text for an operator.
            "x-hotlift-stall-reason" stall_reason: String,
            /// Methods of the packets and the reasons for them, as text for an operator; only with method auto.
            "x-hotlift-methods" methods: String,
            /// Jobs of the compression method; only if an accelerator may be used.
            "x-hotlift-jobs" jobs: AcceleratorJobs,
            /// Jobs that detect zero pages; only if accelerators are configured for this.
            "x-hotlift-zero-page-jobs" zero_page_jobs: AcceleratorJobs,
            /// Times that vCPUs waited for a page, with `postcopy-blocktime`.
            "x-hotlift-vcpu-waits" vcpu_waits: VcpuWaits,
            /// CPU time of the migration's threads.
            "x-hotlift-threads" threads: Vec<ThreadTime>,
            /// Number of bytes that a relay has received.
            "x-hotlift-received" received: u64,
            /// The host that delays the migration, the kind of stall (silent, or reads no data) and its duration, as text.
            "x-hotlift-stall" stall: String,
        }
    }

    /// RAM statistics. Values that an older QEMU does not count are 0.
    #[derive(Default)]
    #[serde(default)]
    MigrationStats = "MigrationStats" {
        needed {
            /// Bytes sent.
            "transferred" transferred: u64,
            /// Bytes of RAM that are still dirty.
            "remaining" remaining: u64,
            /// Bytes of all RAM.
            "total" total: u64,
            /// Number of pages sent as zero pages.
            "duplicate" duplicate: u64,
            /// Number of pages sent with their content.
            "normal" normal: u64,
            /// Bytes of pages sent with their content.
            "normal-bytes" normal_bytes: u64,
            /// Number of pages that the guest dirtied per second, in the last round.
            "dirty-pages-rate" dirty_pages_rate: u64,
            /// Send rate, in 10^6 bit/s.
            "mbps" mbps: f64,
            /// Number of fetches of the dirty log so far (QEMU's count of rounds).
            "dirty-sync-count" dirty_sync_count: u64,
            /// Number of pages that the destination has requested in postcopy.
            "postcopy-requests" postcopy_requests: u64,
            /// Page size in bytes.
            "page-size" page_size: u64,
            /// Bytes sent on multifd channels.
            "multifd-bytes" multifd_bytes: u64,
            /// Number of pages sent per second.
            "pages-per-second" pages_per_second: u64,
            /// Bytes sent on the main channel while the guest ran.
            "precopy-bytes" precopy_bytes: u64,
            /// Bytes sent on the main channel while the guest was paused.
            "downtime-bytes" downtime_bytes: u64,
            /// Bytes sent in postcopy.
            "postcopy-bytes" postcopy_bytes: u64,
            /// Number of times that `zero-copy-send` copied the data instead.
            "dirty-sync-missed-zero-copy" dirty_sync_missed_zero_copy: u64,
        }
        optional {}
    }

    /// XBZRLE statistics.
    #[derive(Default)]
    #[serde(default)]
    XbzrleCacheStats = "XBZRLECacheStats" {
        needed {
            /// Cache size in bytes.
            #[serde(deserialize_with = "count")]
            "cache-size" cache_size: u64,
            /// Number of bytes sent for XBZRLE pages.
            #[serde(deserialize_with = "count")]
            "bytes" bytes: u64,
            /// Number of XBZRLE pages sent.
            #[serde(deserialize_with = "count")]
            "pages" pages: u64,
            /// Number of pages not found in the cache.
            #[serde(deserialize_with = "count")]
            "cache-miss" cache_miss: u64,
            /// Ratio of cache misses to searched pages, in the last round.
            "cache-miss-rate" cache_miss_rate: f64,
            /// Compression ratio: bytes of the pages divided by bytes sent for them, in the last round.
            "encoding-rate" encoding_rate: f64,
            /// Number of pages whose delta was larger than the page.
            #[serde(deserialize_with = "count")]
            "overflow" overflow: u64,
        }
        optional {}
    }

    /// Statistics of capability `compress`; QEMU up to 9.0.
    #[derive(Default)]
    #[serde(default)]
    CompressionStats = "CompressionStats" {
        needed {
            /// Number of pages compressed and sent.
            #[serde(deserialize_with = "count")]
            "pages" pages: u64,
            /// Compressed size in bytes.
            #[serde(deserialize_with = "count")]
            "compressed-size" compressed_size: u64,
            /// Compression ratio: size before compression divided by size after.
            "compression-rate" compression_rate: f64,
        }
        optional {
            /// Number of times that no compression thread was free; absent if this is not counted.
            #[serde(deserialize_with = "not_negative")]
            "busy" busy: u64,
            /// `busy` in the last round, divided by the number of pages in it.
            "busy-rate" busy_rate: f64,
        }
    }

    /// Address at which a destination listens.
    SocketAddress = "SocketAddress" {
        needed {
            /// `inet` or `unix`.
            "type" kind: String = Type::Enum("SocketAddressType"),
        }
        optional {
            /// Host name or IP address; only for `inet`.
            "host" host: String,
            /// Port; only for `inet`.
            "port" port: String,
            /// True for IPv4; only for `inet`.
            "ipv4" ipv4: bool,
            /// Path of the socket; only for `unix`.
            "path" path: String,
        }
    }

    /// Element of the answer of `query-migrate-capabilities`.
    MigrationCapabilityStatus = "MigrationCapabilityStatus" {
        needed {
            /// QEMU's name of the capability.
            "capability" capability: String = Type::Enum("MigrationCapability"),
            /// True if the capability is enabled.
            "state" state: bool,
        }
        optional {}
    }

    /// Element of the answer of `query-migrationthreads`.
    MigrationThreadInfo = "MigrationThreadInfo" {
        needed {
            /// Name of the thread.
            "name" name: String,
            /// Kernel's thread id.
            "thread-id" thread_id: u64,
        }
        optional {}
    }

    /// Times that vCPUs waited for a page.
    VcpuWaits = "XHotliftVcpuWaits" {
        needed {
            /// Number of waits.
            "count" count: u64,
            /// Median in microseconds.
            "p50" p50: u64,
            /// 99th percentile in microseconds.
            "p99" p99: u64,
            /// Maximum in microseconds.
            "max" max: u64,
        }
        optional {}
    }

    /// CPU time of a thread.
    ThreadTime = "XHotliftThread" {
        needed {
            /// Name of the thread.
            "name" name: String,
            /// CPU time in microseconds.
            "cpu-time" cpu_time: u64,
        }
        optional {}
    }

    /// Statistics of the jobs that an accelerator can process.
    AcceleratorJobs = "XHotliftJobs" {
        needed {
            /// Number of jobs that an accelerator processed.
            "hardware" hardware: u64,
            /// Number of jobs that the CPU processed.
            "software" software: u64,
            /// Number of submissions that were repeated because the accelerator was busy.
            "retries" retries: u64,
            /// Number of pages that compression did not shrink, and that were sent uncompressed.
            "raw-pages" raw_pages: u64,
            /// Names of the accelerators used.
            "devices" devices: Vec<String>,
        }
        optional {
            /// Reason why an accelerator was not used, or only for a part of the migration; absent otherwise.
            "fallback" fallback: String,
        }
    }
}

impl MigrationInfo {
    /// Returns QEMU's name of the state; `none` if there was no migration yet.
    #[must_use]
    pub fn status(&self) -> &str {
        self.status.as_deref().unwrap_or("none")
    }

    /// Returns true while a migration is active: neither idle nor ended.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !matches!(self.status(), "none" | "completed" | "failed" | "cancelled")
    }

    /// Returns true if the migration ended, and the guest stayed at the source.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        matches!(self.status(), "failed" | "cancelled")
    }

    /// Returns true if the migration completed.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        self.status() == "completed"
    }
}

/// Parses a count that QEMU sends as a signed number; a negative one becomes 0. QEMU 7.2 can send a `compressed-size` below 0.
fn count<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    Ok(not_negative(from)?.unwrap_or(0))
}

/// Parses a value that QEMU sends as a signed number; a negative one becomes 0. For an infinite estimate QEMU may send any
/// number.
fn not_negative<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let number = Option::<serde_json::Number>::deserialize(from)?;
    Ok(number.map(|number| number.as_u64().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_idle_qemu_answers_an_empty_object() {
        let info: MigrationInfo = serde_json::from_value(json!({})).unwrap();
        assert_eq!(info, MigrationInfo::default());
        assert!(!info.is_running() && !info.has_failed() && !info.is_completed());
        assert_eq!(serde_json::to_value(&info).unwrap(), json!({}));
    }

    #[test]
    fn a_migration_that_cleans_up_or_waits_for_devices_has_not_ended() {
        for status in ["failing", "postcopy-device", "postcopy-recover-setup"] {
            let info: MigrationInfo = serde_json::from_value(json!({ "status": status })).unwrap();
            assert!(info.is_running() && !info.has_failed() && !info.is_completed());
        }
    }

    #[test]
    fn unknown_members_are_passed_over_and_negative_numbers_are_no_failure() {
        let info: MigrationInfo = serde_json::from_value(json!({
            "status": "active", "expected-downtime": -1, "total-time": 7, "x-new": {},
            "ram": { "mbps": 1.5, "remaining": 4096, "postcopy-requests": 0 },
            "compression": { "pages": 1, "busy": -1, "compressed-size": -8, "compression-rate": -512.0 },
        }))
        .unwrap();
        assert!(info.is_running());
        assert_eq!(
            (info.expected_downtime, info.total_time),
            (Some(0), Some(7))
        );
        assert_eq!(info.ram.unwrap().remaining, 4096);
        let compression = info.compression.unwrap();
        assert_eq!(
            (compression.busy, compression.compressed_size),
            (Some(0), 0)
        );
    }

    /// The schema is generated from the types, and must list exactly the members that serde writes.
    #[test]
    fn written_figures_have_exactly_the_members_of_the_schema() {
        let stats = serde_json::to_value(MigrationStats::default()).unwrap();
        let object = OBJECTS.iter().find(|one| one.name == "MigrationStats");
        let members = object.unwrap().members;
        assert_eq!(stats.as_object().unwrap().len(), members.len());
        for member in members {
            let value = &stats[member.name];
            let fits = match member.kind {
                Type::Int => value.is_u64(),
                Type::Number => value.is_f64(),
                _ => false,
            };
            assert!(fits && !member.optional, "{member:?}: {value}");
        }
    }
}
