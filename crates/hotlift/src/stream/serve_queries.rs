//! Serves a destination's listener: during a migration, and afterwards until the source knows the outcome.

use std::time::{Duration, Instant};

use hotlift_net::admission::Admitted;
use hotlift_net::transport::Stream;
use rustix::event::PollFlags;

use crate::handover::settle::{AnswerPeriod, Confirmation};
use crate::life::Life;
use crate::stream::accept_loop::{AcceptLoop, QuerySubject};

/// Pause before the next attempt, after an error of the listener (for example no free file descriptors).
const RETRY: Duration = Duration::from_millis(100);

/// Size in bytes of one read of the data that a source sends after its commit.
const READ: usize = 4 << 10;

/// Callback that takes additional connections of the migration out of the list of arrivals.
pub(crate) type LateConnectionHandler<'f> = &'f dyn Fn(&mut AcceptLoop<'_>, &mut Vec<Admitted>);

/// Answers outcome queries and rejects unknown clients, until the peer of `stop` sends data or closes. Calls `further` after
/// each event, and at least once per `every`.
pub(crate) fn serve_queries(
    accept_loop: &mut AcceptLoop<'_>,
    asked: &QuerySubject<'_>,
    stop: &Stream,
    (every, further): (Duration, LateConnectionHandler<'_>),
) {
    loop {
        match accept_loop.step(every, &[(stop, PollFlags::IN)], Some(asked)) {
            Ok((mut arrivals, stopped)) => {
                further(accept_loop, &mut arrivals);
                accept_loop.keep(arrivals);
                if stopped {
                    return;
                }
            }
            Err(_) if stop.is_hung_up() => return,
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// A connection of the migration on which the source may confirm that it knows the outcome of the handover.
struct LingeringConnection<'a> {
    stream: &'a Stream,
    last: Confirmation,
    open: bool,
}

/// Answers outcome queries until the source confirms that it knows the outcome. The source confirms on one of `streams`, or
/// after a query. Also returns once the source can no longer ask ([`AnswerPeriod`]). `read_ahead` are bytes already read from
/// the first stream.
pub(crate) fn linger(
    accept_loop: &mut AcceptLoop<'_>,
    asked: &QuerySubject<'_>,
    streams: &[&Stream],
    read_ahead: &[u8],
    timeout: Duration,
    life: &Life,
) {
    let mut period = AnswerPeriod::new(Instant::now(), timeout);
    let mut connections: Vec<_> = streams
        .iter()
        .map(|stream| LingeringConnection {
            stream,
            last: Confirmation::default(),
            open: true,
        })
        .collect();
    if let Some(first) = connections.first_mut() {
        first.record(read_ahead, asked);
    }
    while asked.destination_handover.may_be_asked()
        && let Some(left) = period.left(Instant::now(), life.is_cancelled())
    {
        let open = connections.iter().filter(|connection| connection.open);
        let watched: Vec<_> = open
            .map(|connection| (connection.stream, PollFlags::IN))
            .collect();
        match accept_loop.step(left, &watched, Some(asked)) {
            Ok((arrivals, on_streams)) => {
                accept_loop.keep(arrivals);
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

impl LingeringConnection<'_> {
    /// Reads all data that has arrived, and records a confirmation.
    fn read(&mut self, asked: &QuerySubject<'_>) {
        let mut bytes = [0; READ];
        while self.open && matches!(self.stream.wait_readable(Duration::ZERO), Ok(true)) {
            match self.stream.read_some(&mut bytes) {
                Ok(read @ 1..) => self.record(&bytes[..read], asked),
                _ => self.open = false,
            }
        }
    }

    fn record(&mut self, bytes: &[u8], asked: &QuerySubject<'_>) {
        if self.last.take(bytes, asked.id) {
            asked.destination_handover.record_confirmation();
        }
    }
}

#[cfg(test)]
mod tests {
    use hotlift_net::transport::Address;

    use super::*;
    use crate::handover::{DestinationHandover, DestinationStatement, query_once};
    use crate::remote::Remote;
    use crate::stream::rejections::Rejections;
    use hotlift_wire::settle::{GuestActivity, MigrationId};

    #[test]
    fn a_cancelled_destination_still_answers_queries_of_the_outcome() {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix {
            path: folder.path().join("socket"),
        };
        let listener = address.listen().unwrap();
        let life = Life::default();
        let destination_handover = DestinationHandover::new(1, &life);
        assert!(destination_handover.loaded() && destination_handover.commit());
        destination_handover.record_activity(GuestActivity::Rests);
        destination_handover.record_run();
        life.cancel();
        let asked = QuerySubject {
            id: MigrationId([7; 16]),
            destination_handover: &destination_handover,
            refuse: &|| (),
        };
        let timeout = Duration::from_secs(5);
        let mut accept_loop = AcceptLoop::new(
            &listener,
            None,
            None,
            timeout,
            (&Rejections::default(), &life),
        )
        .unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| linger(&mut accept_loop, &asked, &[], &[], timeout * 12, &life));
            let to = Remote::new(&address, None);
            let word = query_once(&to, asked.id, timeout);
            assert_eq!(
                word,
                Some((DestinationStatement::Runs, GuestActivity::Rests))
            );
        });
        assert!(!destination_handover.may_be_asked(), "it was confirmed");
    }
}
