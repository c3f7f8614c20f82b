//! Resume of a lost postcopy, at the destination: the answers to the source before pages are sent again. No I/O and no clock;
//! `recovery` reads and writes.

use std::time::{Duration, Instant};

use hotlift_wire::main_channel::postcopy::put_bitmap;
use hotlift_wire::return_path::ReturnMessage;

use crate::error::MigrationError;
use crate::stream::main_channel::{Action, unexpected};
use crate::stream::return_path::encode;

/// Time limit of the agreement, as a multiple of the handshake timeout. It includes the bitmaps: 32 MiB for 1 TiB of RAM.
const AGREEING: u32 = 2;

/// Agreement with a source on one connection: which pages have arrived, and that the postcopy continues.
#[derive(Debug)]
pub(super) struct Agreement {
    until: Instant,
    /// Time limit for the preempt channel, which the source connects before it resumes; `None` without the option.
    preempt: Option<Duration>,
}

/// Answer to one event of the source.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Bitmap of the RAM block with this index.
    Bitmap(usize),
    /// No answer yet: the destination waits for the preempt channel until this time.
    AwaitPreempt(Instant),
    /// No answer: everything is agreed.
    Agreed,
}

impl Agreement {
    /// Begins the agreement when a source has connected. `handshake` is the handshake timeout.
    pub(super) fn new(now: Instant, handshake: Duration, takes_preempt: bool) -> Self {
        Self {
            until: now + AGREEING * handshake,
            preempt: takes_preempt.then_some(handshake / 2),
        }
    }

    /// Returns the time at which the connection is cut, even during a read or a write.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Handles a request of the source.
    ///
    /// # Errors
    /// [`MigrationError::Protocol`] if the request is neither a bitmap request nor RESUME.
    pub(super) fn take(&self, action: &Action<'_>, now: Instant) -> Result<Answer, MigrationError> {
        match (action, self.preempt) {
            (Action::Bitmap(block), _) => Ok(Answer::Bitmap(*block)),
            (Action::Resume, Some(timeout)) => {
                Ok(Answer::AwaitPreempt(self.until.min(now + timeout)))
            }
            (Action::Resume, None) => Ok(Answer::Agreed),
            _ => Err(unexpected("a record without an agreement")),
        }
    }
}

/// Encodes the message with a RAM block's bitmap of received pages. `pages` is the number of pages; `received` returns the bits
/// of 64 pages, by index.
pub(super) fn bitmap(block: &str, pages: usize, received: impl Fn(usize) -> u64) -> Vec<u8> {
    let mut answer = encode(&[ReturnMessage::RecvBitmap { block }]);
    put_bitmap(pages, received, &mut answer);
    answer
}

#[cfg(test)]
mod tests;
