//! Chooses what each packet is sent as: a pure function of what was observed.
//!
//! One number is learnt, the **price**: how much CPU time a byte less on the wire is worth. A packet is sent as what
//! costs least, its CPU time and its bytes at that price added up. With a price of nothing that is the packet as it is; the
//! higher the price, the harder it is compressed. So each candidate that is ever worth its time has a range of prices
//! of its own, and what is never worth it, for this content on these hosts, is never chosen.
//!
//! The price follows from who waits. A channel's thread that waits for the wire has CPU time to spare: the price goes
//! up. One that never waits leaves the wire idle: it goes down. In the balance both are used up, which is the most
//! that can be delivered. A thread that waits for the *destination* has nothing to spare; that time does not count.
//!
//! Near the price at which two candidates cost the same, packets take turns: the price of each packet is spread around
//! the learnt one. That fills the wire and the cores at once, where one candidate alone would leave one of them idle,
//! and it costs nothing, since both are worth the same there.
//!
//! If the channel's queue is empty, the wire waits for this very packet. A second of CPU time is then a second of the wire, and a
//! byte is worth at most the time that it takes to send.

use std::time::Duration;

use crate::auto::candidates::Candidate;
use crate::auto::costs::{Class, Costs};
use crate::figures::to_f64;

/// The share of its time that a thread is to wait for the wire: none would mean that the wire is idle at times.
const WAITING: f64 = 0.03;

/// How fast the price moves, in powers of e a second, where nobody waits, or everybody all the time. The whole range from
/// lz4 to zstd's level 9 is 6 powers.
const SPEED: f64 = 12.0;

/// Between two moves of the price.
const WINDOW: Duration = Duration::from_millis(20);

/// A gap without packets, as between two rounds, moves the price no further than this.
const LONGEST_WINDOW: Duration = Duration::from_millis(100);

/// Half the width of the prices around the learnt one, in powers of e.
const SPREAD: f64 = 0.5;

/// The first price: packets behind a queue are compressed a little, those that the wire waits for go as they are.
const FIRST_PRICE: f64 = 4.0;

/// Prices that are thought about, in ns of CPU time a byte: below, no CPU sends a byte in less; above, links of 1 Mbit/s.
const PRICES: [f64; 2] = [0.01, 8000.0];

/// One packet in so many tries a candidate that was only guessed, if the guess comes close to the best.
const EXPLORING: u64 = 16;

/// How close: what the guess says it costs, over the best.
const CLOSE: f64 = 1.3;

/// What is known of a packet before it is chosen for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    /// Its content; `None`: nobody has looked yet.
    pub class: Option<Class>,
    /// Nothing waits in the channel's queue.
    pub is_dry: bool,
}

/// What to do with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Find out its class, and ask again.
    LookFirst,
    /// Send it as that candidate.
    Send(usize),
}

/// What one thread did for a while.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spent {
    /// Time that went by, in ns.
    pub elapsed: f64,
    /// Of which it waited for room on the wire, in ns; not for the destination.
    pub waited: f64,
}

/// Why the price is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scarce {
    /// Threads wait for the wire.
    Link,
    /// The wire waits for threads.
    Cores,
}

/// What the migration is to be good at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// To end soon.
    Fastest,
    /// To take little CPU time of both hosts.
    LeastCpu,
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
    /// Time that the wire takes for a byte, in ns; 0 while it is not known.
    wire: f64,
    /// Share of the destination's time in which it works, 0 to 1.
    destination_busy: f64,
    /// Since the price was moved.
    spent: Spent,
    moved: Duration,
    /// Whether a higher, or lower, price would have changed a packet since then: the price stays where it still matters.
    room: [bool; 2],
    scarce: Scarce,
    /// Packets chosen for.
    turn: u64,
    explored: u64,
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
            wire: 0.0,
            destination_busy: 0.5,
            spent: Spent::default(),
            moved: now,
            room: [true; 2],
            scarce: Scarce::Cores,
            turn: 0,
            explored: 0,
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

    /// Share of the destination's time, 0 to 1, in which it works, as it says.
    pub(crate) fn destination(&mut self, busy: f64) {
        self.destination_busy = busy.clamp(0.0, 1.0);
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
        let free = match self.goal {
            Goal::LeastCpu => 0.0,
            Goal::Fastest => (self.price + even * SPREAD).exp(),
        };
        let price = match look.is_dry {
            true => free.min(self.wire),
            false => free,
        };
        let Some(class) = look.class else {
            // Nobody need look at content that goes as it is, whatever it is.
            let Some(raw) = self.raw.filter(|raw| self.is_best_for_all(*raw, price)) else {
                return Choice::LookFirst;
            };
            self.turn += 1;
            self.room[0] = true;
            self.room[1] |= !self.is_best_for_all(raw, free);
            return Choice::Send(raw);
        };
        self.turn += 1;
        let best = self.best(class, price);
        let [least, most] = PRICES;
        let at_this_price = self.best(class, free);
        self.room[0] |= self.best(class, most) != at_this_price;
        self.room[1] |= self.best(class, least) != at_this_price;
        if self.turn.is_multiple_of(EXPLORING)
            && let Some(untried) = self.untried(class, price, best)
        {
            self.explored += 1;
            return Choice::Send(untried);
        }
        Choice::Send(best)
    }

    fn is_best_for_all(&self, candidate: usize, price: f64) -> bool {
        Class::all().all(|class| self.best(class, price) == candidate)
    }

    fn total(&self, candidate: usize, class: Class, price: f64) -> f64 {
        let cost = self.costs.of(candidate, class);
        cost.encode
            + cost.left * (self.costs.send() + price)
            + self.costs.decode(candidate) * self.destination_busy
    }

    /// The candidate that costs least.
    fn best(&self, class: Class, price: f64) -> usize {
        (0..self.costs.len())
            .min_by(|a, b| {
                self.total(*a, class, price)
                    .total_cmp(&self.total(*b, class, price))
            })
            .unwrap_or(0)
    }

    /// A candidate that was never tried on such content and may be nearly as good.
    fn untried(&self, class: Class, price: f64, best: usize) -> Option<usize> {
        let most = self.total(best, class, price) * CLOSE;
        (0..self.costs.len())
            .filter(|candidate| *candidate != best && self.costs.is_guess(*candidate, class))
            .map(|candidate| (candidate, self.total(candidate, class, price)))
            .filter(|(_, total)| *total <= most)
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .map(|(candidate, _)| candidate)
    }

    /// One thread has spent its time like this; moves the price when it is time to.
    pub(crate) fn spent(&mut self, spent: Spent, now: Duration) {
        self.spent.elapsed += spent.elapsed;
        self.spent.waited += spent.waited;
        let since = now.saturating_sub(self.moved);
        if since < WINDOW || self.spent.elapsed <= 0.0 {
            return;
        }
        let waiting = (self.spent.waited / self.spent.elapsed).clamp(0.0, 1.0);
        self.scarce = if waiting > WAITING {
            Scarce::Link
        } else {
            Scarce::Cores
        };
        let seconds = since.min(LONGEST_WINDOW).as_secs_f64();
        let step = match self.scarce {
            Scarce::Link => (waiting - WAITING) / (1.0 - WAITING),
            Scarce::Cores => (waiting - WAITING) / WAITING,
        };
        let [may_rise, may_fall] = self.room;
        if (step > 0.0 && may_rise) || (step < 0.0 && may_fall) {
            let [least, most] = PRICES;
            self.price = (self.price + SPEED * seconds * step).clamp(least.ln(), most.ln());
        }
        self.spent = Spent::default();
        self.moved = now;
        self.room = [false; 2];
    }
}
