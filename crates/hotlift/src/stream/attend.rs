//! The destination answers for a migration: while it is under way, and until its source knows the outcome.

use std::time::{Duration, Instant};

use hotlift_wire::settle::{HEARD_LEN, heard};
use rustix::event::PollFlags;

use crate::life::Life;
use crate::stream::door::{Arrival, Asked, Door};
use crate::transport::Stream;

/// After an error of the listener (no file descriptors are left, for one), which goes on.
const RETRY: Duration = Duration::from_millis(100);

/// Bytes read at once of what a source sends behind its commit.
const READ: usize = 4 << 10;

/// Takes what else is the migration's out of what has come at the door.
pub(crate) type Further<'f> = &'f dyn Fn(&mut Door<'_>, &mut Vec<Arrival>);

/// Answers questions and turns strangers away until the other end of `stop` is closed. `further` takes what else is the
/// migration's out of what has come; it is called after each event, and at least `every` so often.
pub(crate) fn attend(
    door: &mut Door<'_>,
    asked: &Asked<'_>,
    stop: &Stream,
    (every, further): (Duration, Further<'_>),
) {
    loop {
        match door.step(every, &[(stop, PollFlags::IN)], Some(asked)) {
            Ok((mut arrivals, stopped)) => {
                further(door, &mut arrivals);
                door.keep(arrivals);
                if stopped {
                    return;
                }
            }
            Err(_) if stop.is_hung_up() => return,
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// A connection of the migration on which the source may say that it knows the outcome.
struct Lingering<'a> {
    stream: &'a Stream,
    /// The last bytes that came.
    last: Vec<u8>,
    open: bool,
}

/// How long a destination that is cancelled still answers: a source that has lost its connections asks at once, and
/// keeps its guest paused without an answer.
const CALLED_OFF: Duration = Duration::from_secs(10);

/// Answers until the source has said, on one of `streams` or after a question, that it knows the outcome; until
/// it cannot ask any more, which is after `patience`, or [`CALLED_OFF`] after a cancel. `read_ahead` was read of the
/// first stream before.
pub(crate) fn linger(
    door: &mut Door<'_>,
    asked: &Asked<'_>,
    streams: &[&Stream],
    read_ahead: &[u8],
    patience: Duration,
    life: &Life,
) {
    let begun = Instant::now();
    let mut patience = patience;
    let mut cancelled_at = None;
    let mut connections: Vec<_> = streams
        .iter()
        .map(|stream| Lingering {
            stream,
            last: Vec::new(),
            open: true,
        })
        .collect();
    if let Some(first) = connections.first_mut() {
        first.note(read_ahead, asked);
    }
    while asked.taking.may_be_asked() && begun.elapsed() < patience {
        if life.is_cancelled() {
            let since = *cancelled_at.get_or_insert_with(|| begun.elapsed());
            patience = patience.min(since + CALLED_OFF);
        }
        let open = connections.iter().filter(|connection| connection.open);
        let watched: Vec<_> = open
            .map(|connection| (connection.stream, PollFlags::IN))
            .collect();
        let left = patience.saturating_sub(begun.elapsed());
        match door.step(left, &watched, Some(asked)) {
            Ok((arrivals, on_streams)) => {
                door.keep(arrivals);
                if on_streams {
                    connections
                        .iter_mut()
                        .for_each(|connection| connection.read(asked));
                }
            }
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

impl Lingering<'_> {
    /// Takes in what has come.
    fn read(&mut self, asked: &Asked<'_>) {
        let mut bytes = [0; READ];
        while self.open && matches!(self.stream.wait_readable(Duration::ZERO), Ok(true)) {
            match self.stream.read_some(&mut bytes) {
                Ok(read @ 1..) => self.note(&bytes[..read], asked),
                _ => self.open = false,
            }
        }
    }

    /// The word is the last that a source says; what comes before it is nobody's concern any more.
    fn note(&mut self, bytes: &[u8], asked: &Asked<'_>) {
        self.last.extend_from_slice(bytes);
        let excess = self.last.len().saturating_sub(HEARD_LEN);
        self.last.drain(..excess);
        if self.last == heard(asked.id) {
            asked.taking.note_heard();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::Taking;
    use crate::handover::Word;
    use crate::handover::ask::ask;
    use crate::remote::Remote;
    use crate::stream::strangers::Strangers;
    use crate::transport::{Acceptor, Address};
    use hotlift_wire::settle::{Doing, MigrationId};

    #[test]
    fn a_destination_that_is_cancelled_still_says_what_became_of_the_guest() {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix {
            path: folder.path().join("socket"),
        };
        let listener = address.listen().unwrap();
        let life = Life::default();
        let taking = Taking::new(1, &life);
        assert!(taking.loaded() && taking.commit());
        taking.note_doing(Doing::Rests);
        taking.taken();
        life.cancel();
        let asked = Asked {
            id: MigrationId([7; 16]),
            taking: &taking,
            refuse: &|| (),
        };
        let patience = CALLED_OFF / 2;
        let mut door = Door::new(
            Acceptor::new(&listener, None).unwrap(),
            None,
            patience,
            &Strangers::default(),
            &life,
        )
        .unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| linger(&mut door, &asked, &[], &[], CALLED_OFF * 6, &life));
            let to = Remote::new(&address, None);
            let word = ask(&to, asked.id, patience, &mut || None);
            assert_eq!(word, Some((Word::Runs, Doing::Rests)));
        });
        assert!(!taking.may_be_asked(), "it was heard");
    }
}
