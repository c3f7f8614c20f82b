//! State of the guest in a QEMU after the end of its stream, from the QEMU's statement there and from QMP. No I/O and no clock;
//! `ends/stream_sink` carries it out.

use std::time::{Duration, Instant};

use hotlift_wire::settle::Doing;

use crate::handover::Word;

/// Time without a statement after the commit, before QMP is asked.
const LOOK_AFTER: Duration = Duration::from_secs(5);

/// Time limit for a QEMU that claims the guest to confirm its state over QMP. After that its statement counts.
const CONFIRMING: Duration = Duration::from_secs(10);

/// State of the guest at the destination after the commit, according to QMP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The destination has the guest in this state, and keeps it.
    Yes(Doing),
    /// It does not have the guest, and never will: it failed, or its process ended. An earlier statement on the stream that it
    /// has the guest takes precedence.
    Never,
    /// It had the guest, never ran it, and was seen to end.
    Ended,
    /// Not known (yet).
    Unknown,
}

/// The wait for both statements, from the commit on.
#[derive(Debug)]
pub(crate) struct TakenByQemu {
    committed: Instant,
    patience: Duration,
    /// First statement of the QEMU on the stream.
    word: Option<Word>,
}

impl TakenByQemu {
    /// Waits for `patience` at most.
    pub(crate) fn new(committed: Instant, patience: Duration) -> Self {
        Self {
            committed,
            patience,
            word: None,
        }
    }

    /// Returns how long to listen on the stream before QMP is asked for the first time.
    pub(crate) fn first_wait(&self) -> Duration {
        self.patience.min(LOOK_AFTER)
    }

    /// Takes a statement of the stream, if there is one; the first one counts.
    pub(crate) fn state(&mut self, word: Option<Word>) {
        self.word = self.word.or(word);
    }

    /// Returns the statement of the stream.
    pub(crate) fn word(&self) -> Option<Word> {
        self.word
    }

    /// Returns true if QMP should be asked (again).
    pub(crate) fn goes_on(&self, now: Instant) -> bool {
        let waited = now.saturating_duration_since(self.committed);
        let limit = match self.word {
            Some(_) => CONFIRMING.min(self.patience / 2),
            None => self.patience,
        };
        waited < limit
    }

    /// Returns the combined result of both sources; `None` while it is open.
    pub(crate) fn judge(&self, taken: Taken) -> Option<(Word, Doing)> {
        Some(match (taken, self.word) {
            (Taken::Ended, _) | (Taken::Unknown, Some(Word::Never)) => {
                (Word::Never, Doing::Unknown)
            }
            // QEMU also refuses a guest that it runs, if the end of the stream is lost after EOF.
            (Taken::Yes(doing), None | Some(Word::Never)) => (Word::Runs, doing),
            (Taken::Yes(doing), Some(word)) => (word, doing),
            (Taken::Never, word) => (word.unwrap_or(Word::Never), Doing::Unknown),
            (Taken::Unknown, _) => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn qmp_and_the_stream_amount_to_one_statement() {
        use Taken::{Ended, Never, Unknown, Yes};
        let stops = Yes(Doing::Stopped);
        let cases = [
            (Ended, None, Some(Word::Never)),
            (Ended, Some(Word::Runs), Some(Word::Never)),
            (stops, None, Some(Word::Runs)),
            (stops, Some(Word::Never), Some(Word::Runs)),
            (stops, Some(Word::HasAll), Some(Word::HasAll)),
            (Never, None, Some(Word::Never)),
            (Never, Some(Word::Runs), Some(Word::Runs)),
            (Unknown, Some(Word::Never), Some(Word::Never)),
            (Unknown, Some(Word::Runs), None),
            (Unknown, None, None),
        ];
        for (taken, word, expected) in cases {
            let mut wait = TakenByQemu::new(Instant::now(), PATIENCE);
            wait.state(word);
            let judged = wait.judge(taken);
            assert_eq!(judged.map(|it| it.0), expected, "{taken:?} {word:?}");
            if let (Yes(_), Some((_, doing))) = (taken, judged) {
                assert_eq!(doing, Doing::Stopped);
            }
        }
    }

    #[test]
    fn a_statement_is_confirmed_for_its_time_and_silence_is_waited_for_longer() {
        let now = Instant::now();
        for (patience, confirmed) in [(PATIENCE, CONFIRMING), (4000 * MS, 2000 * MS)] {
            let mut wait = TakenByQemu::new(now, patience);
            assert_eq!(wait.first_wait(), patience.min(LOOK_AFTER));
            assert!(wait.goes_on(now + patience - MS));
            assert!(!wait.goes_on(now + patience));
            wait.state(Some(Word::Runs));
            wait.state(Some(Word::Never));
            assert_eq!(wait.word(), Some(Word::Runs), "the first one stands");
            assert!(wait.goes_on(now + confirmed - MS));
            assert!(!wait.goes_on(now + confirmed));
        }
    }
}
