//! Progress reports of a running migration, several a second.

use std::net::IpAddr;
use std::time::Duration;

pub use crate::auto::MethodsNow;
use crate::figures::{ByteFigures, XbzrleFigures};
use crate::status::Status;

/// A host that stalls a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// Kind of the stall.
    pub kind: StallKind,
    /// Address of the host.
    pub peer: IpAddr,
    /// Time since the stall began.
    pub time: Duration,
}

/// Kinds of a [`Stall`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StallKind {
    /// The host sends no answer: the migration fails after `silence-timeout`.
    Silent,
    /// The host's kernel answers, but its process reads nothing: the migration waits for it.
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

/// A moment of a migration, as its source sees it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// State of the migration.
    pub status: Status,
    /// Present pass over the dirty pages, from 1.
    pub round: u64,
    /// Bytes of guest RAM.
    pub total_bytes: u64,
    /// Bytes of pages that this round must still settle.
    pub remaining_bytes: u64,
    /// Bytes written to all sockets so far.
    pub transferred_bytes: u64,
    /// Bytes written a second, since the last report.
    pub bytes_per_second: f64,
    /// Pages settled a second, since the last report.
    pub pages_per_second: f64,
    /// Pages that the guest dirties a second, by the last two syncs of the dirty log.
    pub dirty_pages_per_second: f64,
    /// Time since the request to migrate.
    pub elapsed: Duration,
    /// Time that the rest of this round takes at the present rate; `None` before a rate is known.
    pub time_left: Option<Duration>,
    /// Time until the first page could be sent; `None` before.
    pub setup: Option<Duration>,
    /// Time that the pages dirty at the last sync would take at the present rate; `None` before a rate is known.
    pub expected_downtime: Option<Duration>,
    /// Pages sent with their content so far.
    pub normal_pages: u64,
    /// Pages sent as zero so far.
    pub zero_pages: u64,
    /// Reads of the dirty log so far, its start included.
    pub dirty_syncs: u64,
    /// Bytes, by where they went; `transferred_bytes` is their sum.
    pub bytes: ByteFigures,
    /// Share of their time that auto-converge takes from the vCPUs, in percent; 0 if it takes none.
    pub throttle_percent: u8,
    /// True if auto-converge should slow the guest down, and this guest does not support it.
    pub throttle_refused: bool,
    /// True if auto-converge is on.
    pub auto_converge: bool,
    /// True if max-bandwidth limits the rate, and not the channels.
    pub bandwidth_limited: bool,
    /// Pages that the guest has requested, in postcopy.
    pub postcopy_requests: u64,
    /// Statistics of XBZRLE, if it is on.
    pub xbzrle: Option<XbzrleFigures>,
    /// Methods of the latest packets, if each packet has its own method.
    pub methods: Option<MethodsNow>,
    /// True if several rounds have left about as many dirty pages as they began with: at this rate the migration does not end.
    pub stalled: bool,
}

impl Progress {
    /// Returns why the migration does not converge, for an operator; `None` while it does.
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

/// Receives reports; called from the migration thread, so it must not block for long.
pub type OnProgress<'a> = &'a (dyn Fn(&Progress) + Sync);
