//! Rule of a proxy that splits a TLS connection into records and damages one of them. The proxy cannot decrypt the
//! records.

use std::sync::{Mutex, PoisonError};

use super::rule::{Flow, Rule, Stop};

/// Length of a record's header in bytes: type, version, length (RFC 8446, section 5.1).
const HEADER: usize = 5;

/// Change that the proxy makes at a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Both directions end before the record, by FIN and without `close_notify`.
    Cut,
    /// Both directions end in the middle of the record, by FIN and without `close_notify`.
    Truncate,
    /// The record is dropped. The record must not be the last of those that arrived together. If the record is the
    /// last, a later record is dropped instead.
    Drop,
    /// The record is sent twice.
    Double,
    /// The record is sent after the next record. A record without a next one is skipped, as for [`Action::Drop`].
    Swap,
    /// One bit of the byte at this index changes; if the record is shorter, of its last byte.
    Flip(usize),
}

/// A fault at one record. The fault occurs once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Direction of the record: true from the destination to the source.
    pub back: bool,
    /// Number of earlier records in this direction, on all connections together.
    pub number: usize,
    /// Change that the proxy makes at the record.
    pub action: Action,
}

/// Number of records that passed, and whether the fault has occurred.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Log {
    /// Number of records from the source to the destination.
    pub forth: usize,
    /// Number of records from the destination to the source.
    pub back: usize,
    /// True if the fault has occurred.
    pub fired: bool,
}

/// Rule that counts TLS records, and damages one.
#[derive(Debug, Default)]
pub struct Records {
    fault: Option<Fault>,
    log: Mutex<Log>,
}

impl Records {
    /// Creates the rule. It applies `fault` when the record of the fault passes; `None` only counts.
    #[must_use]
    pub fn new(fault: Option<Fault>) -> Self {
        Self {
            fault,
            log: Mutex::default(),
        }
    }

    /// Returns the log of all records.
    #[must_use]
    pub fn into_log(self) -> Log {
        self.log
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a record, and returns the change at this record. The last record that arrived is neither swapped nor
    /// dropped. There is no next record to swap with, and the loss would not be noticed.
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

/// Returns the length of the first record in `bytes`, with its header; `None` if the record is incomplete.
fn record(bytes: &[u8]) -> Option<usize> {
    let header = bytes.first_chunk::<HEADER>()?;
    let length = HEADER + usize::from(u16::from_be_bytes([header[3], header[4]]));
    (bytes.len() >= length).then_some(length)
}

impl Rule for Records {
    /// A record that must be sent after the next one; empty if there is none.
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
