//! The question about a guest whose destination made no statement: when the source asks, what an answer means, and how long
//! the destination answers. No I/O and no clock: `outcome_query` asks, and `stream::serve_queries` answers.

use std::time::{Duration, Instant};

use hotlift_wire::settle::{
    ANSWER_LEN, CONFIRMATION_LEN, GuestActivity, MigrationId, Outcome, confirmation, read_answer,
};

use crate::handover::DestinationStatement;

/// Time limit of one attempt. Short, so that a restored network is found soon: the kernel repeats a lost SYN after 1, 3,
/// 7 … s, a new connection sends one at once.
const ATTEMPT: Duration = Duration::from_millis(1500);

/// Time limit of one attempt while a postcopy is paused: an operator who resumes it waits for the attempt.
const PAUSED_ATTEMPT: Duration = Duration::from_millis(500);

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Silence of a destination after the commit, before it is asked on another connection. It has loaded everything by then:
/// some milliseconds are usual.
const QUERY_DELAY: Duration = Duration::from_secs(5);

/// Time for which a cancelled destination still answers. A source that lost its connections asks at once; without an answer
/// it would leave its guest paused.
const CANCELLED: Duration = Duration::from_secs(10);

/// Next step of a source that waits for the destination's statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Waits up to this time for a statement on the stream.
    Listen(Duration),
    /// Asks on another connection, within this time.
    Ask(Duration),
    /// Waits for this whole time, also if the stream has ended.
    Pause(Duration),
}

/// The source's side.
#[derive(Debug)]
pub(crate) struct Question {
    until: Instant,
    attempt: Duration,
    /// The next step; `None` after the last.
    next: Option<Step>,
    takes_questions: bool,
}

impl Question {
    /// Waits for `timeout` from the commit on; a QEMU takes no questions.
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

    /// Asks for `timeout` about a guest whose postcopy is paused.
    pub(crate) fn while_paused(now: Instant, timeout: Duration) -> Self {
        Self {
            until: now + timeout,
            attempt: PAUSED_ATTEMPT,
            next: Some(Step::Pause(PAUSE)),
            takes_questions: true,
        }
    }

    /// Returns the next step, after the one before brought no statement; `None` once the guest is in doubt.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Step> {
        let step = self.next.take()?;
        let left = self.until.saturating_duration_since(now);
        let (step, then) = match step {
            // Also with no time left: a statement that has arrived by then counts.
            Step::Listen(wait) => (Step::Listen(wait.min(left)), Step::Ask(self.attempt)),
            _ if left.is_zero() => return None,
            Step::Ask(wait) => (Step::Ask(wait.min(left)), Step::Pause(PAUSE)),
            Step::Pause(wait) => (Step::Pause(wait.min(left)), Step::Ask(self.attempt)),
        };
        self.next = self.takes_questions.then_some(then);
        Some(step)
    }
}

/// Returns the statement in an answer about `id`; `None` for a damaged answer, and for "ask again".
pub(crate) fn statement(
    answer: &[u8; ANSWER_LEN],
    id: MigrationId,
) -> Option<(DestinationStatement, GuestActivity)> {
    let (outcome, activity) = read_answer(answer, id).ok()?;
    Some((DestinationStatement::of_outcome(outcome)?, activity))
}

impl DestinationStatement {
    /// Returns the statement that an answer makes, if it makes one.
    pub(crate) fn of_outcome(outcome: Outcome) -> Option<Self> {
        match outcome {
            Outcome::Runs => Some(Self::Runs),
            Outcome::Never => Some(Self::Never),
            Outcome::HasAll => Some(Self::HasAll),
            Outcome::Unknown | Outcome::Undecided => None,
        }
    }
}

/// The time in which a destination answers, after the end of its migration.
#[derive(Debug)]
pub(crate) struct AnswerPeriod {
    until: Instant,
    is_cancelled: bool,
}

impl AnswerPeriod {
    /// Starts the period: the source may ask for `timeout` from now on.
    pub(crate) fn new(now: Instant, timeout: Duration) -> Self {
        Self {
            until: now + timeout,
            is_cancelled: false,
        }
    }

    /// Returns the remaining time; `None` once it is over.
    pub(crate) fn left(&mut self, now: Instant, is_cancelled: bool) -> Option<Duration> {
        if is_cancelled && !std::mem::replace(&mut self.is_cancelled, true) {
            self.until = self.until.min(now + CANCELLED);
        }
        let left = self.until.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }
}

/// The last bytes of a connection on which the source may confirm that it knows the outcome.
#[derive(Debug, Default)]
pub(crate) struct Confirmation(Vec<u8>);

impl Confirmation {
    /// Takes bytes; true once they end with the confirmation, which is the last message of a source.
    pub(crate) fn take(&mut self, bytes: &[u8], id: MigrationId) -> bool {
        self.0.extend_from_slice(bytes);
        let excess = self.0.len().saturating_sub(CONFIRMATION_LEN);
        self.0.drain(..excess);
        self.0 == confirmation(id)
    }
}

#[cfg(test)]
mod tests;
