//! The destination serves its listener during a migration, and until its source knows the outcome.

use std::time::{Duration, Instant};

use hotlift_net::admission::Admitted;
use hotlift_net::transport::Stream;
use rustix::event::PollFlags;

use crate::handover::settle::{AnswerPeriod, Confirmation};
use crate::life::Life;
use crate::stream::door::{Asked, Door};

/// Pause after an error of the listener (for example no file descriptors left), before the next attempt.
const RETRY: Duration = Duration::from_millis(100);

/// Size of one read of the data that a source sends after its commit.
const READ: usize = 4 << 10;

/// Callback that takes further connections of the migration out of the arrivals.
pub(crate) type Further<'f> = &'f dyn Fn(&mut Door<'_>, &mut Vec<Admitted>);

/// Answers queries and rejects unknown clients until the peer of `stop` closes. Calls `further` after each event, and at least
/// once per `every`.
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

/// A connection of the migration on which the source may confirm that it knows the outcome.
struct Lingering<'a> {
    stream: &'a Stream,
    last: Confirmation,
    open: bool,
}

/// Answers queries until the source confirms that it knows the outcome (on `streams` or after a query), or until it can no
/// longer ask ([`AnswerPeriod`]). `read_ahead` holds bytes already read from the first stream.
pub(crate) fn linger(
    door: &mut Door<'_>,
    asked: &Asked<'_>,
    streams: &[&Stream],
    read_ahead: &[u8],
    patience: Duration,
    life: &Life,
) {
    let mut period = AnswerPeriod::new(Instant::now(), patience);
    let mut connections: Vec<_> = streams
        .iter()
        .map(|stream| Lingering {
            stream,
            last: Confirmation::default(),
            open: true,
        })
        .collect();
    if let Some(first) = connections.first_mut() {
        first.note(read_ahead, asked);
    }
    while asked.taking.may_be_asked()
        && let Some(left) = period.left(Instant::now(), life.is_cancelled())
    {
        let open = connections.iter().filter(|connection| connection.open);
        let watched: Vec<_> = open
            .map(|connection| (connection.stream, PollFlags::IN))
            .collect();
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
    /// Reads what has arrived.
    fn read(&mut self, asked: &Asked<'_>) {
        let mut bytes = [0; READ];
        while self.open && matches!(self.stream.wait_readable(Duration::ZERO), Ok(true)) {
            match self.stream.read_some(&mut bytes) {
                Ok(read @ 1..) => self.note(&bytes[..read], asked),
                _ => self.open = false,
            }
        }
    }

    fn note(&mut self, bytes: &[u8], asked: &Asked<'_>) {
        if self.last.take(bytes, asked.id) {
            asked.taking.note_heard();
        }
    }
}

#[cfg(test)]
mod tests {
    use hotlift_net::transport::Address;

    use super::*;
    use crate::handover::{Taking, Word, ask_once};
    use crate::remote::Remote;
    use crate::stream::strangers::Strangers;
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
        let patience = Duration::from_secs(5);
        let mut door = Door::new(
            &listener,
            None,
            None,
            patience,
            (&Strangers::default(), &life),
        )
        .unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| linger(&mut door, &asked, &[], &[], patience * 12, &life));
            let to = Remote::new(&address, None);
            let word = ask_once(&to, asked.id, patience);
            assert_eq!(word, Some((Word::Runs, Doing::Rests)));
        });
        assert!(!taking.may_be_asked(), "it was heard");
    }
}
