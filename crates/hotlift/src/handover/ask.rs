//! The source asks the destination what became of the guest, on a connection of its own.

use std::io::Write;
use std::time::{Duration, Instant};

use hotlift_wire::settle::{ANSWER_LEN, Doing, MigrationId, Outcome, heard, question, read_answer};

use crate::handover::Word;
use crate::remote::Remote;
use crate::transport::Stream;

/// How long one attempt may take. Short, so that a network that is back is found soon: a SYN that was lost
/// is sent again by the kernel after 1, 3, 7 … s, a new connection at once.
const ATTEMPT: Duration = Duration::from_millis(1500);

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a destination that was told to run the guest may be silent before it is asked on a connection of its
/// own. It has loaded everything by then: some milliseconds are usual.
const ASK_AFTER: Duration = Duration::from_secs(5);

/// How long a destination is told of a migration that ended before the commit.
const FAREWELL: Duration = Duration::from_secs(1);

/// Waits for `patience` for the destination's statement, and for the guest's run state there. The statement comes on the stream,
/// which `on_stream` waits for (up to a time, and less if the stream has ended), or as the answer to a question, where `to_ask`
/// names a peer. Nothing cancels this wait: the guest may run.
pub(crate) fn await_word(
    patience: Duration,
    to_ask: Option<(&Remote, MigrationId)>,
    on_stream: &mut dyn FnMut(Duration) -> Option<(Word, Doing)>,
) -> Option<(Word, Doing)> {
    let committed = Instant::now();
    let silence = to_ask.map_or(patience, |_| patience.min(ASK_AFTER));
    if let Some(word) = on_stream(silence) {
        return Some(word);
    }
    let (to, id) = to_ask?;
    let left = patience.saturating_sub(committed.elapsed());
    ask(to, id, left, &mut || on_stream(Duration::ZERO))
}

/// Of a migration that ended before the commit: a destination that has loaded everything may wait for a source that
/// may have committed, and need not after this.
pub(crate) fn say_farewell(to: &Remote, id: MigrationId) {
    ask_once(to, id, FAREWELL);
}

/// Asks `to` about `id` until it makes a statement, `other_word` brings one, or `patience` is over.
pub(crate) fn ask(
    to: &Remote,
    id: MigrationId,
    patience: Duration,
    other_word: &mut dyn FnMut() -> Option<(Word, Doing)>,
) -> Option<(Word, Doing)> {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(word) = other_word() {
            return Some(word);
        }
        let left = deadline.checked_duration_since(Instant::now())?;
        if let Some(word) = ask_once(to, id, left.min(ATTEMPT)) {
            return Some(word);
        }
        std::thread::sleep(PAUSE.min(deadline.saturating_duration_since(Instant::now())));
    }
}

/// One question. What is no statement (no connection, no answer, "ask again", an answer that is damaged) is
/// `None`.
pub(crate) fn ask_once(to: &Remote, id: MigrationId, patience: Duration) -> Option<(Word, Doing)> {
    let stream = to.connect(patience).ok()?;
    stream.set_timeouts(patience).ok()?;
    (&stream).write_all(&question(id)).ok()?;
    let deadline = Instant::now() + patience;
    let (mut answer, mut length) = ([0; ANSWER_LEN], 0);
    while length < ANSWER_LEN {
        let left = deadline.saturating_duration_since(Instant::now());
        match stream.read_within(&mut answer[length..], left) {
            Ok(read @ 1..) => length += read,
            _ => return None,
        }
    }
    let (outcome, doing) = read_answer(&answer, id).ok()?;
    let word = match outcome {
        Outcome::Runs => Word::Runs,
        Outcome::Never => Word::Never,
        Outcome::HasAll => Word::HasAll,
        Outcome::Unknown | Outcome::Undecided => return None,
    };
    say_heard(&stream, id);
    Some((word, doing))
}

/// Tells the destination that its word was heard, so that it need not wait for a question. One that does not
/// hear it waits in vain.
pub(crate) fn say_heard(mut stream: &Stream, id: MigrationId) {
    let _ = stream.write_all(&heard(id));
}
