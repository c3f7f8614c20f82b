//! Outcome queries of the source about its guest, each on a separate connection to the destination.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_net::transport::Stream;
use hotlift_wire::settle::{ANSWER_LEN, GuestActivity, MigrationId, confirmation, question};

use crate::handover::DestinationStatement;
use crate::handover::settle::{Question, Step, statement};
use crate::remote::Remote;

/// Time limit for informing the destination that the migration ended before the commit.
const NOT_COMMITTED_TIMEOUT: Duration = Duration::from_secs(1);

/// Waits up to `timeout` for the destination's statement, and returns it with the guest's run state; `None` without a
/// statement.
///
/// The statement arrives on the stream or, if `to_ask` names a peer, as the answer to an outcome query. `on_stream` waits up to
/// the given time for a statement on the stream, and returns early if the stream has ended. Nothing cancels this wait, because
/// the guest may run.
pub(crate) fn await_statement(
    timeout: Duration,
    to_ask: Option<(&Remote, MigrationId)>,
    on_stream: &mut dyn FnMut(Duration) -> Option<(DestinationStatement, GuestActivity)>,
) -> Option<(DestinationStatement, GuestActivity)> {
    let mut question = Question::after_commit(Instant::now(), timeout, to_ask.is_some());
    while let Some(step) = question.next(Instant::now()) {
        let statement = match step {
            Step::Listen(wait) => on_stream(wait),
            Step::Ask(within) => to_ask.and_then(|(to, id)| query_once(to, id, within)),
            Step::Pause(wait) => {
                thread::sleep(wait);
                on_stream(Duration::ZERO)
            }
        };
        if statement.is_some() {
            return statement;
        }
    }
    None
}

/// Informs the destination that the migration ended before the commit. Otherwise a destination that has loaded everything would
/// wait for the commit.
pub(crate) fn notify_not_committed(to: &Remote, id: MigrationId) {
    query_once(to, id, NOT_COMMITTED_TIMEOUT);
}

/// Sends one outcome query, and returns the statement in the answer. Returns `None` without a connection, without an answer in
/// time, or without a statement in the answer.
pub(crate) fn query_once(
    to: &Remote,
    id: MigrationId,
    timeout: Duration,
) -> Option<(DestinationStatement, GuestActivity)> {
    let stream = to.connect(timeout).ok()?;
    stream.set_timeouts(timeout).ok()?;
    (&stream).write_all(&question(id)).ok()?;
    let deadline = Instant::now() + timeout;
    let (mut answer, mut length) = ([0; ANSWER_LEN], 0);
    while length < ANSWER_LEN {
        let left = deadline.saturating_duration_since(Instant::now());
        match stream.read_within(&mut answer[length..], left) {
            Ok(read @ 1..) => length += read,
            _ => return None,
        }
    }
    let statement = statement(&answer, id);
    if statement.is_some() {
        confirm_outcome(&stream, id);
    }
    statement
}

/// Confirms to the destination that its statement arrived. Without the confirmation, the destination keeps waiting for
/// questions.
pub(crate) fn confirm_outcome(mut stream: &Stream, id: MigrationId) {
    let _ = stream.write_all(&confirmation(id));
}
