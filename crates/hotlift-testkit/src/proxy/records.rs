//! Parses TLS: cuts the bytes of a connection into records, which it cannot read, and damages one of them.

use std::sync::{Mutex, PoisonError};

use super::rule::{Flow, Rule, Stop};

/// Bytes of a record's header: type, version, length (RFC 8446, section 5.1).
const HEADER: usize = 5;

/// Effect on a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Both directions end before the record, in order and without `close_notify`.
    Cut,
    /// Both directions end in the middle of the record, in the same way.
    Truncate,
    /// The record is dropped. If it was the last of those that arrived together, the next record that is not the last is
    /// dropped instead.
    Drop,
    /// The record is sent twice.
    Double,
    /// The record is sent after the next one. It is chosen as for [`Action::Drop`].
    Swap,
    /// A bit of this byte changes, of the last byte if the record is shorter.
    Flip(usize),
}

/// A fault at a record. It happens once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// True from the destination to the source.
    pub back: bool,
    /// Records of this direction before it, of all connections together.
    pub number: usize,
    /// Effect.
    pub action: Action,
}

/// Log of the carried records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Log {
    /// Records towards the destination.
    pub forth: usize,
    /// Records towards the source.
    pub back: usize,
    /// True if the fault has happened.
    pub fired: bool,
}

/// The rule.
#[derive(Debug, Default)]
pub struct Records {
    fault: Option<Fault>,
    log: Mutex<Log>,
}

impl Records {
    /// Creates the rule. It counts, and applies `fault` when its record passes.
    #[must_use]
    pub fn new(fault: Option<Fault>) -> Self {
        Self {
            fault,
            log: Mutex::default(),
        }
    }

    /// Returns the log.
    #[must_use]
    pub fn into_log(self) -> Log {
        self.log
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a record; returns the action on it. The last record that arrived has no record to swap with, and its loss would
    /// go unnoticed.
    fn note(&self, back: bool, is_last: bool) -> Option<Action> {
        let mut log = super::lock(&self.log);
        let count = if back { &mut log.back } else { &mut log.forth };
        let number = std::mem::replace(count, *count + 1);
        let fault = self.fault.filter(|_| !log.fired)?;
        let is_here = match fault.action {
            Action::Swap | Action::Drop => fault.number <= number && !is_last,
            _ => fault.number == number,
        };
        if fault.back != back || !is_here {
            return None;
        }
        log.fired = true;
        Some(fault.action)
    }
}

/// Returns the length of the first record of `bytes`, if it is complete.
fn record(bytes: &[u8]) -> Option<usize> {
    let header = bytes.first_chunk::<HEADER>()?;
    let length = HEADER + usize::from(u16::from_be_bytes([header[3], header[4]]));
    (bytes.len() >= length).then_some(length)
}

impl Rule for Records {
    /// A record that is sent after the next one.
    type Direction = Vec<u8>;

    fn apply(&self, late: &mut Vec<u8>, came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
        let mut done = 0;
        while let Some(length) = record(&came[done..]) {
            let is_last = record(&came[done + length..]).is_none();
            let bytes = &mut came[done..done + length];
            done += length;
            match self.note(flow.is_back(), is_last) {
                None => flow.pass(bytes)?,
                Some(Action::Cut) => return Err(Stop::Cut),
                Some(Action::Truncate) => {
                    flow.pass(&bytes[..length / 2])?;
                    return Err(Stop::Cut);
                }
                Some(Action::Drop) => {}
                Some(Action::Double) => {
                    flow.pass(bytes)?;
                    flow.pass(bytes)?;
                }
                Some(Action::Swap) => {
                    late.extend_from_slice(bytes);
                    continue;
                }
                Some(Action::Flip(byte)) => {
                    bytes[byte.min(length - 1)] ^= 0x10;
                    flow.pass(bytes)?;
                }
            }
            let late = std::mem::take(late);
            flow.pass(&late)?;
        }
        came.drain(..done);
        Ok(())
    }
}
