//! Records every byte of a migration, and damages one, selected by its offset.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::rule::{Flow, Rule, Socket, Stop};

/// One direction of a migration's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the source, on a connection.
    Forth(Socket),
    /// From the destination, on any connection: only main has answers.
    Back,
}

/// Bits to change in byte `at` of a direction.
#[derive(Debug, Clone, Copy)]
pub struct Flip {
    /// Direction.
    pub direction: Direction,
    /// Bytes of the direction before it.
    pub at: usize,
    /// The bits.
    pub mask: u8,
}

/// All bytes carried, before the damage.
pub type Carried = HashMap<Direction, Vec<u8>>;

/// The rule.
#[derive(Debug, Default)]
pub struct Bytes {
    flip: Option<Flip>,
    carried: Mutex<Carried>,
}

impl Bytes {
    /// Creates the rule. Flips bits on each connection that `flip` names.
    #[must_use]
    pub fn new(flip: Option<Flip>) -> Self {
        Self {
            flip,
            carried: Mutex::default(),
        }
    }

    /// Returns the bytes carried.
    #[must_use]
    pub fn into_carried(self) -> Carried {
        self.carried
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rule for Bytes {
    /// Bytes that have passed.
    type Direction = usize;

    fn apply(&self, at: &mut usize, came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
        let direction = match (flow.is_back(), flow.socket()) {
            (true, _) => Direction::Back,
            (false, Some(Socket::Question)) => return flow.pass_all(came),
            (false, Some(socket)) => Direction::Forth(socket),
            (false, None) => return Ok(()),
        };
        super::lock(&self.carried)
            .entry(direction)
            .or_default()
            .extend_from_slice(came);
        let length = came.len();
        if let Some(flip) = self.flip.filter(|flip| flip.direction == direction)
            && (*at..*at + length).contains(&flip.at)
        {
            came[flip.at - *at] ^= flip.mask;
        }
        *at += length;
        flow.pass_all(came)
    }
}
