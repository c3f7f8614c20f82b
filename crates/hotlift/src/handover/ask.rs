//! The source asks the destination what became of the guest, on a connection of its own.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use hotlift_wire::settle::{ANSWER_LEN, MigrationId, Outcome, heard, question, read_answer};

use super::Word;
use crate::transport::{Address, Stream};

/// How long one attempt may take. Short, so that a network that is back is found soon: a SYN that was lost
/// is sent again by the kernel after 1, 3, 7 … s, a new connection at once.
const ATTEMPT: Duration = Duration::from_millis(1500);

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Asks `to` about `id` until it makes a statement, `other_word` brings one, or `patience` is over.
pub(crate) fn ask(
    to: &Address,
    id: MigrationId,
    patience: Duration,
    other_word: &mut dyn FnMut() -> Option<Word>,
) -> Option<Word> {
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
pub(crate) fn ask_once(to: &Address, id: MigrationId, patience: Duration) -> Option<Word> {
    let stream = to.connect(patience).ok()?;
    stream.set_timeouts(patience).ok()?;
    (&stream).write_all(&question(id)).ok()?;
    let mut answer = [0; ANSWER_LEN];
    (&stream).read_exact(&mut answer).ok()?;
    let word = match read_answer(&answer, id).ok()? {
        Outcome::Runs => Word::Runs,
        Outcome::Never => Word::Never,
        Outcome::Unknown | Outcome::Undecided => return None,
    };
    say_heard(&stream, id);
    Some(word)
}

/// Tells the destination that its word was heard, so that it need not wait for a question. One that does not
/// hear it waits in vain.
pub(crate) fn say_heard(mut stream: &Stream, id: MigrationId) {
    let _ = stream.write_all(&heard(id));
}
