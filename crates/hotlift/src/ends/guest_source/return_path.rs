//! The thread that listens to the destination: answers, reasons, and sockets that close.
//!
//! It watches all connections, so that a destination that dies is noticed while nothing is being
//! sent. Before the guest is handed over, any closed connection ends the migration. Afterwards the
//! destination answers SHUT(0) on *every* socket once it runs the guest, and the source takes the
//! first: one that is cut or garbled then does no harm. How a connection ended says nothing then.
//!
//! In postcopy it takes the requests for pages, which come on main; the end of main is then that of the connection.

use std::time::{Duration, Instant};

use hotlift_wire::return_path::ReturnMessage;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::ends::guest_source::session::Session;
use crate::error::{Channel, MigrationError};
use crate::liveness::Liveness;
use crate::status::Status;
use crate::stream::return_path::{EndsAnswers, Messages};
use crate::transport::Stream;

/// How often a quiet destination is thought about.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// One connection.
struct Peer<'a> {
    channel: Channel,
    stream: &'a Stream,
    messages: Messages,
    open: bool,
    /// RAM block of the last request for pages.
    asked_block: Option<usize>,
}

/// Listens until every connection is closed.
pub(crate) fn listen(session: &Session<'_>) {
    let _ends = EndsAnswers(&session.answers);
    let channel_of = |index: usize| match u8::try_from(index) {
        Ok(index) if index > 0 => Channel::Multifd(index - 1),
        Ok(_) => Channel::Main,
        Err(_) => Channel::Multifd(u8::MAX - 1),
    };
    let mut peers: Vec<_> = session
        .streams()
        .enumerate()
        .map(|(index, stream)| Peer {
            channel: channel_of(index),
            stream,
            messages: Messages::new(channel_of(index)),
            open: true,
            asked_block: None,
        })
        .collect();
    let mut watchdog = Watchdog::new(session);
    while peers.iter().any(|peer| peer.open) {
        for index in readable(&peers) {
            let peer = &mut peers[index];
            if let Err(error) = peer.read(session) {
                peer.open = false;
                match session.ledger.get() {
                    // Requests come on main alone.
                    Some(_) if peer.channel == Channel::Main => session.lose(error),
                    // After the commit the other sockets still speak; before it, this is the end.
                    _ => session.fail(error),
                }
            }
        }
        watchdog.look(session);
    }
}

/// Ends what no other thread can: a migration thread that is blocked in a write when the migration is
/// cancelled, while the guest stands still for a destination that takes nothing, or by the loss of the other host.
struct Watchdog {
    liveness: Liveness,
    transferred: u64,
    moved: Instant,
}

impl Watchdog {
    fn new(session: &Session<'_>) -> Self {
        Self {
            liveness: Liveness::new(session.options.silence_timeout, session.streams()),
            transferred: session.counts().transferred_bytes,
            moved: Instant::now(),
        }
    }

    fn look(&mut self, session: &Session<'_>) {
        if session.control.is_cancelled() {
            session.fail(MigrationError::Cancelled);
        }
        let streams = session.streams();
        let looked = self.liveness.look_for(&session.control, streams);
        // In postcopy the connection may be lost, and others take its place.
        if let Err(error) = looked
            && session.ledger.get().is_none()
        {
            session.fail(error);
        }
        let transferred = session.counts().transferred_bytes;
        if transferred != self.transferred || session.control.status() != Status::Device {
            self.transferred = transferred;
            self.moved = Instant::now();
        }
        let limit = session.options.handshake_timeout;
        if self.moved.elapsed() > limit {
            session.fail(MigrationError::Timeout {
                waiting_for: "any progress while the guest stands still".to_owned(),
                waited: limit,
            });
        }
    }
}

/// Indexes of the peers that have something to read or have ended.
fn readable(peers: &[Peer<'_>]) -> Vec<usize> {
    let open: Vec<_> = (0..peers.len()).filter(|&i| peers[i].open).collect();
    let mut fds: Vec<_> = open
        .iter()
        .map(|&index| PollFd::new(peers[index].stream, PollFlags::IN))
        .collect();
    let decrypted = |index: &usize| peers[*index].stream.has_plaintext();
    if open.iter().any(decrypted) {
        return open.into_iter().filter(decrypted).collect();
    }
    // Interrupted, or no memory for the call: to be tried again, by and by.
    if rustix::event::poll(&mut fds, Some(&TICK)).is_err() {
        return Vec::new();
    }
    // A part of a record would block whoever reads it, and this thread has more to look after.
    let answers = |stream: &Stream| {
        stream.is_plain() || !matches!(stream.wait_readable(Duration::ZERO), Ok(false))
    };
    open.iter()
        .zip(&fds)
        .filter(|(index, fd)| !fd.revents().is_empty() && answers(peers[**index].stream))
        .map(|(&index, _)| index)
        .collect()
}

impl Peer<'_> {
    /// Reads what there is; an error means that nothing more will come.
    fn read(&mut self, session: &Session<'_>) -> Result<(), MigrationError> {
        let channel = self.channel;
        let answers = &session.answers;
        let asked_block = &mut self.asked_block;
        let is_open = self.messages.read(self.stream, answers, |message, _| {
            if let (Channel::Main, Some(ledger)) = (channel, session.ledger.get()) {
                ledger.note(asked_block, &message, Instant::now())?;
            }
            if let (ReturnMessage::Load(load), Some(auto)) = (&message, session.multifd.auto()) {
                auto.destination(load);
                return Ok(());
            }
            if session.giving.is_committed() {
                // The word may still come behind it.
                return Ok(());
            }
            Err(match (message, answers.next_pong()) {
                (ReturnMessage::Pong(pong), Some(ping)) => MigrationError::Mismatch {
                    what: "the value of PING and PONG".to_owned(),
                    source_has: format!("{ping:#x}"),
                    destination_has: format!("{pong:#x}"),
                },
                (other, _) => MigrationError::Protocol {
                    channel,
                    got: format!("{other:?}"),
                    doing: "a precopy migration",
                },
            })
        })?;
        match is_open {
            true => Ok(()),
            false => Err(MigrationError::Closed { channel }),
        }
    }
}
