//! Actual costs of encoding, sending and decoding in a simulated migration.

use crate::auto::candidates::Candidate;
use crate::figures::to_f64;

/// Reproducible pseudo-random numbers (splitmix64).
#[derive(Debug, Clone)]
pub(super) struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a random number from 0 to 1.
    pub(super) fn unit(&mut self) -> f64 {
        to_f64(self.next() >> 11) / to_f64(1 << 53)
    }

    /// Returns a random factor that deviates from 1 by up to `most`.
    pub(super) fn around(&mut self, most: f64) -> f64 {
        1.0 + most * (2.0 * self.unit() - 1.0)
    }

    /// Returns a number between `least` and `most`, with each order of magnitude equally likely.
    pub(super) fn between(&mut self, least: f64, most: f64) -> f64 {
        least * (most / least).powf(self.unit())
    }

    pub(super) fn index(&mut self, len: usize) -> usize {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        usize::try_from(self.next() % len).unwrap_or(0)
    }
}

/// Count of the kinds of content.
pub(super) const KINDS: usize = 13;

/// For each kind of content: its size with lz4 as a fraction of the original size, and a factor on zstd's usual result.
const CONTENTS: [(f64, f64); KINDS] = [
    (0.63, 1.0),
    (0.52, 0.85),
    (0.55, 1.1),
    (0.17, 0.95),
    (0.71, 1.0),
    (0.53, 1.0),
    (0.48, 1.2),
    (0.36, 0.95),
    (0.94, 4.0),
    (0.49, 1.15),
    (0.23, 1.05),
    (0.99, 15.0),
    (1.0, 0.0),
];

/// Kinds of content of the Silesia corpus.
pub(super) const MIX: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
pub(super) const TEXT: &[usize] = &[0, 6, 9];
pub(super) const HOPELESS: &[usize] = &[12];
/// Kinds of content, half of them incompressible.
pub(super) const HALF: &[usize] = &[3, 12, 7, 12];

/// Actual costs on one pair of hosts.
#[derive(Debug, Clone)]
pub(super) struct Truth {
    /// By candidate: ratio of the actual CPU time to the estimate, first for encoding, then for decoding.
    factors: Vec<[f64; 2]>,
    send: f64,
    receive: f64,
    candidates: Vec<Candidate>,
}

impl Truth {
    pub(super) fn new(candidates: &[Candidate], seed: u64) -> Self {
        let mut random = Random(seed);
        let host = random.between(0.5, 2.0);
        let far_host = host * random.between(0.8, 1.25);
        let factors = candidates
            .iter()
            .map(|_| {
                [
                    host * random.between(0.8, 1.25),
                    far_host * random.between(0.8, 1.25),
                ]
            })
            .collect();
        Self {
            factors,
            send: random.between(0.15, 0.3),
            receive: random.between(0.15, 0.3),
            candidates: candidates.to_vec(),
        }
    }

    fn is_raw(&self, candidate: usize) -> bool {
        self.candidates[candidate].method.flag() == 0
    }

    /// Returns the size of the content with lz4, as a fraction of its original size.
    pub(super) fn sample(&self, kind: usize) -> f64 {
        CONTENTS[kind].0
    }

    /// Returns the size of the content with `candidate`, as a fraction of its original size.
    pub(super) fn left(&self, kind: usize, candidate: usize) -> f64 {
        let (fast, better) = CONTENTS[kind];
        let guess = self.candidates[candidate].guess().left(fast);
        match self.candidates[candidate].method.flag() {
            0 => 1.0,
            0x04 => guess.powf(better).min(1.0),
            _ => guess,
        }
    }

    /// Returns the CPU time to encode a byte, in ns.
    pub(super) fn encode(&self, kind: usize, candidate: usize) -> f64 {
        self.candidates[candidate].guess().encode(CONTENTS[kind].0) * self.factors[candidate][0]
    }

    /// Returns the CPU time to send a byte, in ns.
    pub(super) fn send(&self) -> f64 {
        self.send
    }

    /// Returns the destination's CPU time per byte of pages, in ns. It is small for incompressible content, which is hardly
    /// decoded.
    pub(super) fn decode(&self, kind: usize, candidate: usize) -> f64 {
        let left = self.left(kind, candidate);
        let decode = match self.is_raw(candidate) || left > 0.99 {
            true => 0.1,
            false => self.candidates[candidate].guess().decode * self.factors[candidate][1],
        };
        decode + left * self.receive
    }
}
