//! What is said of a migration. Members with the prefix `x-hotlift-` are Hotlift's own.

use serde::{Deserialize, Deserializer};

use crate::qapi::{Type, objects};

objects! {
    /// What `query-migrate` answers. Members that this QEMU does not send are `None`.
    #[derive(Default)]
    MigrationInfo = "MigrationInfo" {
        needed {}
        optional {
            /// QEMU's name of the state (`MigrationStatus`); `None` if there was no migration yet.
            "status" status: String = Type::Enum("MigrationStatus"),
            /// Figures of RAM; absent in set-up and after a failure.
            "ram" ram: MigrationStats,
            /// What XBZRLE has done, if it is on.
            "xbzrle-cache" xbzrle_cache: XbzrleCacheStats,
            /// What `compress` has done, if it is on.
            "compression" compression: CompressionStats,
            /// Time since its start, in milliseconds.
            #[serde(deserialize_with = "not_negative")]
            "total-time" total_time: u64,
            /// How long the guest would stand still if it were switched over now, in milliseconds; only while it is
            /// under way.
            #[serde(deserialize_with = "not_negative")]
            "expected-downtime" expected_downtime: u64,
            /// How long the guest stood still, in milliseconds; only when completed.
            #[serde(deserialize_with = "not_negative")]
            "downtime" downtime: u64,
            /// Time from its start until the first page could be sent, in milliseconds.
            #[serde(deserialize_with = "not_negative")]
            "setup-time" setup_time: u64,
            /// Percent of its time that the guest is kept from running so that the migration converges.
            #[serde(deserialize_with = "not_negative")]
            "cpu-throttle-percentage" cpu_throttle_percentage: u64,
            /// How long all vCPUs waited for pages at once, in milliseconds; of a destination with `postcopy-blocktime`
            /// that has completed, as the next five.
            "postcopy-blocktime" postcopy_blocktime: u64,
            /// How long each vCPU waited, in milliseconds.
            "postcopy-vcpu-blocktime" postcopy_vcpu_blocktime: Vec<u64>,
            /// How long a wait for a page lasted on average, in nanoseconds (QEMU 10.1 and newer).
            "postcopy-latency" postcopy_latency: u64,
            /// Waits by how long they lasted, the n-th from 2^n microseconds on (QEMU 10.1 and newer).
            "postcopy-latency-dist" postcopy_latency_dist: Vec<u64>,
            /// As `postcopy-latency`, of each vCPU.
            "postcopy-vcpu-latency" postcopy_vcpu_latency: Vec<u64>,
            /// The same of threads that are no vCPU's.
            "postcopy-non-vcpu-latency" postcopy_non_vcpu_latency: u64,
            /// Why it failed, in QEMU's words.
            "error-desc" error_desc: String,
            /// Why QEMU does not migrate this machine at all; absent if it does.
            "blocked-reasons" blocked_reasons: Vec<String>,
            /// Where a source can connect to.
            "socket-address" socket_address: Vec<SocketAddress>,
            /// Present pass over the dirty pages, from 1.
            "x-hotlift-round" round: u64,
            /// Time that the rest of this round takes at the present rate, in milliseconds.
            "x-hotlift-time-left" time_left: u64,
            /// Why the migration does not converge, in words for an operator.
            "x-hotlift-stall-reason" stall_reason: String,
            /// What packets go as, where each has its own method, and why, in words for an operator.
            "x-hotlift-methods" methods: String,
            /// What has done the work of the method, where an accelerator may have.
            "x-hotlift-jobs" jobs: AcceleratorJobs,
            /// What has looked for zero pages, where devices were to.
            "x-hotlift-zero-page-jobs" zero_page_jobs: AcceleratorJobs,
            /// How long vCPUs waited for a page, with `postcopy-blocktime`.
            "x-hotlift-vcpu-waits" vcpu_waits: VcpuWaits,
            /// CPU time of the migration's threads.
            "x-hotlift-threads" threads: Vec<ThreadTime>,
            /// Bytes that a relay has received.
            "x-hotlift-received" received: u64,
            /// The host that holds the migration up: it is silent, or reads nothing, and for how long.
            "x-hotlift-stall" stall: String,
        }
    }

    /// Figures of RAM. What an older QEMU does not count is 0.
    #[derive(Default)]
    #[serde(default)]
    MigrationStats = "MigrationStats" {
        needed {
            /// Bytes sent.
            "transferred" transferred: u64,
            /// Bytes of RAM still dirty.
            "remaining" remaining: u64,
            /// Bytes of RAM.
            "total" total: u64,
            /// Zero pages.
            "duplicate" duplicate: u64,
            /// Pages sent with their content.
            "normal" normal: u64,
            /// Bytes of the same.
            "normal-bytes" normal_bytes: u64,
            /// Pages that the guest dirtied a second, in the last round.
            "dirty-pages-rate" dirty_pages_rate: u64,
            /// Rate of sending, in 10^6 bit/s.
            "mbps" mbps: f64,
            /// Rounds so far: how often the dirty log was fetched.
            "dirty-sync-count" dirty_sync_count: u64,
            /// Pages that a destination in postcopy has asked for.
            "postcopy-requests" postcopy_requests: u64,
            /// Bytes of a page.
            "page-size" page_size: u64,
            /// Bytes sent on multifd channels.
            "multifd-bytes" multifd_bytes: u64,
            /// Pages sent a second.
            "pages-per-second" pages_per_second: u64,
            /// Bytes sent on the main channel while the guest ran.
            "precopy-bytes" precopy_bytes: u64,
            /// Bytes sent on the main channel while the guest stood still.
            "downtime-bytes" downtime_bytes: u64,
            /// Bytes sent in postcopy.
            "postcopy-bytes" postcopy_bytes: u64,
            /// How often `zero-copy-send` fell back to copies.
            "dirty-sync-missed-zero-copy" dirty_sync_missed_zero_copy: u64,
        }
        optional {}
    }

    /// What XBZRLE has done.
    #[derive(Default)]
    #[serde(default)]
    XbzrleCacheStats = "XBZRLECacheStats" {
        needed {
            /// Bytes of the cache.
            #[serde(deserialize_with = "count")]
            "cache-size" cache_size: u64,
            /// Bytes of XBZRLE pages sent.
            #[serde(deserialize_with = "count")]
            "bytes" bytes: u64,
            /// Pages sent so.
            #[serde(deserialize_with = "count")]
            "pages" pages: u64,
            /// Pages that the cache did not hold.
            #[serde(deserialize_with = "count")]
            "cache-miss" cache_miss: u64,
            /// Misses over the pages looked for, in the last round.
            "cache-miss-rate" cache_miss_rate: f64,
            /// Bytes of the pages over bytes sent for them, in the last round.
            "encoding-rate" encoding_rate: f64,
            /// Pages whose changes took more room than the page.
            #[serde(deserialize_with = "count")]
            "overflow" overflow: u64,
        }
        optional {}
    }

    /// What capability `compress` has done; of QEMUs up to 9.0.
    #[derive(Default)]
    #[serde(default)]
    CompressionStats = "CompressionStats" {
        needed {
            /// Pages compressed and sent.
            #[serde(deserialize_with = "count")]
            "pages" pages: u64,
            /// Their bytes when compressed.
            #[serde(deserialize_with = "count")]
            "compressed-size" compressed_size: u64,
            /// Their bytes before over those after.
            "compression-rate" compression_rate: f64,
        }
        optional {
            /// How often no thread was free; absent where that is not counted.
            #[serde(deserialize_with = "not_negative")]
            "busy" busy: u64,
            /// The same over the pages of the last round.
            "busy-rate" busy_rate: f64,
        }
    }

    /// Where a source can connect to.
    SocketAddress = "SocketAddress" {
        needed {
            /// `inet` or `unix`.
            "type" kind: String = Type::Enum("SocketAddressType"),
        }
        optional {
            /// Of `inet`.
            "host" host: String,
            /// Of `inet`.
            "port" port: String,
            /// Of `inet`: whether it is IPv4.
            "ipv4" ipv4: bool,
            /// Of `unix`.
            "path" path: String,
        }
    }

    /// One of what `query-migrate-capabilities` answers.
    MigrationCapabilityStatus = "MigrationCapabilityStatus" {
        needed {
            /// QEMU's name of the capability.
            "capability" capability: String = Type::Enum("MigrationCapability"),
            /// Whether it is on.
            "state" state: bool,
        }
        optional {}
    }

    /// One of what `query-migrationthreads` answers.
    MigrationThreadInfo = "MigrationThreadInfo" {
        needed {
            /// Name of the thread.
            "name" name: String,
            /// The kernel's id of it.
            "thread-id" thread_id: u64,
        }
        optional {}
    }

    /// How long vCPUs waited for a page.
    VcpuWaits = "XHotliftVcpuWaits" {
        needed {
            /// Waits.
            "count" count: u64,
            /// The median, in microseconds.
            "p50" p50: u64,
            /// One in a hundred lasted longer, in microseconds.
            "p99" p99: u64,
            /// The longest, in microseconds.
            "max" max: u64,
        }
        optional {}
    }

    /// CPU time of a thread.
    ThreadTime = "XHotliftThread" {
        needed {
            /// Name of the thread.
            "name" name: String,
            /// Microseconds.
            "cpu-time" cpu_time: u64,
        }
        optional {}
    }

    /// Jobs that an accelerator could do.
    AcceleratorJobs = "XHotliftJobs" {
        needed {
            /// Jobs of an accelerator.
            "hardware" hardware: u64,
            /// Jobs done on the CPU.
            "software" software: u64,
            /// Submissions repeated because the accelerator was busy.
            "retries" retries: u64,
            /// Pages that did not shrink and travelled as they are.
            "raw-pages" raw_pages: u64,
            /// What drove the accelerators.
            "devices" devices: Vec<String>,
        }
        optional {
            /// Why an accelerator was not used, or not to the end.
            "fallback" fallback: String,
        }
    }
}

impl MigrationInfo {
    /// QEMU's name of the state; `none` if there was no migration yet.
    #[must_use]
    pub fn status(&self) -> &str {
        self.status.as_deref().unwrap_or("none")
    }

    /// True while a migration is under way: neither idle nor ended.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !matches!(self.status(), "none" | "completed" | "failed" | "cancelled")
    }

    /// True if it ended and the guest stayed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        matches!(self.status(), "failed" | "cancelled")
    }

    /// True if it completed.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        self.status() == "completed"
    }
}

/// A count that is signed in QEMU: 7.2 has been seen to send a `compressed-size` below 0.
fn count<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    Ok(not_negative(from)?.unwrap_or(0))
}

/// QEMU's times are signed, and an estimate of "for ever" may come as anything.
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
    fn what_cleans_up_after_a_failure_or_waits_for_devices_has_not_ended() {
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

    /// The schema is read off the types; so it says of each member what serde does.
    #[test]
    fn what_is_written_has_the_members_that_the_schema_has() {
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
