//! The writes of a guest: the page of each vCPU's n-th write, and the number of writes that are due.
//!
//! Seed, vCPU and n alone determine the page. A vCPU needs no state except its number of writes, which determines every
//! record in memory (see [`crate::verify`]). The guest program computes the same function in assembly.

use std::fmt;
use std::str::FromStr;

use crate::bytes::{low_u8, reduce};
use crate::layout::{Layout, Record};

/// Distribution of the writes over the working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Workload {
    /// The guest sleeps, and writes nothing.
    Idle,
    /// Each write goes to a random page of the working set.
    Random,
    /// The writes go to the pages of the working set in sequence.
    Sequential,
    /// Nine of ten writes go to a tenth of the working set, the others to any page.
    Hotset,
}

impl Workload {
    /// All workloads.
    pub const ALL: [Self; 4] = [Self::Idle, Self::Random, Self::Sequential, Self::Hotset];

    /// Returns the name of the workload, as used on the command lines of the host and of the guest program.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Random => "random",
            Self::Sequential => "sequential",
            Self::Hotset => "hotset",
        }
    }

    /// Returns the number of the workload in a device state.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::Idle => 0,
            Self::Random => 1,
            Self::Sequential => 2,
            Self::Hotset => 3,
        }
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|workload| workload.code() == code)
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The text is not the name of a workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown workload {0:?}, known are idle, random, sequential, hotset")]
pub struct UnknownWorkload(pub String);

impl FromStr for Workload {
    type Err = UnknownWorkload;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|workload| workload.name() == name)
            .ok_or_else(|| UnknownWorkload(name.to_owned()))
    }
}

/// Increment of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Applies the finaliser of splitmix64, which spreads any 64 bits evenly.
pub(crate) fn mix(z: u64) -> u64 {
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Returns number `n` of the random sequence with the start `start`.
pub(crate) fn nth(start: u64, n: u64) -> u64 {
    mix(start.wrapping_add(n.wrapping_mul(GAMMA)))
}

/// Computes the sequence of writes of one vCPU.
#[derive(Debug, Clone)]
pub struct Generator {
    workload: Workload,
    vcpu: u64,
    vcpus: u64,
    start: u64,
    owned: u64,
    hot: u64,
}

impl Generator {
    /// Creates the generator for `vcpu`, which must be below the layout's number of vCPUs. `seed` selects the sequence.
    pub fn new(workload: Workload, seed: u64, layout: &Layout, vcpu: u8) -> Self {
        let owned = layout.owned();
        Self {
            workload,
            vcpu: u64::from(vcpu),
            vcpus: u64::from(layout.vcpus()),
            start: nth(seed, u64::from(vcpu) + 1),
            owned,
            hot: (owned / 10).max(1),
        }
    }

    /// Returns the page of write `number` (from 1), as an index among the pages that this vCPU owns.
    pub fn own_page(&self, number: u64) -> u64 {
        match self.workload {
            Workload::Sequential => number.wrapping_sub(1) % self.owned,
            Workload::Idle | Workload::Random => reduce(nth(self.start, number), self.owned),
            Workload::Hotset => {
                let random = nth(self.start, number);
                // The low byte selects the pages (230 of 256 is nine in ten), the high bits the page among them.
                let pages = if low_u8(random) < 230 {
                    self.hot
                } else {
                    self.owned
                };
                reduce(random, pages)
            }
        }
    }

    /// Converts `own`, an index among the pages of this vCPU, to a page number in the working set.
    pub fn page(&self, own: u64) -> u64 {
        own * self.vcpus + self.vcpu
    }

    /// Returns the write records of all pages of this vCPU after `writes` writes. Takes some nanoseconds per write.
    pub fn replay(&self, vcpu: u8, writes: u64) -> Vec<Record> {
        let mut records = vec![Record::default(); crate::bytes::to_usize(self.owned)];
        for number in 1..=writes {
            let record = &mut records[crate::bytes::to_usize(self.own_page(number))];
            *record = record.next(vcpu, number);
        }
        records
    }
}

/// Progress of a vCPU: the number of its writes, and of stores of an incomplete write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Position {
    /// Number of writes completely in memory.
    pub writes: u64,
    /// Number of stores of the next write that are in memory, 0 to 4. The order of the stores: version and sequence in
    /// the table, then version and sequence in the page.
    pub stores: u8,
}

impl Position {
    /// Returns the progress of a vCPU that has finished write `writes` and not begun the next.
    pub fn between(writes: u64) -> Self {
        Self { writes, stores: 0 }
    }
}

/// Rate of writes: the number of writes that are due per tick. The guest program computes the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Length of a tick (interval between groups of writes), in microseconds.
    pub tick_us: u64,
    /// Writes per tick and vCPU, as a fixed-point number with 48 integer and 16 fraction bits.
    pub quota: u64,
}

impl Pace {
    /// Maximum number of pages written per second; no memory is that fast.
    pub const MAX_RATE: u64 = 1_000_000_000;

    /// Returns the pace of each vCPU if `vcpus` vCPUs together write `rate` pages per second (capped at
    /// [`Pace::MAX_RATE`]).
    ///
    /// A tick is 1 ms. If one write per vCPU takes longer at this rate, a tick has this length, up to 100 ms. Long
    /// ticks avoid wake-ups of an idle guest.
    pub fn new(workload: Workload, rate: u64, vcpus: u8) -> Self {
        const LONGEST_US: u64 = 100_000;
        let rate = if workload == Workload::Idle {
            0
        } else {
            rate.min(Self::MAX_RATE)
        };
        let vcpus = u64::from(vcpus.max(1));
        let tick_us = (1_000_000 * vcpus)
            .checked_div(rate)
            .unwrap_or(LONGEST_US)
            .clamp(1000, LONGEST_US);
        Self {
            tick_us,
            quota: (rate << 16) * tick_us / (1_000_000 * vcpus),
        }
    }
}
