//! Cost of each candidate: CPU time and bytes by class of content, as measured in this migration.
//!
//! Content is classified by the compression of a sample ([`Class`]). A candidate's cost for a class is the average of its
//! measurements and its [`CostEstimate`]. Two corrections are applied to the estimate first:
//!
//! - its time, by the candidate's results in other classes
//! - its compressed size, by recent results of the method's other levels in this class
//!
//! So a packet at one level informs about all levels, and few levels must be tried.

use crate::auto::candidates::{Candidate, CostEstimate};

/// Count of recent packets that an average covers.
const MEMORY: f64 = 64.0;

/// Count of recent packets that an average of content covers. Smaller than [`MEMORY`], because content changes, but not a
/// candidate's time on these CPUs.
const CONTENT_MEMORY: f64 = 32.0;

/// Weight, in packets, of the compression measured at a method's other levels. Large, because packets of one class differ more
/// than neighbouring levels do.
const DOUBT_OF_LEVELS: f64 = 32.0;

/// Weight, in packets, of the encoding time estimated from a candidate's results in other classes.
const DOUBT_OF_CLASSES: f64 = 4.0;

/// Minimum count of packets for a reliable average of a candidate's time.
const TRIES: f64 = 4.0;

/// Minimum count of packets for a reliable average of a method's compression of a class.
const CONTENT_TRIES: f64 = 2.0;

/// Upper bounds of the classes, without the last class: size of a sample compressed with lz4, as a fraction of its original
/// size.
const BOUNDS: [f64; 7] = [0.06, 0.15, 0.3, 0.45, 0.6, 0.75, 0.92];

/// Count of classes.
pub(crate) const CLASSES: usize = BOUNDS.len() + 1;

/// Class of content by its compressibility.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class(usize);

impl Class {
    /// Iterates over all classes, the most compressible first.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES).map(Self)
    }

    /// Returns the class of content. `left` is the compressed size of its sample, as a fraction of the original size; it can
    /// exceed 1.
    pub(crate) fn of(left: f64) -> Self {
        Self(BOUNDS.iter().take_while(|bound| left > **bound).count())
    }

    /// Returns the middle of the class: a compressed size, as a fraction of the original size.
    fn typical(self) -> f64 {
        let lower = self.0.checked_sub(1).map_or(0.0, |below| BOUNDS[below]);
        let upper = BOUNDS.get(self.0).copied().unwrap_or(1.0);
        f64::midpoint(lower, upper)
    }
}

/// Cost of a candidate for one byte of pages.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Cost {
    /// Time of a thread at the source to encode the byte, in ns: CPU time, or the time of an accelerator. Excludes sending.
    pub encode: f64,
    /// Bytes on the wire per byte of pages.
    pub left: f64,
}

/// Average over the most recent packets.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Average {
    value: f64,
    packets: f64,
}

impl Average {
    /// Adds the value of a packet.
    pub(crate) fn add(&mut self, value: f64) {
        self.add_over(value, MEMORY);
    }

    fn add_over(&mut self, value: f64, memory: f64) {
        self.packets = (self.packets + 1.0).min(memory);
        self.value += (value - self.value) / self.packets;
    }

    /// Returns the average as if `weight` more packets had the value `prior`.
    fn over(self, prior: f64, weight: f64) -> f64 {
        (self.value * self.packets + prior * weight) / (self.packets + weight)
    }

    /// Returns the average; `guess` if no packet was recorded.
    pub(crate) fn or(self, guess: f64) -> f64 {
        if self.packets > 0.0 {
            self.value
        } else {
            guess
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    encode: Average,
    /// Difference between this level and its method: factor on the estimated power at this level, minus the method's average
    /// factor (`Costs::contents`).
    level_deviation: Average,
}

/// Costs of all candidates.
#[derive(Debug)]
pub(crate) struct Costs {
    guesses: Vec<CostEstimate>,
    /// For each candidate, the index of the first candidate with the same method.
    first_of_method: Vec<usize>,
    /// For each candidate, true if an accelerator encodes it.
    on_devices: Vec<bool>,
    /// Measurements, by candidate and class.
    cells: Vec<[Cell; CLASSES]>,
    /// Compression of a class by a method at any level, as a factor on the estimated power. Indexed by the method's first
    /// candidate, then by class.
    contents: Vec<[Average; CLASSES]>,
    /// Ratio of measured to estimated encoding time, by candidate.
    corrections: Vec<Average>,
    /// Source's CPU time to send a byte, in ns.
    send: Average,
    /// Destination's CPU time in ns to decode a byte of pages, by candidate.
    decode: Vec<Average>,
    /// Cached costs, by candidate and class. To compute them at each query took half of an uncompressed packet's fixed cost.
    known: Vec<[Cost; CLASSES]>,
}

impl Costs {
    pub(crate) fn new(candidates: &[Candidate]) -> Self {
        let len = candidates.len();
        let first_of_method = candidates.iter().map(|this| {
            let first = candidates
                .iter()
                .position(|other| other.method == this.method);
            first.unwrap_or(0)
        });
        let mut costs = Self {
            guesses: candidates.iter().map(Candidate::guess).collect(),
            first_of_method: first_of_method.collect(),
            on_devices: candidates.iter().map(Candidate::is_on_a_device).collect(),
            cells: vec![Default::default(); len],
            contents: vec![Default::default(); len],
            corrections: vec![Average::default(); len],
            send: Average::default(),
            decode: vec![Average::default(); len],
            known: vec![[Cost::default(); CLASSES]; len],
        };
        for candidate in 0..len {
            for class in Class::all() {
                costs.work_out(candidate, class);
            }
        }
        costs
    }

    pub(crate) fn len(&self) -> usize {
        self.cells.len()
    }

    /// Records an encoded packet of `class`. `encode` is the thread's time in ns per byte; `left` is the compressed size as a
    /// fraction of the original size.
    pub(crate) fn encoded(&mut self, candidate: usize, class: Class, encode: f64, left: f64) {
        let guess = &self.guesses[candidate];
        let typical = class.typical();
        let guessed = guess.encode(typical);
        if guessed > 0.0 {
            self.corrections[candidate].add(encode / guessed);
        }
        let cell = &mut self.cells[candidate][class.0];
        cell.encode.add(encode);
        let power = left.max(0.001).ln() / guess.left(typical).min(0.999).ln();
        let power = power.clamp(0.0, 10.0);
        let content = &mut self.contents[self.first_of_method[candidate]][class.0];
        let before = content.or(power);
        content.add_over(power, CONTENT_MEMORY);
        cell.level_deviation.add(power - before);
        for class in Class::all() {
            self.work_out(candidate, class);
        }
        for other in 0..self.len() {
            if self.first_of_method[other] == self.first_of_method[candidate] {
                self.work_out(other, class);
            }
        }
    }

    /// Records the source's CPU time to send a byte on the wire, in ns.
    pub(crate) fn sent(&mut self, ns: f64) {
        self.send.add(ns);
    }

    /// Records the destination's CPU time to decode a byte of pages sent by `candidate`, in ns.
    pub(crate) fn decoded(&mut self, candidate: usize, ns: f64) {
        self.decode[candidate].add(ns);
    }

    /// Returns the cost of `candidate` for content of `class`.
    pub(crate) fn of(&self, candidate: usize, class: Class) -> Cost {
        self.known[candidate][class.0]
    }

    fn work_out(&mut self, candidate: usize, class: Class) {
        let (guess, cell) = (&self.guesses[candidate], &self.cells[candidate][class.0]);
        let typical = class.typical();
        let correction = self.corrections[candidate].or(1.0);
        let content = self.contents[self.first_of_method[candidate]][class.0].or(1.0);
        let power = content + cell.level_deviation.over(0.0, DOUBT_OF_LEVELS);
        self.known[candidate][class.0] = Cost {
            encode: cell
                .encode
                .over(guess.encode(typical) * correction, DOUBT_OF_CLASSES),
            left: guess.left(typical).powf(power.max(0.0)),
        };
    }

    /// Returns true if `candidate` has too few measurements for content of `class`: its cost is mostly an estimate.
    pub(crate) fn is_guess(&self, candidate: usize, class: Class) -> bool {
        let content = &self.contents[self.first_of_method[candidate]][class.0];
        self.guesses[candidate].encode(class.typical()) > 0.0
            && (self.corrections[candidate].packets < TRIES || content.packets < CONTENT_TRIES)
    }

    /// Returns true if an accelerator encodes `candidate` and was never tried. No estimate predicts its time.
    pub(crate) fn is_unknown_device(&self, candidate: usize) -> bool {
        self.on_devices[candidate] && self.corrections[candidate].packets == 0.0
    }

    /// Returns the source's CPU time to send a byte, in ns.
    pub(crate) fn send(&self) -> f64 {
        // Time of a copy into a socket, until it is measured.
        self.send.or(0.2)
    }

    /// Returns the destination's CPU time in ns to decode a byte of pages sent by `candidate`.
    pub(crate) fn decode(&self, candidate: usize) -> f64 {
        self.decode[candidate].or(self.guesses[candidate].decode)
    }
}

#[cfg(test)]
mod tests {
    use hotlift_methods::Accelerator;

    use super::*;

    #[test]
    fn current_costs_of_packets_outweigh_earlier_ones() {
        let candidates = Candidate::of_hotlifts(Accelerator::Off);
        let is_encoded = |one: &Candidate| one.guess().encode(0.5) > 0.0;
        let candidate = candidates.iter().position(is_encoded).unwrap();
        let mut costs = Costs::new(&candidates);
        let class = Class::of(0.5);
        for (packets, encode) in [(10_000, 1.0), (300, 9.0)] {
            for _ in 0..packets {
                costs.encoded(candidate, class, encode, 0.5);
            }
            let cost = costs.of(candidate, class).encode;
            assert!((cost - encode).abs() < 0.2, "{cost} in place of {encode}");
        }
    }
}
