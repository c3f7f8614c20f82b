//! What the sockets say of the wire: how long it takes for a byte, and whether it is what senders wait for.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use hotlift_mem::sock::TcpSending;
use hotlift_net::transport::Stream;

use crate::figures::{ratio, to_f64};

/// Between two looks at the sockets.
const INTERVAL: Duration = Duration::from_millis(10);

/// Time in s after which the kernel's ticks are enough to tell a destination that has just begun to read from the wire.
const CERTAIN: f64 = 0.03;

/// What is left of a look's weight at the next one: the kernel counts in ticks of up to 10 ms, so that a single look is
/// coarse. Half of the weight is in the last 70 ms.
const KEPT: f64 = 0.9;

/// What the wire can do is the median of the last so many rates, each over so long: a link that gets slower is noticed within
/// half a second.
const RATE_OVER: Duration = Duration::from_millis(50);
const RATES: usize = 10;

/// Weight of what the destination said last: its words come every 50 ms, and count in the kernel's ticks.
const NEW_WORD: f64 = 0.3;

/// What was seen, older looks with less weight.
#[derive(Debug, Default)]
struct Seen {
    /// In s: time that went by, summed over the sockets; time in which they sent or waited; the part of it in which the
    /// wire was what they waited for.
    elapsed: f64,
    busy: f64,
    on_wire: f64,
    /// Time that went by in which no socket had anything to send or to be acknowledged.
    idle: f64,
    /// Bytes that were delivered.
    bytes: f64,
    /// Of the threads that send, in s: time that went by, and time in which their sockets had no room.
    threads: f64,
    blocked: f64,
}

/// Watches the sockets of all channels.
#[derive(Debug, Default)]
pub(crate) struct LinkMeter {
    last: Option<(Instant, Vec<TcpSending>)>,
    seen: Seen,
    /// Time that was seen in all, in s.
    watched: f64,
    tells: bool,
    /// Share of the time in which the destination's threads have had nothing to read, as it says.
    starved: Option<f64>,
    /// Bytes a second of the last whiles, the newest at the end, and bytes and time in s of the one that has begun.
    rates: VecDeque<f64>,
    rate: (f64, f64),
    /// See [`LinkMeter::idle`].
    idle: f64,
}

impl LinkMeter {
    /// A thread's time went by, of which its socket had no room for `blocked`.
    pub(crate) fn sent(&mut self, elapsed: Duration, blocked: Duration) {
        self.seen.threads += elapsed.as_secs_f64();
        self.seen.blocked += blocked.as_secs_f64();
    }

    /// The destination's threads have had nothing to read for that share of the time, 0 to 1.
    pub(crate) fn starved(&mut self, share: f64) {
        let before = self.starved.unwrap_or(share);
        self.starved = Some(before + (share - before) * NEW_WORD);
    }

    /// There was nothing to send until now.
    pub(crate) fn resumed(&mut self) {
        self.last = None;
    }

    /// Looks at the sockets, if the last look was long enough ago; whether it has looked.
    pub(crate) fn look<'s>(
        &mut self,
        sockets: impl Iterator<Item = &'s Stream>,
        now: Instant,
    ) -> bool {
        let since = self.last.as_ref().map(|(at, _)| now.duration_since(*at));
        if since.is_some_and(|since| since < INTERVAL) {
            return false;
        }
        let states: Option<Vec<_>> = sockets.map(Stream::tcp_sending).collect();
        self.tells = states.as_ref().is_some_and(|states| !states.is_empty());
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
            // The kernel counts by socket: as if each were idle when it happens to be.
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

    /// The shares, 0 to 1, of what a channel waits that are for the wire, and for the destination: all for the wire where the
    /// sockets do not tell, and neither before they could.
    ///
    /// The kernel counts a destination as the limit only while its buffer is full: without a limit of the link that was a third
    /// of what senders waited, and the rest was its threads' time, too. So where the destination tells, the wire is waited for no
    /// longer than both ends have nothing to do: the destination nothing to read, and the socket something to deliver.
    pub(crate) fn waits_for(&self) -> [f64; 2] {
        if !self.tells {
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

    /// The share of the time, 0 to 1, in which no channel had anything on the wire; 0 where the sockets do not tell.
    ///
    /// Sockets are idle in turns, which the kernel's sums do not show: as if each were idle when it happens to be, a full wire
    /// was idle for 7 % of the time. So it is idle at most for what it delivers less than it could of late.
    pub(crate) fn idle(&self) -> f64 {
        self.idle
    }

    fn idle_of(&self, sockets: usize) -> f64 {
        let time = self.seen.elapsed / to_f64(sockets.max(1) as u64);
        let by_kernel = ratio(self.seen.idle, time).clamp(0.0, 1.0);
        // The median, since the highest are bursts that a shaper let pass: 15 % more than its rate, for 100 ms.
        let mut rates: Vec<f64> = self.rates.iter().copied().collect();
        rates.sort_by(f64::total_cmp);
        let Some(usual) = rates.get(rates.len() / 2) else {
            return by_kernel;
        };
        let delivers = ratio(self.seen.bytes, self.seen.elapsed) * to_f64(sockets as u64);
        by_kernel.min(1.0 - ratio(delivers, *usual).min(1.0))
    }

    /// Time that the wire takes for a byte, in ns; 0 while it is not known.
    pub(crate) fn nanos_per_byte(&self) -> f64 {
        // All sockets share the wire: each has it for its part of the time.
        let sockets = self.last.as_ref().map_or(0, |(_, states)| states.len());
        ratio(self.seen.on_wire, self.seen.bytes) * 1e9 / to_f64(sockets.max(1) as u64)
    }

    /// Bytes of a channel that are on their way to the other side and back, where none wait.
    pub(crate) fn bytes_on_the_way(&self) -> f64 {
        let states = self.last.iter().flat_map(|(_, states)| states);
        let trip = states
            .map(|state| state.min_rtt.as_secs_f64())
            .fold(0.0, f64::max);
        let seconds_per_byte = ratio(self.seen.on_wire, self.seen.bytes);
        ratio(trip, seconds_per_byte)
    }

    /// Bytes a second that were delivered of late.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        let sockets = self.last.as_ref().map_or(0, |(_, states)| states.len());
        ratio(self.seen.bytes, self.seen.elapsed) * to_f64(sockets as u64)
    }
}
