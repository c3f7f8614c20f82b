//! A postcopy that was interrupted goes on: the destination says which pages it has, and then asks for others.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use hotlift_wire::main_channel::postcopy;
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{Reader, WireError};

use crate::error::MigrationError;
use crate::life::Life;
use crate::postcopy::Ledger;
use crate::transport::Stream;

/// Learns on a new connection which pages a guest has that waits for the others, does what is to be `ready` before it goes
/// on, and has it go on. What the destination has said since, of which nothing was taken.
pub(crate) fn go_on(
    mut main: &Stream,
    ledger: &Ledger,
    life: &Life,
    ready: impl FnOnce() -> Result<(), MigrationError>,
) -> Result<Vec<u8>, MigrationError> {
    let mut answers = Reading::new(main, life);
    for (index, block) in ledger.blocks().iter().enumerate() {
        let mut request = Vec::new();
        postcopy::put_bitmap_request(&block.name, &mut request)
            .map_err(MigrationError::main_wire)?;
        main.write_all(&request).map_err(MigrationError::opening)?;
        ledger.has(index, &answers.bitmap(&block.name, ledger.pages(index))?);
    }
    ready()?;
    let mut resume = Vec::new();
    postcopy::put_resume(&mut resume);
    main.write_all(&resume).map_err(MigrationError::opening)?;
    answers.resumed()?;
    Ok(answers.rest())
}

/// What a destination answers whose guest waits for pages, before requests may come.
struct Reading<'a> {
    from: &'a Stream,
    life: &'a Life,
    /// Read, and not taken.
    pending: Vec<u8>,
    /// The last request with a RAM block's name that came too early: those behind it may mean the same block.
    early: Vec<u8>,
    deadline: Instant,
}

impl<'a> Reading<'a> {
    /// How long all answers may take.
    const PATIENCE: Duration = Duration::from_secs(60);
    const TICK: Duration = Duration::from_millis(100);

    fn new(from: &'a Stream, life: &'a Life) -> Self {
        Self {
            from,
            life,
            pending: Vec::new(),
            early: Vec::new(),
            deadline: Instant::now() + Self::PATIENCE,
        }
    }

    /// The pages of a RAM block that it has, as the answer to a request for them.
    fn bitmap(&mut self, block: &str, pages: usize) -> Result<Vec<u8>, MigrationError> {
        self.take(|bytes| bitmap(bytes, block, pages))
    }

    /// Its word that it goes on.
    fn resumed(&mut self) -> Result<(), MigrationError> {
        self.take(|bytes| match ReturnMessage::decode(bytes)? {
            (ReturnMessage::ResumeAck(1), length) => Ok(((), length)),
            _ => Err(WireError::OutOfOrder {
                got: "a message",
                expected: "the word that it goes on",
            }),
        })
    }

    /// What was read behind the answers.
    fn rest(self) -> Vec<u8> {
        [self.early, self.pending].concat()
    }

    /// Requests of a thread that slept through the interruption. The destination asks again for all that is open once it goes
    /// on.
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

    fn take<T>(
        &mut self,
        decode: impl Fn(&[u8]) -> Result<(T, usize), WireError>,
    ) -> Result<T, MigrationError> {
        let mut buffer = [0; 64 << 10];
        loop {
            self.skip_requests();
            match decode(&self.pending) {
                Ok((answer, length)) => {
                    self.pending.drain(..length);
                    return Ok(answer);
                }
                Err(WireError::Truncated { .. }) => {}
                Err(source) => return Err(MigrationError::main_wire(source)),
            }
            // Whether something comes or not: a destination that sends a byte now and then has no more time.
            if self.life.is_cancelled() {
                return Err(MigrationError::Cancelled);
            }
            if Instant::now() > self.deadline {
                return Err(MigrationError::Timeout {
                    waiting_for: "what the destination says of the pages that it has".to_owned(),
                    waited: Self::PATIENCE,
                });
            }
            let mut from = self.from;
            if !from
                .wait_readable(Self::TICK)
                .map_err(MigrationError::opening)?
            {
                continue;
            }
            match from.read(&mut buffer).map_err(MigrationError::opening)? {
                0 => return Err(MigrationError::main_closed()),
                read => self.pending.extend_from_slice(&buffer[..read]),
            }
        }
    }
}

fn bitmap(bytes: &[u8], block: &str, pages: usize) -> Result<(Vec<u8>, usize), WireError> {
    let (message, length) = ReturnMessage::decode(bytes)?;
    if message != (ReturnMessage::RecvBitmap { block }) {
        return Err(WireError::OutOfOrder {
            got: "a message",
            expected: "the bitmap of the RAM block that was asked for",
        });
    }
    let mut reader = Reader::new(&bytes[length..]);
    let bits = postcopy::read_bitmap(&mut reader, pages)?.to_vec();
    Ok((bits, length + reader.position()))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn requests_that_come_before_an_answer_are_not_the_answer() {
        let (here, there) = Stream::pair().unwrap();
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
        (&there).write_all(&sent).unwrap();
        let life = Life::default();
        let mut answers = Reading::new(&here, &life);
        answers.resumed().unwrap();
        let rest = answers.rest();
        let (named, length) = ReturnMessage::decode(&rest).unwrap();
        assert_eq!(named, late);
        assert_eq!(ReturnMessage::decode(&rest[length..]).unwrap().0, after);
    }

    #[test]
    fn answers_that_come_byte_by_byte_have_no_more_time_than_others() {
        let (here, there) = Stream::pair().unwrap();
        // Ends with the connection.
        let dribbling = thread::spawn(move || while (&there).write_all(&[0]).is_ok() {});
        let life = Life::default();
        let mut answers = Reading::new(&here, &life);
        answers.deadline = Instant::now();
        let ever = |bytes: &[u8]| -> Result<((), usize), WireError> {
            assert!(bytes.len() < 1 << 22, "it is waited for on and on");
            let (what, needed) = ("an answer", 1);
            Err(WireError::Truncated { what, needed })
        };
        let error = answers.take(ever).unwrap_err();
        assert!(matches!(error, MigrationError::Timeout { .. }), "{error}");
        drop(here);
        dribbling.join().unwrap();
    }
}
