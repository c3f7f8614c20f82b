//! Selects the encoding of each packet: a pure function of the observations.
//!
//! One number is learnt, the **price**: the CPU time that a byte less on the wire is worth. A packet is sent with the lowest
//! cost: its CPU time plus its bytes at that price. At a price of zero that is the uncompressed packet; the higher the price,
//! the stronger the compression. So each useful candidate has its own range of prices, and a candidate that never pays off for
//! this content on these hosts is never selected.
//!
//! # Learning the price
//!
//! When a thread waits for the wire, fewer bytes would have saved time, and CPU time was available. When the wire is idle, CPU
//! time was short, and more bytes would have cost nothing. So waiting time raises the price, and idle time of the wire lowers
//! it. Throughput is highest where waiting time / idle time = price of a byte / CPU time available while the wire sends a byte.
//! Both count only if a higher or lower price would have changed the packet's encoding: a wait behind incompressible content
//! teaches nothing.
//!
//! The kernel's queues hold less than a packet per channel, so an average is not enough: when content changes, one of the two
//! sides stops before any average reacts. Each packet's price is therefore the learnt one, raised if the channel's queue is
//! full, and lowered if it is empty. This also mixes two candidates, so that wire and CPUs are both fully used where one
//! candidate alone would leave one of them idle.
//!
//! If encoding a packet takes longer than the channel's queue lasts, the wire is idle, unless another channel has data for it.
//! Idle time costs the bytes that the wire could have sent in that time.
//!
//! CPU time of the destination also has a price, learnt from the time that threads wait for the destination.

use std::time::Duration;

use crate::auto::candidates::Candidate;
use crate::auto::costs::{Average, Class, Costs};
use crate::figures::to_f64;
use crate::options::Goal;

// Constants without another origin were chosen in the simulation in `tests`.

/// Interval between two changes of the price.
const WINDOW: Duration = Duration::from_millis(20);

/// Limit of the windows by which a gap without packets, as between two rounds, changes the price.
const MAX_WINDOWS: f64 = 5.0;

/// Change of the price per window, in powers of e, if all evidence agrees. The whole range from lz4 to zstd's level 9 is 6
/// powers.
const SPEED: f64 = 0.4;

/// Remaining share of the evidence after a window: it covers about 10 windows, longer than most runs of equal content.
const EVIDENCE_DECAY: f64 = 0.9;

/// Share of the time that counts as evidence of an idle wire. Without other evidence the price falls: time that is neither
/// waited nor idle is CPU time that can be saved.
const IDLE_EVIDENCE: f64 = 0.01;

/// Evidence below this share of the time changes the price less.
const WEAK_EVIDENCE: f64 = 0.05;

/// Increase of the price for a packet behind a full queue, and decrease behind an empty one, in powers of e.
const QUEUE: f64 = 0.7;

/// Half the width of the additional variation of packets' prices, in powers of e.
const SPREAD: f64 = 0.1;

/// Ratio of a full queue's bytes to a packet's: 256 KiB to 512 KiB.
const QUEUE_PER_PACKET: f64 = 0.5;

/// Initial price: packets are uncompressed until it is known whether threads wait for the wire. With compression from the
/// start, 512 MiB took 1.5 times as long over a link without a limit.
const FIRST_PRICE: f64 = 0.5;

/// Time for which the price, once threads wait for the wire, is at least the CPU time available while the wire sends a byte:
/// the first measurements are coarse.
const LEARNING: Duration = Duration::from_millis(60);

/// Default count of channels.
const USUAL_THREADS: f64 = 2.0;

/// Range of prices, in ns of CPU time per byte. No CPU sends a byte in less than the lower bound; the upper bound is the time
/// of a byte at 1 Mbit/s.
const PRICES: [f64; 2] = [0.01, 8000.0];

/// Range of the ratio of the destination's CPU price to the source's. It is at least 1, because other processes may need the
/// destination's CPU. With a minimum of 0.2, zstd's fast levels were selected although lz4 decodes in a third of their time.
const FAR_PRICES: [f64; 2] = [1.0, 150.0];

/// Change of the ratio in [`FAR_PRICES`] per window, in powers of e.
const FAR_SPEED: f64 = 0.2;

/// Share of the time that threads may wait for the destination or the wire before it counts as a bottleneck.
const WAITING: f64 = 0.02;

/// One of this many packets tries a candidate that was only estimated: an accelerator, or one whose estimate is close to the
/// best.
const EXPLORING: u64 = 16;

/// Highest cost, relative to the best one, at which an estimate counts as close to the best.
const CLOSE: f64 = 1.3;

/// Longest encoding time of a candidate that may be tried, relative to the CPU time of all threads while the wire sends a
/// packet. On a link without a limit, the tries took a tenth of the time of 512 MiB.
const TOO_SLOW: f64 = 2.0;

/// Highest useful share: content that leaves more is sent uncompressed.
const USELESS: f64 = 0.98;

/// After this many uncompressed packets in a row, sampling is limited to the share `SAMPLING_SHARE` of the time: one packet in
/// `MIN_RETRY_INTERVAL` if packets take long, down to one in `MAX_RETRY_INTERVAL`.
const RAW_STREAK: u64 = 16;
const SAMPLING_SHARE: f64 = 0.01;
const MIN_RETRY_INTERVAL: f64 = 2.0;
const MAX_RETRY_INTERVAL: f64 = 16.0;

/// Time of a sample, in ns: lz4 of 4 pages on a core that takes 1.6 ns per byte.
const SAMPLE_NANOS: f64 = 30_000.0;

/// Properties of a packet before its selection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PacketProbe {
    /// Class of its content; `None` before it is sampled.
    pub class: Option<Class>,
    /// Fill level of the channel's queue: unsent bytes relative to those at which a write blocks, 0 to 1 and beyond.
    pub queued: f64,
}

/// Decision for a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Determine its class, and ask again.
    SampleFirst,
    /// Send it with that candidate.
    Send(usize),
}

/// A thread's time for a packet, from the end of the previous one to the end of this one. Times are in ns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PacketTime {
    /// Properties that determined the selection.
    pub probe: PacketProbe,
    /// Selected candidate.
    pub candidate: usize,
    /// Elapsed time, except while there were no pages to send.
    pub elapsed: f64,
    /// Part in which it waited for the wire.
    pub waited: f64,
    /// Part in which it waited for the destination.
    pub held: f64,
    /// Part in which no channel had data on the wire.
    pub idle: f64,
}

/// Current bottleneck.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bottleneck {
    /// Threads wait for the wire.
    Link,
    /// The wire waits for threads.
    Cores,
}

/// Weights of a packet's costs.
#[derive(Debug, Clone, Copy)]
struct CostWeights {
    /// CPU time in ns that a byte on the wire is worth.
    byte: f64,
    /// Weight of a ns of the destination's CPU time.
    far: f64,
    /// Weight of a ns in which the wire is idle.
    idle: f64,
    /// Time for which the queue keeps the wire busy, in ns per byte of a packet.
    lasts: f64,
}

/// Recent activity of the threads; times are in ns.
#[derive(Debug, Clone, Copy, Default)]
struct ThreadActivity {
    /// Wall-clock time.
    time: f64,
    /// Sum of all threads.
    elapsed: f64,
    waited: f64,
    held: f64,
    /// Waiting time of packets that a higher price would have changed.
    too_cheap: f64,
    /// Idle time of the wire for packets that a lower price would have changed.
    too_dear: f64,
    /// Time of all threads for packets that a lower price would have changed.
    may_fall: f64,
}

impl ThreadActivity {
    fn fade(&mut self) {
        for time in [
            &mut self.time,
            &mut self.elapsed,
            &mut self.waited,
            &mut self.held,
            &mut self.too_cheap,
            &mut self.too_dear,
            &mut self.may_fall,
        ] {
            *time *= EVIDENCE_DECAY;
        }
    }

    /// Returns the count of threads, at least 1; before the first window, the default.
    fn threads(&self) -> f64 {
        match self.time > 0.0 {
            true => (self.elapsed / self.time).max(1.0),
            false => USUAL_THREADS,
        }
    }
}

/// Controller of one migration, shared by its channels.
#[derive(Debug)]
pub(crate) struct Controller {
    goal: Goal,
    costs: Costs,
    /// Candidate that sends pages uncompressed, if there is one.
    raw: Option<usize>,
    /// Natural logarithm of the price, in ns of CPU time a byte.
    price: f64,
    /// Natural logarithm of the price of the destination's CPU time, relative to the source's.
    far: f64,
    /// Time of the wire per byte, in ns; 0 while unknown.
    wire: f64,
    /// Share of the packets that found the queue empty.
    empty: Average,
    evidence: ThreadActivity,
    /// Time of the last change of the price, and packets since then.
    moved: Duration,
    packets: u64,
    scarce: Bottleneck,
    /// Count of packets selected for.
    turn: u64,
    explored: u64,
    /// Count of consecutive sampled packets that were sent uncompressed.
    same: u64,
    /// Time of a thread from packet to packet, in ns.
    pace: Average,
    /// Time in which threads waited for the wire, up to [`LEARNING`].
    waited: Duration,
}

impl Controller {
    /// Creates the controller for a migration that begins at `now`; all calls use the same clock.
    pub(crate) fn new(candidates: &[Candidate], goal: Goal, now: Duration) -> Self {
        Self {
            goal,
            costs: Costs::new(candidates),
            raw: candidates
                .iter()
                .position(|candidate| candidate.method.flag() == 0),
            price: FIRST_PRICE.ln(),
            far: FAR_PRICES[0].ln(),
            wire: 0.0,
            empty: Average::default(),
            evidence: ThreadActivity::default(),
            moved: now,
            packets: 0,
            scarce: Bottleneck::Cores,
            turn: 0,
            explored: 0,
            same: 0,
            pace: Average::default(),
            waited: Duration::ZERO,
        }
    }

    /// Changes the optimization goal.
    pub(crate) fn set_goal(&mut self, goal: Goal) {
        self.goal = goal;
    }

    /// Returns the measured costs.
    pub(crate) fn costs(&mut self) -> &mut Costs {
        &mut self.costs
    }

    /// Excludes the time until now: there was nothing to send.
    pub(crate) fn resumed(&mut self, now: Duration) {
        if self.packets == 0 {
            self.moved = now;
        }
    }

    /// Sets the wire's time per byte while it has data.
    pub(crate) fn wire(&mut self, ns: f64) {
        self.wire = ns;
    }

    /// Returns the current bottleneck.
    pub(crate) fn scarce(&self) -> Bottleneck {
        self.scarce
    }

    /// Returns the count of packets sent with a candidate other than the best one, to measure its cost.
    pub(crate) fn explored(&self) -> u64 {
        self.explored
    }

    /// Returns the price, in ns of CPU time per byte.
    pub(crate) fn price(&self) -> f64 {
        self.price.exp()
    }

    /// Selects the encoding of the next packet.
    pub(crate) fn choose(&mut self, probe: PacketProbe) -> Choice {
        // Multiples of the golden ratio are distributed most evenly.
        let even = (to_f64(self.turn) * 0.618_033_988_749_895).fract() * 2.0 - 1.0;
        // Cubed, so that a half full queue, the usual case, has little effect: a mix of lz4's two neighbours, uncompressed and
        // zstd 1, is worse than lz4 alone.
        let full = (probe.queued.clamp(0.0, 1.0) * 2.0 - 1.0).powi(3);
        let price = (self.price + even * SPREAD + full * QUEUE).exp();
        let worth = self.worth(price, probe.queued);
        let Some(class) = probe.class else {
            return match self.raw.filter(|raw| self.sends_raw_unsampled(*raw, worth)) {
                Some(raw) => {
                    self.turn += 1;
                    self.found(probe);
                    Choice::Send(raw)
                }
                None => Choice::SampleFirst,
            };
        };
        self.turn += 1;
        self.found(probe);
        let best = self.best(class, worth);
        self.same = if Some(best) == self.raw {
            self.same + 1
        } else {
            0
        };
        if self.turn.is_multiple_of(EXPLORING)
            && let Some(untried) = self.untried(class, worth, best)
        {
            self.explored += 1;
            return Choice::Send(untried);
        }
        Choice::Send(best)
    }

    fn found(&mut self, probe: PacketProbe) {
        self.empty.add(if probe.queued <= 0.0 { 1.0 } else { 0.0 });
    }

    /// Returns true if a packet is sent uncompressed in any case, or very likely.
    fn sends_raw_unsampled(&self, raw: usize, worth: CostWeights) -> bool {
        self.is_streak_of_raw() && !self.turn.is_multiple_of(self.sampling_interval())
            || Class::all().all(|class| self.best(class, worth) == raw)
    }

    /// Returns the interval between sampled packets, in packets.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped"
    )]
    fn sampling_interval(&self) -> u64 {
        let pace = self.pace.or(0.0);
        (SAMPLE_NANOS / (SAMPLING_SHARE * pace).max(1.0))
            .clamp(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL) as u64
    }

    fn is_streak_of_raw(&self) -> bool {
        self.same >= RAW_STREAK
    }

    fn worth(&self, price: f64, queued: f64) -> CostWeights {
        // The other goals need no difference: the faster the pages are sent, the shorter the guest is stopped.
        if self.goal == Goal::LeastCpu {
            return CostWeights {
                byte: 0.0,
                far: 1.0,
                idle: 0.0,
                lasts: 0.0,
            };
        }
        // The wire is idle only if all other channels' queues are empty as well.
        let others = (self.evidence.threads() - 1.0).max(0.0);
        let alone = self.empty.or(0.0).powf(others);
        CostWeights {
            byte: price,
            far: self.far.exp(),
            idle: if self.wire > 0.0 {
                alone * price / self.wire
            } else {
                0.0
            },
            lasts: queued.max(0.0) * QUEUE_PER_PACKET * self.wire,
        }
    }

    fn total(&self, candidate: usize, class: Class, worth: CostWeights) -> f64 {
        let cost = self.costs.of(candidate, class);
        if cost.left > USELESS && self.raw.is_some_and(|raw| raw != candidate) {
            return f64::INFINITY;
        }
        cost.encode
            + (cost.encode - worth.lasts).max(0.0) * worth.idle
            + cost.left * (self.costs.send() + worth.byte)
            + self.costs.decode(candidate) * worth.far
    }

    /// Returns the candidate with the lowest cost.
    fn best(&self, class: Class, worth: CostWeights) -> usize {
        (0..self.costs.len())
            .min_by(|a, b| {
                self.total(*a, class, worth)
                    .total_cmp(&self.total(*b, class, worth))
            })
            .unwrap_or(0)
    }

    /// Returns a candidate with few tries that is an accelerator or may be nearly as good, and is fast enough not to leave the
    /// wire idle.
    fn untried(&self, class: Class, worth: CostWeights, best: usize) -> Option<usize> {
        let most = self.total(best, class, worth) * CLOSE;
        let longest = self.wire * self.evidence.threads() * TOO_SLOW;
        let is_raw = Some(best) == self.raw;
        (0..self.costs.len())
            .filter(|candidate| *candidate != best && self.costs.is_guess(*candidate, class))
            .filter(|candidate| self.costs.of(*candidate, class).encode <= longest)
            .map(|candidate| (candidate, self.total(candidate, class, worth)))
            .filter(|(candidate, total)| {
                *total <= most || !is_raw && self.costs.is_unknown_device(*candidate)
            })
            .min_by(|a, b| {
                let last = |candidate| !self.costs.is_unknown_device(candidate);
                last(a.0).cmp(&last(b.0)).then(a.1.total_cmp(&b.1))
            })
            .map(|(candidate, _)| candidate)
    }

    /// Returns true for each direction, higher and lower, in which another price would have changed the packet.
    fn would_change(&self, spent: &PacketTime) -> [bool; 2] {
        let Some(class) = spent.probe.class else {
            return [!self.is_streak_of_raw(), false];
        };
        let [least, most] = PRICES;
        [most, least]
            .map(|price| self.best(class, self.worth(price, spent.probe.queued)) != spent.candidate)
    }

    /// Records the time of a thread for a packet; changes the prices when a window is over.
    pub(crate) fn spent(&mut self, spent: PacketTime, now: Duration) {
        let [may_rise, may_fall] = self.would_change(&spent);
        let evidence = &mut self.evidence;
        evidence.elapsed += spent.elapsed;
        evidence.waited += spent.waited;
        evidence.held += spent.held;
        self.pace.add(spent.elapsed);
        if may_rise {
            evidence.too_cheap += spent.waited;
        }
        if may_fall {
            evidence.may_fall += spent.elapsed;
            // A wire that is idle because of the destination implies nothing about the source's CPUs.
            evidence.too_dear +=
                spent.idle * (1.0 - spent.held / spent.elapsed.max(spent.held + 1.0));
        }
        self.packets += 1;
        let since = now.saturating_sub(self.moved);
        if since >= WINDOW {
            evidence.time += since.as_secs_f64() * 1e9;
            self.move_prices(since);
            self.evidence.fade();
            self.moved = now;
            self.packets = 0;
        }
    }

    fn move_prices(&mut self, since: Duration) {
        let evidence = self.evidence;
        let threads = evidence.threads();
        // A change only shows in packets selected after it: each thread needs one before the next change.
        let windows = (since.as_secs_f64() / WINDOW.as_secs_f64())
            .min(MAX_WINDOWS)
            .min(to_f64(self.packets) / threads);

        // CPU time of all threads while the wire sends a byte.
        let fair = if self.wire > 0.0 {
            self.wire * threads
        } else {
            self.price()
        };
        if self.waited < LEARNING && evidence.waited > WAITING * evidence.elapsed {
            // Without this jump, the price would take 100 ms from uncompressed packets to the best encoding.
            self.waited += since;
            self.price = self.price.max(fair.ln());
        }
        let up = evidence.too_cheap;
        let down = evidence.too_dear * self.price() / fair;
        let direction = (up - down - IDLE_EVIDENCE * evidence.may_fall)
            / (up + down + WEAK_EVIDENCE * evidence.elapsed).max(1.0);
        let [least, most] = PRICES;
        self.price = (self.price + SPEED * windows * direction).clamp(least.ln(), most.ln());

        let held = evidence.held / evidence.elapsed.max(1.0);
        let direction = (held - WAITING) / (held + WEAK_EVIDENCE);
        let [least, most] = FAR_PRICES;
        self.far = (self.far + FAR_SPEED * windows * direction).clamp(least.ln(), most.ln());

        self.scarce = if evidence.waited > WAITING * evidence.elapsed {
            Bottleneck::Link
        } else {
            Bottleneck::Cores
        };
    }
}
