//! Writes of a guest: the page of each vCPU's n-th write, and the number of due writes.
//!
//! The page is a function of (seed, vCPU, n) alone. So a vCPU needs no state but the number of its writes, and that number
//! determines every record in memory (see [`crate::verify`]). The guest program computes the same function in assembly.

use std::fmt;
use std::str::FromStr;

use crate::bytes::{low_u8, reduce};
use crate::layout::{Layout, Record};

/// Distribution of the writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Workload {
    /// No writes: the guest sleeps.
    Idle,
    /// Any page of the working set.
    Random,
    /// The pages of the working set in sequence.
    Sequential,
    /// Nine writes in ten to a tenth of the working set, the rest anywhere.
    Hotset,
}

impl Workload {
    /// All workloads.
    pub const ALL: [Self; 4] = [Self::Idle, Self::Random, Self::Sequential, Self::Hotset];

    /// Returns the name, as on the command lines of the host and of the guest program.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Random => "random",
            Self::Sequential => "sequential",
            Self::Hotset => "hotset",
        }
    }

    /// Returns the number that represents it in a device state.
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

/// A name of no workload.
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

/// Splitmix64's increment (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Applies splitmix64's finaliser, which spreads any 64 bits evenly.
pub(crate) fn mix(z: u64) -> u64 {
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Returns number `n` of the random sequence that starts at `start`.
pub(crate) fn nth(start: u64, n: u64) -> u64 {
    mix(start.wrapping_add(n.wrapping_mul(GAMMA)))
}

/// Sequence of the writes of one vCPU.
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
    /// Returns the writes of `vcpu` (below the layout's number of vCPUs) under `seed`.
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

    /// Returns the page of write `number` (from 1), as an index among the pages of this vCPU.
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

    /// Returns the page of the working set that is this vCPU's page `own`.
    pub fn page(&self, own: u64) -> u64 {
        own * self.vcpus + self.vcpu
    }

    /// Returns the records of all its own pages after `writes` writes. Takes some nanoseconds per write.
    pub fn replay(&self, vcpu: u8, writes: u64) -> Vec<Record> {
        let mut records = vec![Record::default(); crate::bytes::to_usize(self.owned)];
        for number in 1..=writes {
            let record = &mut records[crate::bytes::to_usize(self.own_page(number))];
            *record = record.next(vcpu, number);
        }
        records
    }
}

/// Progress of a vCPU: its whole state except registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Position {
    /// Writes completely in memory.
    pub writes: u64,
    /// Stores of the next write that are in memory, 0 to 4. The stores of a write are, in order: version and sequence in the
    /// table, version and sequence in the page.
    pub stores: u8,
}

impl Position {
    /// Returns the position of a vCPU between two writes.
    pub fn between(writes: u64) -> Self {
        Self { writes, stores: 0 }
    }
}

/// Number of due writes per tick. The guest program computes the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Length of a tick, in microseconds.
    pub tick_us: u64,
    /// Writes per tick and vCPU, 48.16 fixed point.
    pub quota: u64,
}

impl Pace {
    /// Maximum pages per second; above the speed of any memory.
    pub const MAX_RATE: u64 = 1_000_000_000;

    /// Returns the pace of one of `vcpus` vCPUs that together write `rate` pages per second (capped at [`Pace::MAX_RATE`]).
    ///
    /// A tick is 1 ms, or as long as one write takes at the rate, up to 100 ms: an idle guest should not cost wake-ups.
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
