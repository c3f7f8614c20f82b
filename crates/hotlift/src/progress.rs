//! Progress reports of a running migration, several a second.

use std::net::IpAddr;
use std::time::Duration;

pub use crate::auto::MethodsNow;
use crate::figures::{ByteFigures, XbzrleFigures};
use crate::status::Status;

/// A host that delays a migration, because it does not answer or does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// Kind of the stall: no answer, or no reading.
    pub kind: StallKind,
    /// Address of the host that does not answer or does not read.
    pub peer: IpAddr,
    /// Time since the stall began.
    pub time: Duration,
}

/// Kind of a [`Stall`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StallKind {
    /// The host does not answer. The migration fails after `silence-timeout`.
    Silent,
    /// The host's kernel answers, but the process there reads nothing. The migration waits for it.
    NotReading,
}

impl std::fmt::Display for Stall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            StallKind::Silent => "silent",
            StallKind::NotReading => "not reading",
        };
        write!(f, "{} {kind} for {} s", self.peer, self.time.as_secs())
    }
}

/// Progress of a migration, as its source reports it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// Status of the migration.
    pub status: Status,
    /// Number of the present round (one pass over the dirty pages), from 1.
    pub round: u64,
    /// Size of guest RAM in bytes.
    pub total_bytes: u64,
    /// Bytes of dirty pages that this round must still process.
    pub remaining_bytes: u64,
    /// Bytes written to all sockets so far.
    pub transferred_bytes: u64,
    /// Bytes written per second, since the last report.
    pub bytes_per_second: f64,
    /// Pages processed per second, since the last report.
    pub pages_per_second: f64,
    /// Pages that the guest dirties per second, measured between the last two syncs of the dirty log.
    pub dirty_pages_per_second: f64,
    /// Time since the migration was requested.
    pub elapsed: Duration,
    /// Estimated time for the remaining pages of this round; `None` before a rate is known.
    pub time_left: Option<Duration>,
    /// Duration of the set-up; `None` before its end.
    pub setup: Option<Duration>,
    /// Estimated time to send the pages that were dirty at the last sync of the dirty log; `None` before a rate is known.
    pub expected_downtime: Option<Duration>,
    /// Pages sent with their content so far.
    pub normal_pages: u64,
    /// Pages sent as zero so far.
    pub zero_pages: u64,
    /// Count of syncs of the dirty log, including its start.
    pub dirty_syncs: u64,
    /// Bytes written, by kind of data. Their sum is `transferred_bytes`.
    pub bytes: ByteFigures,
    /// Throttling by auto-converge: percentage of the vCPUs' time; 0 without throttling.
    pub throttle_percent: u8,
    /// True if auto-converge should throttle the guest, but the guest does not support it.
    pub throttle_refused: bool,
    /// True if auto-converge is on.
    pub auto_converge: bool,
    /// True if the option `max-bandwidth` limits the rate, and not the channels.
    pub bandwidth_limited: bool,
    /// In postcopy: count of pages that the guest has requested.
    pub postcopy_requests: u64,
    /// Statistics of XBZRLE; `None` if XBZRLE is off.
    pub xbzrle: Option<XbzrleFigures>,
    /// Methods of the latest packets; `None` if all packets have the same method.
    pub methods: Option<MethodsNow>,
    /// True if the last rounds hardly reduced the count of dirty pages. At this rate the migration does not end.
    pub stalled: bool,
}

impl Progress {
    /// Returns the reason, for an operator, why the migration does not converge. Returns `None` if it converges.
    #[must_use]
    pub fn stall_reason(&self) -> Option<String> {
        if !self.stalled {
            return None;
        }
        let (who, first) = if self.bandwidth_limited {
            ("max-bandwidth lets", "max-bandwidth or downtime-limit")
        } else {
            ("the channels settle", "downtime-limit or multifd-channels")
        };
        let throttle = match (self.auto_converge, self.throttle_refused) {
            (false, _) => ", turn auto-converge on",
            (true, true) => " (auto-converge cannot slow this guest down)",
            (true, false) => "",
        };
        Some(format!(
            "the guest dirties {:.0} pages/s and {who} {:.0} pages/s{through}: raise {first}{throttle}, or choose \
             another method",
            self.dirty_pages_per_second,
            self.pages_per_second,
            through = if self.bandwidth_limited {
                " through"
            } else {
                ""
            },
        ))
    }
}

/// Callback that receives progress reports. It is called from the migration thread, so it must not block for long.
pub type OnProgress<'a> = &'a (dyn Fn(&Progress) + Sync);
