//! The outcome query, for a guest whose destination made no statement: when the source asks, what an answer means, and how long
//! the destination answers. No I/O and no clock: `outcome_query` asks, and `stream::serve_queries` answers.

use std::time::{Duration, Instant};

use hotlift_wire::settle::{
    ANSWER_LEN, CONFIRMATION_LEN, GuestActivity, MigrationId, Outcome, confirmation, read_answer,
};

use crate::handover::DestinationStatement;

/// Time limit of one attempt. It is short, because a new connection sends a SYN at once. In an old attempt the kernel repeats a
/// lost SYN only after 1, 3, 7 … s, and would detect a restored network late.
const ATTEMPT: Duration = Duration::from_millis(1500);

/// Time limit of one attempt while a postcopy is paused. An operator who resumes the postcopy must wait for the end of the
/// attempt.
const PAUSED_ATTEMPT: Duration = Duration::from_millis(500);

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Time to wait for a statement on the stream after the commit, before the source asks on another connection. Some milliseconds
/// are usual, because everything is loaded by then.
const QUERY_DELAY: Duration = Duration::from_secs(5);

/// Time for which a cancelled destination still answers. A source that has lost its connections asks at once. Without an
/// answer, the source would leave its guest paused.
const CANCELLED: Duration = Duration::from_secs(10);

/// Next step of a source that waits for the destination's statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Waits up to this time for a statement on the stream.
    Listen(Duration),
    /// Asks on another connection, within this time.
    Ask(Duration),
    /// Waits for this whole time, even if the stream has ended.
    Pause(Duration),
}

/// The source's side: decides when to ask, and when to stop.
#[derive(Debug)]
pub(crate) struct Question {
    until: Instant,
    attempt: Duration,
    /// The next step; `None` after the last.
    next: Option<Step>,
    takes_questions: bool,
}

impl Question {
    /// Begins at the commit, for a time of `timeout`. `takes_questions` is false for a QEMU, which answers no outcome queries.
    pub(crate) fn after_commit(now: Instant, timeout: Duration, takes_questions: bool) -> Self {
        let silence = match takes_questions {
            true => timeout.min(QUERY_DELAY),
            false => timeout,
        };
        Self {
            until: now + timeout,
            attempt: ATTEMPT,
            next: Some(Step::Listen(silence)),
            takes_questions,
        }
    }

    /// Begins while a postcopy is paused, for a time of `timeout`.
    pub(crate) fn while_paused(now: Instant, timeout: Duration) -> Self {
        Self {
            until: now + timeout,
            attempt: PAUSED_ATTEMPT,
            next: Some(Step::Pause(PAUSE)),
            takes_questions: true,
        }
    }

    /// Returns the next step, if the previous step brought no statement. Returns `None` after the time limit; the guest is then
    /// in doubt.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Step> {
        let step = self.next.take()?;
        let left = self.until.saturating_duration_since(now);
        let (step, then) = match step {
            // Returned even if no time is left, because a statement that has already arrived counts.
            Step::Listen(wait) => (Step::Listen(wait.min(left)), Step::Ask(self.attempt)),
            _ if left.is_zero() => return None,
            Step::Ask(wait) => (Step::Ask(wait.min(left)), Step::Pause(PAUSE)),
            Step::Pause(wait) => (Step::Pause(wait.min(left)), Step::Ask(self.attempt)),
        };
        self.next = self.takes_questions.then_some(then);
        Some(step)
    }
}

/// Returns the statement in an answer about migration `id`. Returns `None` for a damaged answer, and for an answer without a
/// statement ("ask again").
pub(crate) fn statement(
    answer: &[u8; ANSWER_LEN],
    id: MigrationId,
) -> Option<(DestinationStatement, GuestActivity)> {
    let (outcome, activity) = read_answer(answer, id).ok()?;
    Some((DestinationStatement::of_outcome(outcome)?, activity))
}

impl DestinationStatement {
    /// Returns the statement that an answer makes; `None` for an answer that makes none.
    pub(crate) fn of_outcome(outcome: Outcome) -> Option<Self> {
        match outcome {
            Outcome::Runs => Some(Self::Runs),
            Outcome::Never => Some(Self::Never),
            Outcome::HasAll => Some(Self::HasAll),
            Outcome::Unknown | Outcome::Undecided => None,
        }
    }
}

/// Period after the end of a migration in which the destination answers outcome queries.
#[derive(Debug)]
pub(crate) struct AnswerPeriod {
    until: Instant,
    is_cancelled: bool,
}

impl AnswerPeriod {
    /// Begins the period, in which the source may send outcome queries for `timeout`.
    pub(crate) fn new(now: Instant, timeout: Duration) -> Self {
        Self {
            until: now + timeout,
            is_cancelled: false,
        }
    }

    /// Returns the remaining time; `None` once it is over. The first call with `is_cancelled` shortens it to [`CANCELLED`].
    pub(crate) fn left(&mut self, now: Instant, is_cancelled: bool) -> Option<Duration> {
        if is_cancelled && !std::mem::replace(&mut self.is_cancelled, true) {
            self.until = self.until.min(now + CANCELLED);
        }
        let left = self.until.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }
}

/// Last bytes received on a connection on which the source may send its confirmation that it knows the outcome.
#[derive(Debug, Default)]
pub(crate) struct Confirmation(Vec<u8>);

impl Confirmation {
    /// Adds received bytes. Returns true once the received bytes end with the confirmation for `id`, which is a source's last
    /// message.
    pub(crate) fn take(&mut self, bytes: &[u8], id: MigrationId) -> bool {
        self.0.extend_from_slice(bytes);
        let excess = self.0.len().saturating_sub(CONFIRMATION_LEN);
        self.0.drain(..excess);
        self.0 == confirmation(id)
    }
}

#[cfg(test)]
mod tests;
