//! Measures the wire by the sockets' statistics: its time per byte, and how long senders wait for it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use hotlift_mem::sock::TcpSending;
use hotlift_net::transport::Stream;

use crate::figures::{ratio, to_f64};

/// Interval between two samples of the sockets.
const INTERVAL: Duration = Duration::from_millis(10);

/// Minimum time of the samples, in s, before the sockets' statistics are used. Over a shorter time, the kernel's ticks cannot
/// distinguish the wire from a destination that has just begun to read.
const CERTAIN: f64 = 0.03;

/// Factor on the weight of older samples at each new sample. A single sample is coarse, because the kernel counts in ticks of
/// up to 10 ms. Half of the weight is in the last 70 ms.
const KEPT: f64 = 0.9;

/// Duration of one rate measurement. The wire's capacity is the median of the last `RATES` rates, so a slower link is noticed
/// within half a second.
const RATE_OVER: Duration = Duration::from_millis(50);
const RATES: usize = 10;

/// Weight of the destination's latest load report in the average. A single report is coarse: it covers 50 ms, counted in the
/// kernel's ticks.
const REPORT_WEIGHT: f64 = 0.3;

/// Sums over the samples. Older samples have less weight. Times are in s.
#[derive(Debug, Default)]
struct Seen {
    /// Times summed over the sockets:
    ///
    /// - `elapsed`: elapsed time
    /// - `busy`: time in which a socket sent or waited
    /// - `on_wire`: part of `busy` without the wait for the receiver
    elapsed: f64,
    busy: f64,
    on_wire: f64,
    /// Time in which no socket had unsent or unacknowledged data.
    idle: f64,
    /// Bytes that the peer acknowledged.
    bytes: f64,
    /// Times summed over the sending threads: `threads` is elapsed time, `blocked` is the part in which a thread's socket had
    /// no room.
    threads: f64,
    blocked: f64,
}

/// Measurements over the sockets of all channels.
#[derive(Debug, Default)]
pub(crate) struct LinkMeter {
    last: Option<(Instant, Vec<TcpSending>)>,
    seen: Seen,
    /// Total time of the samples, in s.
    watched: f64,
    reports_load: bool,
    /// Average fraction of the time in which the destination's threads had nothing to read; `None` before its first load
    /// report.
    starved: Option<f64>,
    /// Bytes per second of the last intervals, the newest at the end. `rate` is the current interval: bytes, and time in s.
    rates: VecDeque<f64>,
    rate: (f64, f64),
    /// Cached result of [`LinkMeter::idle`].
    idle: f64,
}

impl LinkMeter {
    /// Records the `elapsed` time of a sending thread. The thread's socket had no room for the time `blocked`.
    pub(crate) fn sent(&mut self, elapsed: Duration, blocked: Duration) {
        self.seen.threads += elapsed.as_secs_f64();
        self.seen.blocked += blocked.as_secs_f64();
    }

    /// Records the fraction of the time, 0 to 1, in which the destination's threads had nothing to read. The destination
    /// reports it.
    pub(crate) fn starved(&mut self, share: f64) {
        let before = self.starved.unwrap_or(share);
        self.starved = Some(before + (share - before) * REPORT_WEIGHT);
    }

    /// Excludes the time since the last sample, after a pause in which there were no pages to send.
    pub(crate) fn resumed(&mut self) {
        self.last = None;
    }

    /// Samples the sockets if the interval since the last sample has passed. Returns true if it took a sample.
    pub(crate) fn poll<'s>(
        &mut self,
        sockets: impl Iterator<Item = &'s Stream>,
        now: Instant,
    ) -> bool {
        let since = self.last.as_ref().map(|(at, _)| now.duration_since(*at));
        if since.is_some_and(|since| since < INTERVAL) {
            return false;
        }
        let states: Option<Vec<_>> = sockets.map(Stream::tcp_sending).collect();
        self.reports_load = states.as_ref().is_some_and(|states| !states.is_empty());
        let Some(states) = states else {
            self.last = Some((now, Vec::new()));
            return true;
        };
        if let (Some(since), Some((_, before))) = (since, &self.last) {
            let sum = |of: fn(&TcpSending) -> f64| -> f64 {
                let pairs = states.iter().zip(before);
                pairs.map(|(now, before)| of(now) - of(before)).sum()
            };
            let busy = sum(|state| state.busy.as_secs_f64());
            let elsewhere = sum(|state| state.receiver_limited.as_secs_f64());
            let seen = &mut self.seen;
            for value in [
                &mut seen.elapsed,
                &mut seen.busy,
                &mut seen.on_wire,
                &mut seen.idle,
                &mut seen.bytes,
                &mut seen.threads,
                &mut seen.blocked,
            ] {
                *value *= KEPT;
            }
            self.watched += since.as_secs_f64();
            seen.elapsed += since.as_secs_f64() * to_f64(states.len() as u64);
            seen.busy += busy;
            // The kernel has statistics only per socket: the sockets' idle times are assumed to be independent.
            let each = states.iter().zip(before);
            let each = each.map(|(now, before)| now.busy.saturating_sub(before.busy).as_secs_f64());
            let idle = each.map(|busy| (1.0 - busy / since.as_secs_f64()).clamp(0.0, 1.0));
            seen.idle += since.as_secs_f64() * idle.product::<f64>();
            seen.on_wire += (busy - elsewhere).max(0.0);
            let bytes = sum(|state| to_f64(state.acknowledged));
            seen.bytes += bytes;
            self.delivered(bytes, since);
            self.idle = self.idle_of(states.len());
        }
        self.last = Some((now, states));
        true
    }

    /// Returns the fractions, 0 to 1, of the channels' waiting time: first the part that the wire causes, then the part that
    /// the destination causes. If the sockets have no statistics, the wire causes all of the time. Both fractions are 0 before
    /// there are enough samples.
    ///
    /// The kernel attributes waiting time to the destination only while the destination's receive buffer is full. On a link
    /// without a limit that was a third of the senders' waiting time, although the destination's threads caused all of it. So a
    /// destination may report its load. Then the wire counts as the cause only while the destination has nothing to read and
    /// the socket has data to deliver.
    pub(crate) fn wait_causes(&self) -> [f64; 2] {
        if !self.reports_load {
            return [1.0, 0.0];
        }
        if self.watched < CERTAIN {
            return [0.0, 0.0];
        }
        let seen = &self.seen;
        let by_kernel = ratio(seen.on_wire, seen.busy).min(1.0);
        let by_both = self.starved.map_or(1.0, |starved| {
            let empty = 1.0 - ratio(seen.busy, seen.elapsed).min(1.0);
            let blocked = ratio(seen.blocked, seen.threads);
            ratio((starved - empty).max(0.0), blocked).min(1.0)
        });
        [by_kernel.min(by_both), 1.0 - by_kernel]
    }

    fn delivered(&mut self, bytes: f64, since: Duration) {
        self.rate.0 += bytes;
        self.rate.1 += since.as_secs_f64();
        if self.rate.1 >= RATE_OVER.as_secs_f64() {
            self.rates.push_back(self.rate.0 / self.rate.1);
            self.rate = (0.0, 0.0);
            if self.rates.len() > RATES {
                self.rates.pop_front();
            }
        }
    }

    /// Returns the fraction of the time, 0 to 1, in which no channel had data on the wire; 0 if the sockets have no statistics.
    ///
    /// The kernel's sums do not show that sockets are idle at different times. With independent idle times assumed, a full wire
    /// appeared idle for 7 % of the time. So the fraction is limited to the gap between current and usual throughput.
    pub(crate) fn idle(&self) -> f64 {
        self.idle
    }

    fn idle_of(&self, sockets: usize) -> f64 {
        let time = self.seen.elapsed / to_f64(sockets.max(1) as u64);
        let by_kernel = ratio(self.seen.idle, time).clamp(0.0, 1.0);
        // The median, since the highest rates are bursts that a shaper has passed: 15 % more than its rate, for 100 ms.
        let mut rates: Vec<f64> = self.rates.iter().copied().collect();
        rates.sort_by(f64::total_cmp);
        let Some(usual) = rates.get(rates.len() / 2) else {
            return by_kernel;
        };
        let delivers = ratio(self.seen.bytes, self.seen.elapsed) * to_f64(sockets as u64);
        by_kernel.min(1.0 - ratio(delivers, *usual).min(1.0))
    }

    /// Returns the time of the wire to transmit a byte, in ns; 0 while unknown.
    pub(crate) fn nanos_per_byte(&self) -> f64 {
        // `on_wire` is a sum over the sockets. They share the wire: each socket uses it for a part of the time.
        let sockets = self.last.as_ref().map_or(0, |(_, states)| states.len());
        ratio(self.seen.on_wire, self.seen.bytes) * 1e9 / to_f64(sockets.max(1) as u64)
    }

    /// Returns the estimated bytes of a channel in transit: the round-trip time multiplied by the rate of the channel while it
    /// sends.
    pub(crate) fn bytes_in_flight(&self) -> f64 {
        let states = self.last.iter().flat_map(|(_, states)| states);
        let trip = states
            .map(|state| state.min_rtt.as_secs_f64())
            .fold(0.0, f64::max);
        let seconds_per_byte = ratio(self.seen.on_wire, self.seen.bytes);
        ratio(trip, seconds_per_byte)
    }

    /// Returns the bytes per second that the wire delivered recently.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        let sockets = self.last.as_ref().map_or(0, |(_, states)| states.len());
        ratio(self.seen.bytes, self.seen.elapsed) * to_f64(sockets as u64)
    }
}
