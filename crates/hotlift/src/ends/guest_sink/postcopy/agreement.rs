//! Agreement of a destination, whose guest waits for pages, with a source that resumes. It decides without I/O and without a
//! clock; `recovery` reads and writes.

use std::time::{Duration, Instant};

use hotlift_wire::main_channel::postcopy::put_bitmap;
use hotlift_wire::return_path::ReturnMessage;

use crate::error::MigrationError;
use crate::stream::main_channel::{Action, unexpected};
use crate::stream::return_path::encode;

/// Time limit of the agreement, in handshake timeouts: the bitmaps of 1 TiB are 32 MiB.
const AGREEING: u32 = 2;

/// An agreement with one source.
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
    /// None yet: the destination waits for the preempt channel until this time.
    AwaitPreempt(Instant),
    /// None: everything is agreed.
    Agreed,
}

impl Agreement {
    /// Begins with a source that has connected; `handshake` is the time limit of a handshake.
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
    /// [`MigrationError::Protocol`] for anything but a request for a bitmap and RESUME.
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

/// Returns the message with the bitmap of a RAM block of `pages` pages, of which `received` returns words of 64.
pub(super) fn bitmap(block: &str, pages: usize, received: impl Fn(usize) -> u64) -> Vec<u8> {
    let mut answer = encode(&[ReturnMessage::RecvBitmap { block }]);
    put_bitmap(pages, received, &mut answer);
    answer
}

#[cfg(test)]
mod tests;
