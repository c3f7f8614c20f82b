//! What each candidate costs: CPU time and bytes by kind of content, as this migration has measured them.
//!
//! Content falls into classes by how far a sample of it shrinks ([`Class`]). For each class and candidate the time to
//! encode and the share that is left are averages over the last packets. What was not measured yet is guessed from
//! the candidate's [`Guess`], corrected by how the guess did in other classes.

use crate::auto::candidates::{Candidate, Guess};

/// Packets over which an average reaches back.
const MEMORY: f64 = 16.0;

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
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cost {
    /// CPU time at the source, without sending, in ns.
    pub encode: f64,
    /// Bytes that go over the wire.
    pub left: f64,
}

/// An average over the last packets.
#[derive(Debug, Clone, Copy, Default)]
struct Average {
    value: f64,
    packets: f64,
}

impl Average {
    fn add(&mut self, value: f64) {
        self.packets = (self.packets + 1.0).min(MEMORY);
        self.value += (value - self.value) / self.packets;
    }

    fn or(self, guess: f64) -> f64 {
        if self.packets > 0.0 { self.value } else { guess }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    encode: Average,
    left: Average,
}

/// All candidates' costs.
#[derive(Debug)]
pub(crate) struct Costs {
    guesses: Vec<Guess>,
    /// By candidate, by class.
    cells: Vec<[Cell; CLASSES]>,
    /// Measured over guessed time to encode, by candidate.
    corrections: Vec<Average>,
    /// CPU time to send a byte, in ns.
    send: Average,
    /// CPU time of the destination for a byte of pages, in ns, by candidate.
    decode: Vec<Average>,
}

impl Costs {
    pub(crate) fn new(candidates: &[Candidate]) -> Self {
        Self {
            guesses: candidates.iter().map(Candidate::guess).collect(),
            cells: vec![Default::default(); candidates.len()],
            corrections: vec![Average::default(); candidates.len()],
            send: Average::default(),
            decode: vec![Average::default(); candidates.len()],
        }
    }

    /// Number of candidates.
    pub(crate) fn len(&self) -> usize {
        self.cells.len()
    }

    /// A packet of that class took `encode` ns of CPU time for each of its bytes, and `left` of them were left.
    pub(crate) fn encoded(&mut self, candidate: usize, class: Class, encode: f64, left: f64) {
        let guess = self.guesses[candidate].encode(class.typical());
        if guess > 0.0 {
            self.corrections[candidate].add(encode / guess);
        }
        let cell = &mut self.cells[candidate][class.0];
        cell.encode.add(encode);
        cell.left.add(left);
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
        let (guess, cell) = (
            &self.guesses[candidate],
            &self.cells[candidate][class.0],
        );
        let typical = class.typical();
        let correction = self.corrections[candidate].or(1.0);
        Cost {
            encode: cell.encode.or(guess.encode(typical) * correction),
            left: cell.left.or(guess.left(typical)),
        }
    }

    /// Whether `candidate` was never tried on content of that class.
    pub(crate) fn is_guess(&self, candidate: usize, class: Class) -> bool {
        self.guesses[candidate].encode(class.typical()) > 0.0
            && self.cells[candidate][class.0].encode.packets == 0.0
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
