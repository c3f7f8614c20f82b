//! What each candidate costs: CPU time and bytes by kind of content, as this migration has measured them.
//!
//! Content falls into classes by how far a sample of it shrinks ([`Class`]). What a candidate costs for a class is what was
//! measured for just that, averaged with what its [`Guess`] says. The guess is corrected: of time, by how it did in other classes;
//! of the share that is left, by how the method's other levels did in this class of late. So a packet at one level tells
//! something about all of them, and few have to be tried.

use crate::auto::candidates::{Candidate, Guess};

/// Packets over which an average reaches back.
const MEMORY: f64 = 64.0;

/// The same for what content is like: it changes, while what a candidate takes on these cores does not.
const CONTENT_MEMORY: f64 = 32.0;

/// So many packets say as much about a candidate, for a class, as what is known about its method at other levels: packets of
/// one class differ by more than neighbouring levels do.
const DOUBT_OF_LEVELS: f64 = 32.0;

/// So many packets say as much about the time that a candidate takes, for a class, as what is known about it in other classes.
const DOUBT_OF_CLASSES: f64 = 4.0;

/// Packets after which the time that a candidate takes is known.
const TRIES: f64 = 4.0;

/// Packets after which it is known how far a method shrinks a class.
const CONTENT_TRIES: f64 = 2.0;

/// Upper bounds of the classes but the last: share of a sample that is left by a fast codec.
const BOUNDS: [f64; 7] = [0.06, 0.15, 0.3, 0.45, 0.6, 0.75, 0.92];

/// Number of classes.
pub(crate) const CLASSES: usize = BOUNDS.len() + 1;

/// How far a packet's content shrinks, roughly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class(usize);

impl Class {
    /// All classes, the content that shrinks most first.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES).map(Self)
    }

    /// The class of content of which a sample shrinks to `left` of its bytes, 0 to 1 and beyond.
    pub(crate) fn of(left: f64) -> Self {
        Self(BOUNDS.iter().take_while(|bound| left > **bound).count())
    }

    /// A share that lies in the middle of the class.
    fn typical(self) -> f64 {
        let lower = self.0.checked_sub(1).map_or(0.0, |below| BOUNDS[below]);
        let upper = BOUNDS.get(self.0).copied().unwrap_or(1.0);
        f64::midpoint(lower, upper)
    }
}

/// What a candidate costs for a byte of pages.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Cost {
    /// Time of a thread at the source, without sending, in ns: CPU time, or what an accelerator takes.
    pub encode: f64,
    /// Bytes that go over the wire.
    pub left: f64,
}

/// An average over the last packets.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Average {
    value: f64,
    packets: f64,
}

impl Average {
    /// Adds a packet's.
    pub(crate) fn add(&mut self, value: f64) {
        self.add_over(value, MEMORY);
    }

    fn add_over(&mut self, value: f64, memory: f64) {
        self.packets = (self.packets + 1.0).min(memory);
        self.value += (value - self.value) / self.packets;
    }

    /// The average, as if that many packets had come out as was expected before.
    fn over(self, prior: f64, weight: f64) -> f64 {
        (self.value * self.packets + prior * weight) / (self.packets + weight)
    }

    /// The average, or the guess if there was no packet.
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
    /// How much further than its kin this one shrinks this content: beside the guess, in powers.
    beyond: Average,
}

/// All candidates' costs.
#[derive(Debug)]
pub(crate) struct Costs {
    guesses: Vec<Guess>,
    /// Of each candidate, the first with the same method.
    kin: Vec<usize>,
    /// Those that an accelerator does.
    on_devices: Vec<bool>,
    /// By candidate, by class.
    cells: Vec<[Cell; CLASSES]>,
    /// How far a method shrinks a class's content now, at whatever level: power of what was guessed; by kin, by class.
    contents: Vec<[Average; CLASSES]>,
    /// Measured over guessed time to encode, by candidate.
    corrections: Vec<Average>,
    /// CPU time to send a byte, in ns.
    send: Average,
    /// CPU time of the destination for a byte of pages, in ns, by candidate.
    decode: Vec<Average>,
    /// What follows from all that, by candidate, by class. Worked out anew for each question, it took half of what a packet
    /// that goes as it is costs beside its bytes.
    known: Vec<[Cost; CLASSES]>,
}

impl Costs {
    pub(crate) fn new(candidates: &[Candidate]) -> Self {
        let len = candidates.len();
        let kin = candidates.iter().map(|this| {
            let first = candidates
                .iter()
                .position(|other| other.method == this.method);
            first.unwrap_or(0)
        });
        let mut costs = Self {
            guesses: candidates.iter().map(Candidate::guess).collect(),
            kin: kin.collect(),
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

    /// Number of candidates.
    pub(crate) fn len(&self) -> usize {
        self.cells.len()
    }

    /// A packet of that class took a thread `encode` ns for each of its bytes, and `left` of them were left.
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
        let content = &mut self.contents[self.kin[candidate]][class.0];
        let before = content.or(power);
        content.add_over(power, CONTENT_MEMORY);
        cell.beyond.add(power - before);
        for class in Class::all() {
            self.work_out(candidate, class);
        }
        for other in 0..self.len() {
            if self.kin[other] == self.kin[candidate] {
                self.work_out(other, class);
            }
        }
    }

    /// Sending took `ns` of CPU time for each byte on the wire.
    pub(crate) fn sent(&mut self, ns: f64) {
        self.send.add(ns);
    }

    /// The destination took `ns` of CPU time for each byte of pages that were sent by `candidate`.
    pub(crate) fn decoded(&mut self, candidate: usize, ns: f64) {
        self.decode[candidate].add(ns);
    }

    /// What `candidate` costs for content of that class.
    pub(crate) fn of(&self, candidate: usize, class: Class) -> Cost {
        self.known[candidate][class.0]
    }

    fn work_out(&mut self, candidate: usize, class: Class) {
        let (guess, cell) = (&self.guesses[candidate], &self.cells[candidate][class.0]);
        let typical = class.typical();
        let correction = self.corrections[candidate].or(1.0);
        let content = self.contents[self.kin[candidate]][class.0].or(1.0);
        let power = content + cell.beyond.over(0.0, DOUBT_OF_LEVELS);
        self.known[candidate][class.0] = Cost {
            encode: cell
                .encode
                .over(guess.encode(typical) * correction, DOUBT_OF_CLASSES),
            left: guess.left(typical).powf(power.max(0.0)),
        };
    }

    /// Whether it is hardly known what `candidate` costs for content of that class.
    pub(crate) fn is_guess(&self, candidate: usize, class: Class) -> bool {
        let content = &self.contents[self.kin[candidate]][class.0];
        self.guesses[candidate].encode(class.typical()) > 0.0
            && (self.corrections[candidate].packets < TRIES || content.packets < CONTENT_TRIES)
    }

    /// Whether an accelerator does it that was never tried: no guess says what it takes.
    pub(crate) fn is_unknown_device(&self, candidate: usize) -> bool {
        self.on_devices[candidate] && self.corrections[candidate].packets == 0.0
    }

    /// CPU time to send a byte, in ns.
    pub(crate) fn send(&self) -> f64 {
        // Of a copy into a socket, until it is known.
        self.send.or(0.2)
    }

    /// CPU time of the destination for a byte of pages, in ns.
    pub(crate) fn decode(&self, candidate: usize) -> f64 {
        self.decode[candidate].or(self.guesses[candidate].decode)
    }
}

#[cfg(test)]
mod tests {
    use hotlift_methods::Accelerator;

    use super::*;

    #[test]
    fn what_packets_take_now_counts_however_many_came_before() {
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
