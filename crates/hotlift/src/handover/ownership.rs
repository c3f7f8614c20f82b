//! State of the guest in a destination's QEMU after the commit, concluded from the QEMU's statement on the stream and from QMP.
//! No I/O and no clock; `ends/stream_sink` reads and waits.

use std::time::{Duration, Instant};

use hotlift_wire::settle::GuestActivity;

use crate::handover::DestinationStatement;

/// Time to wait for a statement on the stream after the commit, before QMP is queried.
const QMP_DELAY: Duration = Duration::from_secs(5);

/// Time limit for QMP to confirm a statement that the QEMU has sent on the stream. After this time the statement alone counts.
const CONFIRMING: Duration = Duration::from_secs(10);

/// State of the guest at the destination after the commit, according to QMP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QemuGuestState {
    /// The destination has the guest in this state, and keeps it.
    HasGuest(GuestActivity),
    /// The destination does not have the guest, and never will: its QEMU failed, or has ended. But if the stream has already
    /// stated that the destination has the guest, that statement counts.
    Never,
    /// The destination's QEMU had the guest and never ran it, and has ended.
    Ended,
    /// The state is not known, or not known yet.
    Unknown,
}

/// The wait for the QEMU's statement and for QMP, from the commit on.
#[derive(Debug)]
pub(crate) struct OwnershipWait {
    committed: Instant,
    timeout: Duration,
    /// First statement of the QEMU on the stream.
    statement: Option<DestinationStatement>,
}

impl OwnershipWait {
    /// Begins the wait, which ends `timeout` after `committed`.
    pub(crate) fn new(committed: Instant, timeout: Duration) -> Self {
        Self {
            committed,
            timeout,
            statement: None,
        }
    }

    /// Returns the time to wait for a statement on the stream before the first QMP query.
    pub(crate) fn first_wait(&self) -> Duration {
        self.timeout.min(QMP_DELAY)
    }

    /// Stores a statement from the stream, if there is one. Only the first statement counts.
    pub(crate) fn state(&mut self, statement: Option<DestinationStatement>) {
        self.statement = self.statement.or(statement);
    }

    /// Returns the statement of the stream.
    pub(crate) fn statement(&self) -> Option<DestinationStatement> {
        self.statement
    }

    /// Returns true if QMP should be queried, or queried again, because the time limit is not reached.
    pub(crate) fn keeps_waiting(&self, now: Instant) -> bool {
        let waited = now.saturating_duration_since(self.committed);
        let limit = match self.statement {
            Some(_) => CONFIRMING.min(self.timeout / 2),
            None => self.timeout,
        };
        waited < limit
    }

    /// Combines the state according to QMP (`taken`) with the statement on the stream. Returns `None` if the two do not decide
    /// yet.
    pub(crate) fn combine(
        &self,
        taken: QemuGuestState,
    ) -> Option<(DestinationStatement, GuestActivity)> {
        Some(match (taken, self.statement) {
            (QemuGuestState::Ended, _)
            | (QemuGuestState::Unknown, Some(DestinationStatement::Never)) => {
                (DestinationStatement::Never, GuestActivity::Unknown)
            }
            // QEMU also refuses a guest that it runs, if the end of the stream is lost after EOF.
            (QemuGuestState::HasGuest(activity), None | Some(DestinationStatement::Never)) => {
                (DestinationStatement::Runs, activity)
            }
            (QemuGuestState::HasGuest(activity), Some(statement)) => (statement, activity),
            (QemuGuestState::Never, statement) => (
                statement.unwrap_or(DestinationStatement::Never),
                GuestActivity::Unknown,
            ),
            (QemuGuestState::Unknown, _) => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn qmp_and_the_stream_yield_one_statement() {
        use QemuGuestState::{Ended, HasGuest, Never, Unknown};
        let stops = HasGuest(GuestActivity::Stopped);
        let cases = [
            (Ended, None, Some(DestinationStatement::Never)),
            (
                Ended,
                Some(DestinationStatement::Runs),
                Some(DestinationStatement::Never),
            ),
            (stops, None, Some(DestinationStatement::Runs)),
            (
                stops,
                Some(DestinationStatement::Never),
                Some(DestinationStatement::Runs),
            ),
            (
                stops,
                Some(DestinationStatement::HasAll),
                Some(DestinationStatement::HasAll),
            ),
            (Never, None, Some(DestinationStatement::Never)),
            (
                Never,
                Some(DestinationStatement::Runs),
                Some(DestinationStatement::Runs),
            ),
            (
                Unknown,
                Some(DestinationStatement::Never),
                Some(DestinationStatement::Never),
            ),
            (Unknown, Some(DestinationStatement::Runs), None),
            (Unknown, None, None),
        ];
        for (taken, statement, expected) in cases {
            let mut wait = OwnershipWait::new(Instant::now(), TIMEOUT);
            wait.state(statement);
            let judged = wait.combine(taken);
            assert_eq!(judged.map(|it| it.0), expected, "{taken:?} {statement:?}");
            if let (HasGuest(_), Some((_, activity))) = (taken, judged) {
                assert_eq!(activity, GuestActivity::Stopped);
            }
        }
    }

    #[test]
    fn a_statement_is_confirmed_within_its_timeout_and_silence_is_awaited_longer() {
        let now = Instant::now();
        for (timeout, confirmed) in [(TIMEOUT, CONFIRMING), (4000 * MS, 2000 * MS)] {
            let mut wait = OwnershipWait::new(now, timeout);
            assert_eq!(wait.first_wait(), timeout.min(QMP_DELAY));
            assert!(wait.keeps_waiting(now + timeout - MS));
            assert!(!wait.keeps_waiting(now + timeout));
            wait.state(Some(DestinationStatement::Runs));
            wait.state(Some(DestinationStatement::Never));
            assert_eq!(
                wait.statement(),
                Some(DestinationStatement::Runs),
                "the first one stands"
            );
            assert!(wait.keeps_waiting(now + confirmed - MS));
            assert!(!wait.keeps_waiting(now + confirmed));
        }
    }
}
