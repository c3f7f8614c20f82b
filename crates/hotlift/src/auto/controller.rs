//! Chooses what each packet is sent as: a pure function of what was observed.
//!
//! One number is learnt, the **price**: how much CPU time a byte less on the wire is worth. A packet is sent as what
//! costs least, its CPU time and its bytes at that price added up. With a price of nothing that is the packet as it is; the
//! higher the price, the harder it is compressed. So each candidate that is ever worth its time has a range of prices
//! of its own, and what is never worth it, for this content on these hosts, is never chosen.
//!
//! # How the price is learnt
//!
//! Where a thread waits for the wire, a byte less would have saved time, and CPU time was there to spare. Where the wire is
//! idle, it is the other way round. So time that was waited raises the price, and time that the wire was idle lowers it. The
//! most is delivered where the two shares are to each other as the price of a byte is to the cores' time that one takes on the
//! wire. Both count only if the packet would have been sent as something else at a higher price, or at a lower one: who waits
//! behind content that does not shrink has learnt nothing.
//!
//! The queues in the kernel hold less than a packet a channel, so an average is not enough: when content changes, one of
//! the two sides stands still before any average has noticed. Each packet's price is therefore the learnt one, higher if
//! the channel's queue is full, and lower if it is empty. This is also what mixes two candidates, so that wire and cores are
//! both used up where one candidate alone would leave one of them idle.
//!
//! While a packet is encoded for longer than its queue lasts, the wire is idle, if no other channel has something for it. That
//! time costs what the wire could have sent in it.
//!
//! CPU time of the destination has a price, too, learnt from the time that threads wait for it.

use std::time::Duration;

use crate::auto::candidates::Candidate;
use crate::auto::costs::{Average, Class, Costs};
use crate::figures::to_f64;
use crate::options::Goal;

// Constants without another origin were chosen in the simulation beside this file.

/// Between two moves of the price.
const WINDOW: Duration = Duration::from_millis(20);

/// A gap without packets, as between two rounds, moves the price no further than so many windows.
const MOST_WINDOWS: f64 = 5.0;

/// How far the price moves in a window, in powers of e, if all evidence points one way. The whole range from
/// lz4 to zstd's level 9 is 6 powers.
const SPEED: f64 = 0.4;

/// What is left of the evidence after a window: it reaches back for 10 of them, longer than most runs of equal content.
const FADE: f64 = 0.9;

/// Without any evidence the price falls: time that is neither waited nor idle is CPU time that may be spared. A share of the
/// time, taken as evidence of an idle wire.
const THRIFT: f64 = 0.01;

/// Evidence of less than this share of the time moves the price less.
const FAINT: f64 = 0.05;

/// How much higher the price is for a packet behind a full queue, and lower behind an empty one, in powers of e.
const QUEUE: f64 = 0.7;

/// Half the width by which packets' prices differ besides, in powers of e.
const SPREAD: f64 = 0.1;

/// Bytes of a full queue over those of a packet: 256 KiB over 512 KiB.
const QUEUE_PER_PACKET: f64 = 0.5;

/// The first price: packets go as they are until it is known whether anybody waits for the wire. Compressed from the start,
/// 512 MiB took half as long again without a limit of the link.
const FIRST_PRICE: f64 = 0.5;

/// When threads begin to wait for the wire, the price is at once the cores' time that a byte takes on it. For so long: the first
/// figures are coarse.
const LEARNING: Duration = Duration::from_millis(60);

/// Channels by default.
const USUAL_THREADS: f64 = 2.0;

/// Prices that are thought about, in ns of CPU time a byte: below, no CPU sends a byte in less; above, links of 1 Mbit/s.
const PRICES: [f64; 2] = [0.01, 8000.0];

/// Prices of the destination's CPU time over the source's. It is worth as much at least: somebody else may need it. At a fifth,
/// zstd's fast levels went where lz4 takes a third of the time to decode.
const FAR_PRICES: [f64; 2] = [1.0, 150.0];

/// How far that price moves in a window, in powers of e.
const FAR_SPEED: f64 = 0.2;

/// Share of the time that threads may wait for the destination, or for the wire, and it does not count as scarce.
const WAITING: f64 = 0.02;

/// One packet in so many tries a candidate that was only guessed: an accelerator, or what by its guess comes close to the best.
const EXPLORING: u64 = 16;

/// How close: what the guess says it costs, over the best.
const CLOSE: f64 = 1.3;

/// What takes longer than so many times what the wire takes for a packet is not tried: without a limit of the link all
/// tries together took a tenth of the time of 512 MiB.
const TOO_SLOW: f64 = 2.0;

/// What leaves more than this is sent as it is.
const USELESS: f64 = 0.98;

/// After so many packets in a row that went as they are, looks take no more than `LOOKING` of the time: one packet in
/// `LEAST_SELDOM` is looked at, where the wire has time for it, or only one in `SELDOM`.
const SAME: u64 = 16;
const LOOKING: f64 = 0.01;
const LEAST_SELDOM: f64 = 2.0;
const SELDOM: f64 = 16.0;

/// Time of a look, in ns: lz4 of a sample of 4 pages on a core that takes 1.6 ns a byte.
const LOOK: f64 = 30_000.0;

/// What is known of a packet before it is chosen for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    /// Its content; `None`: nobody has looked yet.
    pub class: Option<Class>,
    /// How full the channel's queue is: bytes that were not sent yet over those at which a write blocks, 0 to 1 and beyond.
    pub queued: f64,
}

/// What to do with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Find out its class, and ask again.
    LookFirst,
    /// Send it as that candidate.
    Send(usize),
}

/// What one thread did for a packet, from the end of the one before to the end of this one. Times are in ns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spent {
    /// What it was chosen by.
    pub look: Look,
    /// What it was sent as.
    pub candidate: usize,
    /// Time that went by, without that in which there were no pages to send.
    pub elapsed: f64,
    /// Of which it waited for room on the wire.
    pub waited: f64,
    /// Of which it waited for the destination.
    pub held: f64,
    /// Of which no channel had anything on the wire.
    pub idle: f64,
}

/// Why the price is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scarce {
    /// Threads wait for the wire.
    Link,
    /// The wire waits for threads.
    Cores,
}

/// What a packet's costs are weighed by.
#[derive(Debug, Clone, Copy)]
struct Worth {
    /// A byte on the wire, in ns of CPU time.
    byte: f64,
    /// A ns of the destination's CPU time.
    far: f64,
    /// A ns in which the wire is idle.
    idle: f64,
    /// For so long the queue keeps the wire busy, in ns for each byte of a packet.
    lasts: f64,
}

/// What threads did of late; times are in ns.
#[derive(Debug, Clone, Copy, Default)]
struct Evidence {
    /// On the clock.
    time: f64,
    /// Of all threads.
    elapsed: f64,
    waited: f64,
    held: f64,
    /// Waited, for packets that a higher price would have changed.
    too_cheap: f64,
    /// The wire was idle, for packets that a lower price would have changed.
    too_dear: f64,
    /// Of all threads, for packets that a lower price would have changed.
    may_fall: f64,
}

impl Evidence {
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
            *time *= FADE;
        }
    }

    /// Threads that there are, 1 or more; before the first window, what is usual.
    fn threads(&self) -> f64 {
        match self.time > 0.0 {
            true => (self.elapsed / self.time).max(1.0),
            false => USUAL_THREADS,
        }
    }
}

/// The controller of one migration, shared by its channels.
#[derive(Debug)]
pub(crate) struct Controller {
    goal: Goal,
    costs: Costs,
    /// The candidate that sends pages as they are, if there is one.
    raw: Option<usize>,
    /// Natural logarithm of the price, in ns of CPU time a byte.
    price: f64,
    /// Natural logarithm of the price of the destination's CPU time, in the source's.
    far: f64,
    /// Time that the wire takes for a byte, in ns; 0 while it is not known.
    wire: f64,
    /// Share of the packets that found the queue empty.
    empty: Average,
    evidence: Evidence,
    /// When the price was moved, and packets since then.
    moved: Duration,
    packets: u64,
    scarce: Scarce,
    /// Packets chosen for.
    turn: u64,
    explored: u64,
    /// Packets in a row that were looked at and went as they are.
    same: u64,
    /// Time that a thread takes from packet to packet, in ns.
    pace: Average,
    /// Time in which threads were seen to wait for the wire, up to [`LEARNING`].
    waited: Duration,
}

impl Controller {
    /// For a migration that begins at `now`, a time on any clock that the other calls use, too.
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
            evidence: Evidence::default(),
            moved: now,
            packets: 0,
            scarce: Scarce::Cores,
            turn: 0,
            explored: 0,
            same: 0,
            pace: Average::default(),
            waited: Duration::ZERO,
        }
    }

    /// From now on it is to be good at this.
    pub(crate) fn set_goal(&mut self, goal: Goal) {
        self.goal = goal;
    }

    /// What has been measured.
    pub(crate) fn costs(&mut self) -> &mut Costs {
        &mut self.costs
    }

    /// The time until now was nobody's: there was nothing to send.
    pub(crate) fn resumed(&mut self, now: Duration) {
        if self.packets == 0 {
            self.moved = now;
        }
    }

    /// The wire takes `ns` for a byte while it has some.
    pub(crate) fn wire(&mut self, ns: f64) {
        self.wire = ns;
    }

    /// What is scarce at present.
    pub(crate) fn scarce(&self) -> Scarce {
        self.scarce
    }

    /// Packets that were sent as something else than what was thought best, to learn what it costs.
    pub(crate) fn explored(&self) -> u64 {
        self.explored
    }

    /// The price, in ns of CPU time a byte.
    pub(crate) fn price(&self) -> f64 {
        self.price.exp()
    }

    /// What to send the next packet as.
    pub(crate) fn choose(&mut self, look: Look) -> Choice {
        // The golden ratio's multiples are as even as turns can be.
        let even = (to_f64(self.turn) * 0.618_033_988_749_895).fract() * 2.0 - 1.0;
        // Of a queue that is half full, as most are, little: a packet each of lz4's two neighbours, as they are and zstd 1, is
        // worse than two of lz4.
        let full = (look.queued.clamp(0.0, 1.0) * 2.0 - 1.0).powi(3);
        let price = (self.price + even * SPREAD + full * QUEUE).exp();
        let worth = self.worth(price, look.queued);
        let Some(class) = look.class else {
            return match self.raw.filter(|raw| self.need_not_look(*raw, worth)) {
                Some(raw) => {
                    self.turn += 1;
                    self.found(look);
                    Choice::Send(raw)
                }
                None => Choice::LookFirst,
            };
        };
        self.turn += 1;
        self.found(look);
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

    fn found(&mut self, look: Look) {
        self.empty.add(if look.queued <= 0.0 { 1.0 } else { 0.0 });
    }

    /// Whether a packet goes as it is, whatever it holds, or very likely.
    fn need_not_look(&self, raw: usize, worth: Worth) -> bool {
        self.is_tired() && !self.turn.is_multiple_of(self.seldom())
            || Class::all().all(|class| self.best(class, worth) == raw)
    }

    /// One packet in so many may be looked at.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped"
    )]
    fn seldom(&self) -> u64 {
        let pace = self.pace.or(0.0);
        (LOOK / (LOOKING * pace).max(1.0)).clamp(LEAST_SELDOM, SELDOM) as u64
    }

    fn is_tired(&self) -> bool {
        self.same >= SAME
    }

    fn worth(&self, price: f64, queued: f64) -> Worth {
        // A guest is stopped for a shorter time the faster its pages go.
        if self.goal == Goal::LeastCpu {
            return Worth {
                byte: 0.0,
                far: 1.0,
                idle: 0.0,
                lasts: 0.0,
            };
        }
        // The wire is idle if all other channels' queues are empty as well.
        let others = (self.evidence.threads() - 1.0).max(0.0);
        let alone = self.empty.or(0.0).powf(others);
        Worth {
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

    fn total(&self, candidate: usize, class: Class, worth: Worth) -> f64 {
        let cost = self.costs.of(candidate, class);
        if cost.left > USELESS && self.raw.is_some_and(|raw| raw != candidate) {
            return f64::INFINITY;
        }
        cost.encode
            + (cost.encode - worth.lasts).max(0.0) * worth.idle
            + cost.left * (self.costs.send() + worth.byte)
            + self.costs.decode(candidate) * worth.far
    }

    /// The candidate that costs least.
    fn best(&self, class: Class, worth: Worth) -> usize {
        (0..self.costs.len())
            .min_by(|a, b| {
                self.total(*a, class, worth)
                    .total_cmp(&self.total(*b, class, worth))
            })
            .unwrap_or(0)
    }

    /// A candidate that was hardly tried, is an accelerator or may be nearly as good, and keeps no core from a wire that is too
    /// fast for it.
    fn untried(&self, class: Class, worth: Worth, best: usize) -> Option<usize> {
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

    /// Whether a higher price would have changed the packet, and a lower one.
    fn would_change(&self, spent: &Spent) -> [bool; 2] {
        let Some(class) = spent.look.class else {
            return [!self.is_tired(), false];
        };
        let [least, most] = PRICES;
        [most, least]
            .map(|price| self.best(class, self.worth(price, spent.look.queued)) != spent.candidate)
    }

    /// One thread has spent its time like this; moves the prices when it is time to.
    pub(crate) fn spent(&mut self, spent: Spent, now: Duration) {
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
            // A wire that is idle because of the destination says nothing about the source's cores.
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
        // A move shows only in packets that are chosen after it: it must not go on before each thread had one.
        let windows = (since.as_secs_f64() / WINDOW.as_secs_f64())
            .min(MOST_WINDOWS)
            .min(to_f64(self.packets) / threads);

        // The cores' time that a byte takes on the wire.
        let fair = if self.wire > 0.0 {
            self.wire * threads
        } else {
            self.price()
        };
        if self.waited < LEARNING && evidence.waited > WAITING * evidence.elapsed {
            // From packets as they are to the best ones in steps would take 100 ms.
            self.waited += since;
            self.price = self.price.max(fair.ln());
        }
        let up = evidence.too_cheap;
        let down = evidence.too_dear * self.price() / fair;
        let direction = (up - down - THRIFT * evidence.may_fall)
            / (up + down + FAINT * evidence.elapsed).max(1.0);
        let [least, most] = PRICES;
        self.price = (self.price + SPEED * windows * direction).clamp(least.ln(), most.ln());

        let held = evidence.held / evidence.elapsed.max(1.0);
        let direction = (held - WAITING) / (held + FAINT);
        let [least, most] = FAR_PRICES;
        self.far = (self.far + FAR_SPEED * windows * direction).clamp(least.ln(), most.ln());

        self.scarce = if evidence.waited > WAITING * evidence.elapsed {
            Scarce::Link
        } else {
            Scarce::Cores
        };
    }
}
