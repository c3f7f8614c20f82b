//! Reports the progress of a migration to the caller.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;

use crate::auto::Timeline;
use crate::ends::guest_source::source::GuestSource;
use crate::ends::guest_source::xbzrle::Xbzrle;
use crate::figures::{Counts, MethodMoment, XbzrleFigures, to_f64};
use crate::precopy::auto_converge::AutoConverge;
use crate::precopy::estimate::Estimator;
use crate::progress::{OnProgress, Progress};

/// Interval between two reports.
pub(crate) const INTERVAL: Duration = Duration::from_millis(100);

/// From this fraction of `max-bandwidth` on, `max-bandwidth` counts as the limit of the rate.
const AT_THE_LIMIT: f64 = 0.8;

/// Creates reports from the source's counters.
pub(crate) struct Reporter<'a> {
    source: &'a GuestSource<'a>,
    on_progress: OnProgress<'a>,
    started: Instant,
    last: (Instant, Counts),
    /// Time until the first page could be sent.
    setup: Option<Duration>,
    throttle_percent: u8,
    throttle_refused: bool,
    xbzrle: Option<XbzrleFigures>,
    /// Method statistics over time; only with method `auto`, which selects a method for each packet.
    timeline: Option<Timeline>,
}

impl<'a> Reporter<'a> {
    pub(crate) fn new(
        source: &'a GuestSource<'a>,
        on_progress: OnProgress<'a>,
        started: Instant,
    ) -> Self {
        Self {
            source,
            on_progress,
            started,
            last: (started, Counts::default()),
            setup: None,
            throttle_percent: 0,
            throttle_refused: false,
            xbzrle: None,
            timeline: source.out.multifd.auto().map(|_| Timeline::new()),
        }
    }

    /// Returns the method statistics over time; empty without method `auto`.
    pub(crate) fn timeline(&self) -> Vec<MethodMoment> {
        let timeline = self.timeline.as_ref();
        timeline.map(Timeline::moments).unwrap_or_default()
    }

    /// Records the setup time; pages may be sent from now on.
    pub(crate) fn set_up(&mut self, setup: Duration) {
        self.setup = Some(setup);
    }

    /// Records the current throttling of the guest.
    pub(crate) fn throttled(&mut self, throttle: &AutoConverge<'_>) {
        self.throttle_percent = throttle.percent();
        self.throttle_refused = throttle.is_refused();
    }

    /// Records the XBZRLE statistics.
    pub(crate) fn encoded(&mut self, xbzrle: Option<&Xbzrle>) {
        self.xbzrle = xbzrle.map(Xbzrle::figures);
    }

    /// Returns true if the interval since the last report is over.
    pub(crate) fn is_due(&self) -> bool {
        self.last.0.elapsed() >= INTERVAL
    }

    /// Sends a report.
    pub(crate) fn report(&mut self, round: u64, estimator: &Estimator) {
        self.source.show_zero_jobs();
        let bytes = self.source.bytes();
        let counts = Counts {
            // The channels continue to count. The total must equal the sum of the parts.
            transferred_bytes: bytes.sum(),
            ..self.source.out.counts()
        };
        let now = Instant::now();
        let (last, before) = self.last;
        let seconds = (now - last).as_secs_f64();
        let per_second = |count: u64| {
            if seconds > 0.0 {
                to_f64(count) / seconds
            } else {
                0.0
            }
        };
        let new = counts.since(before);
        let pages_per_second = per_second(new.normal_pages + new.zero_pages);
        let remaining_pages = self.source.ram.pending();
        let bytes_per_second = per_second(new.transferred_bytes);
        let live = self.source.control.steering().latest(self.source.options);
        let time_left = (pages_per_second > 0.0)
            .then(|| Duration::try_from_secs_f64(to_f64(remaining_pages) / pages_per_second).ok())
            .flatten();
        let elapsed = self.started.elapsed();
        let auto = self.source.out.multifd.auto().zip(self.timeline.as_mut());
        let methods = auto.map(|(auto, timeline)| timeline.poll(auto, elapsed));
        (self.on_progress)(&Progress {
            status: self.source.control.status(),
            round,
            total_bytes: self.source.ram.total_bytes(),
            remaining_bytes: remaining_pages * PAGE_SIZE as u64,
            transferred_bytes: counts.transferred_bytes,
            bytes_per_second,
            pages_per_second,
            dirty_pages_per_second: estimator.dirty_pages_per_second(),
            elapsed,
            time_left,
            setup: self.setup,
            expected_downtime: estimator.expected_downtime(),
            normal_pages: counts.normal_pages,
            zero_pages: counts.zero_pages,
            dirty_syncs: self.source.ram.syncs(),
            bytes,
            throttle_percent: self.throttle_percent,
            throttle_refused: self.throttle_refused,
            auto_converge: live.auto_converge.on,
            bandwidth_limited: live.stream.max_bandwidth > 0
                && bytes_per_second >= to_f64(live.stream.max_bandwidth) * AT_THE_LIMIT,
            postcopy_requests: self.source.postcopy_requests.load(Ordering::Relaxed),
            xbzrle: self.xbzrle,
            methods,
            stalled: estimator.is_stalled(),
        });
        self.last = (now, counts);
    }
}
