//! Selects the encoding of each packet: a pure function of the observations.
//!
//! The controller learns one number, the **price**: the CPU time that one byte less on the wire is worth. It selects the
//! encoding with the lowest cost: CPU time plus bytes at that price. At a price of zero that is the uncompressed packet. The
//! higher the price, the stronger the compression. So each useful candidate has its own range of prices. A candidate that never
//! pays off for this content on these hosts is never selected.
//!
//! # Learning the price
//!
//! When a thread waits for the wire, fewer bytes would have saved time, and CPU time was available. When the wire is idle, CPU
//! time was short, and more bytes would have cost nothing. So waiting time raises the price, and idle time of the wire lowers
//! it. Throughput is highest where waiting time / idle time = price of a byte / CPU time available while the wire sends a byte.
//! Waiting time counts only if a higher price would have changed the packet's encoding, and idle time only if a lower price
//! would have. For example, a wait after incompressible content teaches nothing.
//!
//! The kernel's queues contain less than a packet per channel, so an average reacts too late. When content changes, the wire or
//! the CPUs are idle before the average has changed. So each packet's price is the learnt price, raised if the channel's queue
//! is full, and lowered if it is empty. As a result two candidates are mixed, and wire and CPUs are both fully used. One
//! candidate alone would leave one of them idle.
//!
//! If a packet's encoding takes longer than the channel's queue lasts, the wire is idle, unless another channel has data to
//! send. Idle time costs the bytes that the wire could have sent in that time.
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

/// Maximum count of windows by which one change of the price counts. Limits the effect of a long gap without packets, for
/// example between two rounds.
const MAX_WINDOWS: f64 = 5.0;

/// Maximum change of the price per window, in powers of e. The whole range of prices from lz4 to zstd's level 9 is 6 powers of
/// e.
const SPEED: f64 = 0.4;

/// Factor on older evidence at each window. The evidence covers about 10 windows, longer than most runs of equal content.
const EVIDENCE_DECAY: f64 = 0.9;

/// Fraction of the time that always counts as idle time of the wire. So the price falls without other evidence: a thread that
/// neither waits nor leaves the wire idle may use more CPU time than necessary.
const IDLE_EVIDENCE: f64 = 0.01;

/// Fraction of the time below which waits and idle time count as weak evidence, which changes the price less.
const WEAK_EVIDENCE: f64 = 0.05;

/// Change of one packet's price by the channel's queue, in powers of e: up if the queue is full, down if it is empty.
const QUEUE: f64 = 0.7;

/// Maximum deviation of the even variation that is added to each packet's price, in powers of e.
const SPREAD: f64 = 0.1;

/// Size of a channel's full queue, relative to a packet: 256 KiB to 512 KiB.
const QUEUE_PER_PACKET: f64 = 0.5;

/// Initial price, in ns per byte. It keeps packets uncompressed until the controller knows if threads wait for the wire. With
/// compression from the start, 512 MiB took 1.5 times as long over a link without a limit.
const FIRST_PRICE: f64 = 0.5;

/// Duration of the first waits for the wire. During these waits the price is at least the CPU time available while the wire
/// sends a byte, because the first measurements are coarse.
const LEARNING: Duration = Duration::from_millis(60);

/// Assumed count of channel threads before the first measurement.
const USUAL_THREADS: f64 = 2.0;

/// Minimum and maximum price, in ns of CPU time per byte. No CPU sends a byte in less than the minimum. The maximum is the time
/// of a byte at 1 Mbit/s.
const PRICES: [f64; 2] = [0.01, 8000.0];

/// Minimum and maximum value of a ns of the destination's CPU time, relative to the source's. The minimum is 1, because other
/// processes may need the destination's CPU. With 0.2, zstd's fast levels were selected although lz4 decodes in a third of
/// their time.
const FAR_PRICES: [f64; 2] = [1.0, 150.0];

/// Maximum change per window, in powers of e, of the relative value that [`FAR_PRICES`] limits.
const FAR_SPEED: f64 = 0.2;

/// Maximum fraction of the time that threads may wait without a bottleneck: for the destination or for the wire.
const WAITING: f64 = 0.02;

/// Interval, in packets, between two tries of a candidate that was not measured. Such a candidate is an accelerator, or has an
/// estimated cost close to the best.
const EXPLORING: u64 = 16;

/// Maximum estimated cost, relative to the best one, of a candidate that is worth a try.
const CLOSE: f64 = 1.3;

/// Maximum encoding time of a candidate that may be tried, relative to the CPU time of all threads while the wire sends a
/// packet. Without this maximum, such tries took a tenth of the time of a migration of 512 MiB over an unlimited link.
const TOO_SLOW: f64 = 2.0;

/// Maximum compressed size, as a fraction of the original size, of content that is worth compressing. Above it, content is sent
/// uncompressed.
const USELESS: f64 = 0.98;

/// Count of consecutive uncompressed packets after which few packets are sampled: sampling then takes at most `SAMPLING_SHARE`
/// of the time. The interval between samples is `MIN_RETRY_INTERVAL` to `MAX_RETRY_INTERVAL` packets; shorter if packets take
/// longer.
const RAW_STREAK: u64 = 16;
const SAMPLING_SHARE: f64 = 0.01;
const MIN_RETRY_INTERVAL: f64 = 2.0;
const MAX_RETRY_INTERVAL: f64 = 16.0;

/// Estimated time of a sample, in ns: lz4 of 4 pages on a core that takes 1.6 ns per byte.
const SAMPLE_NANOS: f64 = 30_000.0;

/// Observations of a packet and its channel before the encoding is selected.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PacketProbe {
    /// Class of the packet's content; `None` before the content is sampled.
    pub class: Option<Class>,
    /// Fill level of the channel's queue: unsent bytes, as a fraction of the bytes at which a write blocks. It can exceed 1.
    pub queued: f64,
}

/// Decision of the controller for a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Sample the packet to determine its class, then call the controller again.
    SampleFirst,
    /// Send the packet with the candidate of this index.
    Send(usize),
}

/// Time that a thread spent on one packet, from the end of its previous packet to the end of this packet. Times are in ns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PacketTime {
    /// Observations by which the encoding was selected.
    pub probe: PacketProbe,
    /// Index of the selected candidate.
    pub candidate: usize,
    /// Elapsed time; excludes time in which there were no pages to send.
    pub elapsed: f64,
    /// Part of `elapsed` in which the thread waited for the wire.
    pub waited: f64,
    /// Part of `elapsed` in which the thread waited for the destination.
    pub held: f64,
    /// Part of `elapsed` in which no channel had data on the wire.
    pub idle: f64,
}

/// Resource that limits the throughput at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bottleneck {
    /// The link: threads wait for the wire.
    Link,
    /// The CPUs: the wire waits for threads.
    Cores,
}

/// Weights by which a packet's costs are added up.
#[derive(Debug, Clone, Copy)]
struct CostWeights {
    /// CPU time in ns that one byte less on the wire is worth.
    byte: f64,
    /// Cost of a ns of the destination's CPU time, relative to the source's.
    far: f64,
    /// Cost of a ns in which the wire is idle, in ns of the source's CPU time.
    idle: f64,
    /// Time for which the channel's queued data keeps the wire busy, in ns per byte of a packet.
    lasts: f64,
}

/// Recent activity of the threads, in ns. Older activity counts less.
#[derive(Debug, Clone, Copy, Default)]
struct ThreadActivity {
    /// Elapsed time, counted once for all threads.
    time: f64,
    /// Elapsed time, summed over all threads.
    elapsed: f64,
    waited: f64,
    held: f64,
    /// Time that threads waited for the wire with packets that a higher price would have compressed more.
    too_cheap: f64,
    /// Idle time of the wire during packets that a lower price would have compressed less.
    too_dear: f64,
    /// Elapsed time of all threads for packets that a lower price would have compressed less.
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

    /// Returns the estimated count of threads, at least 1. Returns [`USUAL_THREADS`] before the first window.
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
    /// Index of the uncompressed candidate; `None` if the reader accepts no uncompressed packets.
    raw: Option<usize>,
    /// Natural logarithm of the price: the CPU time in ns that one byte less on the wire is worth.
    price: f64,
    /// Natural logarithm of the value of the destination's CPU time, relative to the source's.
    far: f64,
    /// Time of the wire to transmit a byte, in ns; 0 while unknown.
    wire: f64,
    /// Fraction of the packets that found their channel's queue empty.
    empty: Average,
    evidence: ThreadActivity,
    /// Time of the last change of the price; `packets` counts the packets since then.
    moved: Duration,
    packets: u64,
    scarce: Bottleneck,
    /// Count of packets whose encoding was selected. Determines the variation of the price.
    turn: u64,
    explored: u64,
    /// Count of sampled packets, since the last compressed one, that were sent uncompressed.
    raw_streak: u64,
    /// Average time of a thread per packet, in ns.
    pace: Average,
    /// Total time of the windows in which threads waited for the wire; not counted beyond [`LEARNING`].
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
            raw_streak: 0,
            pace: Average::default(),
            waited: Duration::ZERO,
        }
    }

    /// Changes the optimization goal.
    pub(crate) fn set_goal(&mut self, goal: Goal) {
        self.goal = goal;
    }

    /// Returns the costs, to record a measurement.
    pub(crate) fn costs(&mut self) -> &mut Costs {
        &mut self.costs
    }

    /// Excludes the time until `now` from the measurements, after a pause in which there were no pages to send.
    pub(crate) fn resumed(&mut self, now: Duration) {
        if self.packets == 0 {
            self.moved = now;
        }
    }

    /// Sets the time that the wire needs to transmit a byte, in ns.
    pub(crate) fn wire(&mut self, ns: f64) {
        self.wire = ns;
    }

    /// Returns the current bottleneck: the link or the CPUs.
    pub(crate) fn scarce(&self) -> Bottleneck {
        self.scarce
    }

    /// Returns the count of packets sent with a candidate that was not the best one, only to measure that candidate's cost.
    pub(crate) fn explored(&self) -> u64 {
        self.explored
    }

    /// Returns the price: the CPU time in ns that one byte less on the wire is worth.
    pub(crate) fn price(&self) -> f64 {
        self.price.exp()
    }

    /// Selects the encoding of the next packet.
    pub(crate) fn choose(&mut self, probe: PacketProbe) -> Choice {
        // Multiples of the golden ratio are distributed most evenly.
        let even = (to_f64(self.turn) * 0.618_033_988_749_895).fract() * 2.0 - 1.0;
        // Cubed: a half full queue, the usual case, then has little effect. A mix of lz4's two neighbours, uncompressed and
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
        self.raw_streak = if Some(best) == self.raw {
            self.raw_streak + 1
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

    /// Returns true if the packet should be sent uncompressed without a sample, because no sample is likely to change that.
    fn sends_raw_unsampled(&self, raw: usize, worth: CostWeights) -> bool {
        self.is_streak_of_raw() && !self.turn.is_multiple_of(self.sampling_interval())
            || Class::all().all(|class| self.best(class, worth) == raw)
    }

    /// Returns the interval between two samples, in packets.
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
        self.raw_streak >= RAW_STREAK
    }

    fn worth(&self, price: f64, queued: f64) -> CostWeights {
        // The other goals need no distinction: the faster the pages are sent, the shorter the guest is stopped.
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

    /// Returns a candidate that is worth a try, because it was hardly measured for this class; `None` if there is none. The
    /// candidate is an accelerator, or has an estimated cost close to the best. Its encoding time must be short enough to keep
    /// the wire busy.
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

    /// Returns whether another price would have selected another encoding: first for the maximum price, then for the minimum
    /// price.
    fn would_change(&self, spent: &PacketTime) -> [bool; 2] {
        let Some(class) = spent.probe.class else {
            return [!self.is_streak_of_raw(), false];
        };
        let [least, most] = PRICES;
        [most, least]
            .map(|price| self.best(class, self.worth(price, spent.probe.queued)) != spent.candidate)
    }

    /// Records the time that a thread spent on a packet. At the end of a window, adjusts the price.
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
        // A change of the price affects only packets selected after it: each thread needs one before the next change.
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
