//! What a destination whose guest waits for pages agrees on with a source that resumes. It decides, without I/O and without a
//! clock; `recovery` reads and writes.

use std::time::{Duration, Instant};

use hotlift_wire::main_channel::postcopy::put_bitmap;
use hotlift_wire::return_path::ReturnMessage;

use crate::error::MigrationError;
use crate::stream::main_channel::{Action, unexpected};
use crate::stream::return_path::encode;

/// Handshake times in which all must be agreed: the bitmaps of 1 TiB are 32 MiB.
const AGREEING: u32 = 2;

/// An agreement with one source.
#[derive(Debug)]
pub(super) struct Agreement {
    until: Instant,
    /// Time for the preempt channel, which the source has made before it resumes; none without the option.
    preempt: Option<Duration>,
}

/// Answer to one event of the source.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The bitmap of the RAM block with this index.
    Bitmap(usize),
    /// None before the preempt channel is there, which is awaited up to this time.
    AwaitPreempt(Instant),
    /// All is agreed.
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

    /// The time at which the connection is cut, whatever is read or written on it.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Takes what the source asks for.
    ///
    /// # Errors
    /// [`MigrationError::Protocol`] for anything but a request for a bitmap and RESUME.
    pub(super) fn take(&self, action: &Action<'_>, now: Instant) -> Result<Answer, MigrationError> {
        match (action, self.preempt) {
            (Action::Bitmap(block), _) => Ok(Answer::Bitmap(*block)),
            (Action::Resume, Some(patience)) => {
                Ok(Answer::AwaitPreempt(self.until.min(now + patience)))
            }
            (Action::Resume, None) => Ok(Answer::Agreed),
            _ => Err(unexpected("what is not agreed")),
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
