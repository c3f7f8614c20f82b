//! Recovers a postcopy over another connection, as the source. The source asks which pages the destination has, and then lets
//! the destination continue. [`Recovery`] decides, without I/O and without a clock; [`resume_postcopy`] reads and writes.
//!
//! ```text
//! RECV_BITMAP  for each RAM block     ---->
//!                                     <----  its bitmap
//! (the connection of requested pages)
//! RESUME                              ---->
//!                                     <----  RESUME_ACK, requests
//! ```

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use hotlift_net::transport::Stream;
use hotlift_wire::main_channel::postcopy;
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{Reader, WireError};

use crate::error::MigrationError;
use crate::life::Life;
use crate::life::wake_fd::WakeFd;
use crate::postcopy::Ledger;

/// Time limit for all answers together. A destination that slowly sends single bytes does not get more time.
const ANSWERS: Duration = Duration::from_secs(60);

/// Recovers a postcopy over `main`. Calls `ready` to prepare this process before the destination continues. Returns the bytes
/// that arrived after the answers, unprocessed.
pub(crate) fn resume_postcopy(
    mut main: &Stream,
    ledger: &Ledger,
    life: &Life,
    mut ready: impl FnMut() -> Result<(), MigrationError>,
) -> Result<Vec<u8>, MigrationError> {
    let wake_fd = WakeFd::new(life).map_err(MigrationError::opening)?;
    let mut recovery = Recovery::new(ledger, Instant::now());
    let mut buffer = [0; 64 << 10];
    loop {
        match recovery.next(Instant::now())? {
            Step::Send(bytes) => main.write_all(&bytes).map_err(MigrationError::opening)?,
            Step::Prepare => ready()?,
            Step::Receive(wait) => {
                life.check()?;
                let is_there = wake_fd.wait_readable(main, wait);
                if is_there.map_err(MigrationError::opening)? {
                    match main.read(&mut buffer).map_err(MigrationError::opening)? {
                        0 => return Err(MigrationError::main_closed()),
                        read => recovery.receive(&buffer[..read]),
                    }
                }
            }
            Step::Resumed(rest) => return Ok(rest),
        }
    }
}

/// Next step of a source that recovers a postcopy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Send these bytes to the destination.
    Send(Vec<u8>),
    /// Make the preparations that must be finished before the destination continues.
    Prepare,
    /// Wait for bytes from the destination, for at most this time.
    Receive(Duration),
    /// The destination continues. The bytes arrived after its answers.
    Resumed(Vec<u8>),
}

/// State machine of a source that recovers a postcopy.
pub(crate) struct Recovery<'l> {
    ledger: &'l Ledger,
    /// Index of the RAM block whose bitmap is requested. After the last block, RESUME is sent.
    block: usize,
    is_prepared: bool,
    /// True if the current request was sent, and its answer has not arrived.
    is_sent: bool,
    /// Bytes from the destination that are not processed yet.
    pending: Vec<u8>,
    /// Last skipped page request with a RAM block's name. Later requests without a name refer to the same block.
    early: Vec<u8>,
    until: Instant,
}

impl<'l> Recovery<'l> {
    /// Starts the recovery at the first RAM block. Pages that the destination has are recorded in `ledger`.
    pub(crate) fn new(ledger: &'l Ledger, now: Instant) -> Self {
        Self {
            ledger,
            block: 0,
            is_prepared: false,
            is_sent: false,
            pending: Vec::new(),
            early: Vec::new(),
            until: now + ANSWERS,
        }
    }

    /// Adds bytes received from the destination.
    pub(crate) fn receive(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Returns the next step for the time `now`.
    ///
    /// # Errors
    /// [`MigrationError::Wire`] for an invalid answer; [`MigrationError::Timeout`] after [`ANSWERS`].
    pub(crate) fn next(&mut self, now: Instant) -> Result<Step, MigrationError> {
        let ledger = self.ledger;
        loop {
            let block = ledger.blocks().get(self.block);
            if block.is_none() && !std::mem::replace(&mut self.is_prepared, true) {
                return Ok(Step::Prepare);
            }
            if !std::mem::replace(&mut self.is_sent, true) {
                let mut request = Vec::new();
                if let Some(block) = block {
                    let put = postcopy::put_bitmap_request(&block.name, &mut request);
                    put.map_err(MigrationError::main_wire)?;
                } else {
                    postcopy::put_resume(&mut request);
                }
                return Ok(Step::Send(request));
            }
            let Some(block) = block else {
                match self.take(acknowledged)? {
                    Some(()) => {
                        let rest = [&self.early[..], &self.pending].concat();
                        return Ok(Step::Resumed(rest));
                    }
                    None => break,
                }
            };
            let pages = ledger.pages(self.block);
            let Some(bits) = self.take(|bytes| bitmap(bytes, &block.name, pages))? else {
                break;
            };
            ledger.record_received(self.block, &bits);
            self.block += 1;
            self.is_sent = false;
        }
        match self.until.saturating_duration_since(now) {
            Duration::ZERO => Err(MigrationError::Timeout {
                waiting_for: "the destination's bitmaps of received pages".to_owned(),
                waited: ANSWERS,
            }),
            left => Ok(Step::Receive(left)),
        }
    }

    /// Skips page requests that arrive before the answer. They come from a thread of the destination that has not noticed the
    /// interruption. The destination repeats all open requests once it continues.
    fn skip_requests(&mut self) {
        loop {
            let length = match ReturnMessage::decode(&self.pending) {
                Ok((ReturnMessage::ReqPages { .. }, length)) => length,
                Ok((ReturnMessage::ReqPagesId { .. }, length)) => {
                    self.early = self.pending[..length].to_vec();
                    length
                }
                _ => return,
            };
            self.pending.drain(..length);
        }
    }

    /// Takes an answer from the received bytes; returns `None` if the answer is incomplete.
    fn take<T>(
        &mut self,
        decode: impl Fn(&[u8]) -> Result<(T, usize), WireError>,
    ) -> Result<Option<T>, MigrationError> {
        self.skip_requests();
        match decode(&self.pending) {
            Ok((answer, length)) => {
                self.pending.drain(..length);
                Ok(Some(answer))
            }
            Err(WireError::Truncated { .. }) => Ok(None),
            Err(source) => Err(MigrationError::main_wire(source)),
        }
    }
}

fn acknowledged(bytes: &[u8]) -> Result<((), usize), WireError> {
    match ReturnMessage::decode(bytes)? {
        (ReturnMessage::ResumeAck(1), length) => Ok(((), length)),
        _ => Err(WireError::OutOfOrder {
            got: "a message",
            expected: "the acknowledgement of the resume",
        }),
    }
}

fn bitmap(bytes: &[u8], block: &str, pages: usize) -> Result<(Vec<u8>, usize), WireError> {
    let (message, length) = ReturnMessage::decode(bytes)?;
    if message != (ReturnMessage::RecvBitmap { block }) {
        return Err(WireError::OutOfOrder {
            got: "a message",
            expected: "the bitmap of the requested RAM block",
        });
    }
    let mut reader = Reader::new(&bytes[length..]);
    let bits = postcopy::read_bitmap(&mut reader, pages)?.to_vec();
    Ok((bits, length + reader.position()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_before_an_answer_are_not_taken_for_it() {
        let (length, block) = (4096, "pc.ram");
        let late = ReturnMessage::ReqPagesId {
            start: 0,
            length,
            block,
        };
        let after = ReturnMessage::ReqPages {
            start: 8192,
            length,
        };
        let mut sent = Vec::new();
        for message in [&late, &ReturnMessage::ResumeAck(1), &after] {
            message.encode(&mut sent).unwrap();
        }
        let (ledger, now) = (Ledger::new(&[]), Instant::now());
        let mut recovery = Recovery::new(&ledger, now);
        assert_eq!(recovery.next(now).unwrap(), Step::Prepare);
        recovery.next(now).unwrap();
        recovery.receive(&sent);
        let Step::Resumed(rest) = recovery.next(now).unwrap() else {
            panic!("it is acknowledged");
        };
        let (named, length) = ReturnMessage::decode(&rest).unwrap();
        assert_eq!(named, late);
        assert_eq!(ReturnMessage::decode(&rest[length..]).unwrap().0, after);
    }
}
