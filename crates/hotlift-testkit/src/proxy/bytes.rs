//! Rule of a proxy that records every byte of a migration, and damages one byte.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::rule::{Flow, Rule, Socket, Stop};

/// One direction of a migration's connections, as seen by a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the source to the destination, on this connection.
    Forth(Socket),
    /// From the destination to the source. The connection is not named, because only main has answers.
    Back,
}

/// Bits to change in the byte at offset `at` of a direction.
#[derive(Debug, Clone, Copy)]
pub struct Flip {
    /// Direction that is damaged.
    pub direction: Direction,
    /// Offset of the damaged byte in this direction.
    pub at: usize,
    /// Bits to change.
    pub mask: u8,
}

/// All bytes of each direction, before the damage.
pub type Carried = HashMap<Direction, Vec<u8>>;

/// Rule that records every byte, and damages one.
#[derive(Debug, Default)]
pub struct Bytes {
    flip: Option<Flip>,
    carried: Mutex<Carried>,
}

impl Bytes {
    /// Creates the rule. It changes the bits of `flip`, on each connection in the direction of `flip`; `None` changes
    /// nothing.
    #[must_use]
    pub fn new(flip: Option<Flip>) -> Self {
        Self {
            flip,
            carried: Mutex::default(),
        }
    }

    /// Returns all recorded bytes.
    #[must_use]
    pub fn into_carried(self) -> Carried {
        self.carried
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rule for Bytes {
    /// Number of bytes that have passed.
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
