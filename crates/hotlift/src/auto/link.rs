//! Measurements of the wire from the sockets: its time per byte, and whether senders wait for it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use hotlift_mem::sock::TcpSending;
use hotlift_net::transport::Stream;

use crate::figures::{ratio, to_f64};

/// Interval between two samples of the sockets.
const INTERVAL: Duration = Duration::from_millis(10);

/// Time in s after which the kernel's ticks suffice to distinguish the wire from a destination that has just begun to read.
const CERTAIN: f64 = 0.03;

/// Decay of a sample's weight at the next one: the kernel counts in ticks of up to 10 ms, so that a single sample is coarse.
/// Half of the weight is in the last 70 ms.
const KEPT: f64 = 0.9;

/// Duration and count of the rates whose median is the capacity of the wire: a slower link is noticed within half a second.
const RATE_OVER: Duration = Duration::from_millis(50);
const RATES: usize = 10;

/// Weight of the destination's latest report. A single report is coarse: it covers 50 ms, counted in the kernel's ticks.
const REPORT_WEIGHT: f64 = 0.3;

/// Decayed sums of the samples.
#[derive(Debug, Default)]
struct Seen {
    /// In s, summed over the sockets: elapsed time (`elapsed`), time in which they sent or waited (`busy`), and the part of
    /// `busy` that is not a wait for the receiver (`on_wire`).
    elapsed: f64,
    busy: f64,
    on_wire: f64,
    /// Time in which no socket had unsent or unacknowledged data.
    idle: f64,
    /// Bytes delivered.
    bytes: f64,
    /// In s, summed over the sending threads: elapsed time (`threads`), and time in which their sockets had no room
    /// (`blocked`).
    threads: f64,
    blocked: f64,
}

/// Meter over the sockets of all channels.
#[derive(Debug, Default)]
pub(crate) struct LinkMeter {
    last: Option<(Instant, Vec<TcpSending>)>,
    seen: Seen,
    /// Total time of the samples, in s.
    watched: f64,
    reports_load: bool,
    /// Share of the time in which the destination's threads had nothing to read, by its reports.
    starved: Option<f64>,
    /// Bytes per second of the last intervals, the newest at the end; then bytes and time in s of the current interval.
    rates: VecDeque<f64>,
    rate: (f64, f64),
    /// Result of [`LinkMeter::idle`].
    idle: f64,
}

impl LinkMeter {
    /// Records a thread's time, in which its socket had no room for `blocked`.
    pub(crate) fn sent(&mut self, elapsed: Duration, blocked: Duration) {
        self.seen.threads += elapsed.as_secs_f64();
        self.seen.blocked += blocked.as_secs_f64();
    }

    /// Records the share of the time, 0 to 1, in which the destination's threads had nothing to read.
    pub(crate) fn starved(&mut self, share: f64) {
        let before = self.starved.unwrap_or(share);
        self.starved = Some(before + (share - before) * REPORT_WEIGHT);
    }

    /// Records the end of a pause without pages.
    pub(crate) fn resumed(&mut self) {
        self.last = None;
    }

    /// Samples the sockets, if the interval has passed. Returns true if it has.
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
            // The kernel only counts per socket: assumes independent idle times.
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

    /// Returns the shares, 0 to 1, of the channels' waits that the wire and the destination cause. If the sockets have no
    /// statistics, the wire causes all; before there are enough samples, both shares are 0.
    ///
    /// The kernel counts the destination as the limit only while its buffer is full. On a link without a limit that was a third
    /// of the senders' waits, although the destination's threads caused all of them. So if the destination reports its load,
    /// the wire is the limit only while the destination has nothing to read and the socket has data to deliver.
    pub(crate) fn waits_for(&self) -> [f64; 2] {
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

    /// Returns the share of the time, 0 to 1, in which no channel had data on the wire; 0 if the sockets have no statistics.
    ///
    /// Sockets are idle in turns, which the kernel's sums do not show: with independent idle times assumed, a full wire
    /// appeared idle for 7 % of the time. So the idle share is limited to the gap between current and usual throughput.
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

    /// Returns the wire's time per byte, in ns; 0 while unknown.
    pub(crate) fn nanos_per_byte(&self) -> f64 {
        // `on_wire` is a sum over the sockets, which share the wire: each has it for a part of the time.
        let sockets = self.last.as_ref().map_or(0, |(_, states)| states.len());
        ratio(self.seen.on_wire, self.seen.bytes) * 1e9 / to_f64(sockets.max(1) as u64)
    }

    /// Returns the bytes of a channel in transit to the peer and back, if none wait.
    pub(crate) fn bytes_in_flight(&self) -> f64 {
        let states = self.last.iter().flat_map(|(_, states)| states);
        let trip = states
            .map(|state| state.min_rtt.as_secs_f64())
            .fold(0.0, f64::max);
        let seconds_per_byte = ratio(self.seen.on_wire, self.seen.bytes);
        ratio(trip, seconds_per_byte)
    }

    /// Returns the recently delivered bytes per second.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        let sockets = self.last.as_ref().map_or(0, |(_, states)| states.len());
        ratio(self.seen.bytes, self.seen.elapsed) * to_f64(sockets as u64)
    }
}
