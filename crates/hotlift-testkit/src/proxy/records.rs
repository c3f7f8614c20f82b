//! Knows TLS: cuts the bytes of a connection into records, and does something to one of them, which it cannot read.

use std::sync::{Mutex, PoisonError};

use super::rule::{Flow, Rule, Stop};

/// Bytes of a record's header: type, version, length (RFC 8446, section 5.1).
const HEADER: usize = 5;

/// What is done to a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Both directions end before it, in order and without `close_notify`.
    Cut,
    /// The same in its middle.
    Truncate,
    /// It is left out: the first from there on that has come together with another.
    Drop,
    /// It comes twice.
    Double,
    /// It comes behind the one that follows it, which has come with it, as with [`Action::Drop`].
    Swap,
    /// A bit changes, at this byte; the last if there are not so many.
    Flip(usize),
}

/// What is done, and where. It is done once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// From the destination to the source.
    pub back: bool,
    /// Records of this direction before it, of all connections together.
    pub number: usize,
    /// What.
    pub action: Action,
}

/// What was carried.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Log {
    /// Records towards the destination.
    pub forth: usize,
    /// Records towards the source.
    pub back: usize,
    /// The fault was done.
    pub fired: bool,
}

/// The rule.
#[derive(Debug, Default)]
pub struct Records {
    fault: Option<Fault>,
    log: Mutex<Log>,
}

impl Records {
    /// Counts, and does `fault` when its record comes by.
    #[must_use]
    pub fn new(fault: Option<Fault>) -> Self {
        Self {
            fault,
            log: Mutex::default(),
        }
    }

    /// What came by.
    #[must_use]
    pub fn into_log(self) -> Log {
        self.log
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a record; what is to be done to it. The last that has come can change places with none, and without it
    /// nobody could tell that one is missing.
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

/// Length of the first record of `bytes`, if it is whole.
fn record(bytes: &[u8]) -> Option<usize> {
    let header = bytes.first_chunk::<HEADER>()?;
    let length = HEADER + usize::from(u16::from_be_bytes([header[3], header[4]]));
    (bytes.len() >= length).then_some(length)
}

impl Rule for Records {
    /// A record that comes behind the next one.
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
