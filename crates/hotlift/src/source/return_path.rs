//! The thread that listens to the destination: answers, reasons, and sockets that close.
//!
//! It watches all connections, so that a destination that dies is noticed while nothing is being
//! sent. Before the guest is handed over, any closed connection ends the migration. Afterwards the
//! destination answers SHUT(0) on *every* socket once it runs the guest, and the source takes the
//! first: one that is cut or garbled then does no harm. How a connection ended says nothing then.

use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Instant;

use hotlift_wire::handshake::VERSION;
use hotlift_wire::return_path::ReturnMessage;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::session::Session;
use crate::control::Status;
use crate::error::{Channel, MigrationError, printable};
use crate::handover::Word;
use crate::stream::return_path::Messages;
use crate::transport::Stream;

/// How often a quiet destination is thought about.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// What the destination said, or what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// It is a Hotlift.
    Hello,
    /// It has worked through the stream up to the PING with this value.
    Pong(u32),
    /// It has said what became of the guest.
    Word(Word),
    /// Every connection has ended, however it did.
    Gone,
}

/// One connection.
struct Peer<'a> {
    channel: Channel,
    stream: &'a Stream,
    messages: Messages,
    open: bool,
    /// It has brought a reason why the destination gives up.
    explained: bool,
}

/// Listens until every connection is closed; `answers` may be dropped by the other end at any time.
pub(super) fn listen(session: &Session<'_>, answers: &Sender<Answer>) {
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
            explained: false,
        })
        .collect();
    let mut said = Said::default();
    let mut watchdog = Watchdog::new(session);
    while peers.iter().any(|peer| peer.open) {
        for index in readable(&peers) {
            let peer = &mut peers[index];
            if let Err(error) = peer.read(session, answers, &mut said) {
                peer.open = false;
                // After the commit the other sockets still speak; before it, this is the end.
                session.fail(error);
            }
        }
        watchdog.look(session);
    }
    let _ = answers.send(Answer::Gone);
}

/// Ends what no other thread can: a migration thread that is blocked in a write when the migration is
/// cancelled, or while the guest stands still for a destination that takes nothing.
struct Watchdog {
    transferred: u64,
    moved: Instant,
}

impl Watchdog {
    fn new(session: &Session<'_>) -> Self {
        Self {
            transferred: session.counts().transferred_bytes,
            moved: Instant::now(),
        }
    }

    fn look(&mut self, session: &Session<'_>) {
        if session.control.is_cancelled() {
            session.fail(MigrationError::Cancelled);
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

/// What the destination has said so far that it may say only so often.
#[derive(Default)]
struct Said {
    pongs: u64,
    hellos: u64,
}

/// Indexes of the peers that have something to read or have ended.
fn readable(peers: &[Peer<'_>]) -> Vec<usize> {
    let open: Vec<_> = (0..peers.len()).filter(|&i| peers[i].open).collect();
    let mut fds: Vec<_> = open
        .iter()
        .map(|&index| PollFd::new(peers[index].stream, PollFlags::IN))
        .collect();
    // Interrupted, or no memory for the call: to be tried again, by and by.
    if rustix::event::poll(&mut fds, Some(&TICK)).is_err() {
        return Vec::new();
    }
    open.iter()
        .zip(&fds)
        .filter(|(_, fd)| !fd.revents().is_empty())
        .map(|(&index, _)| index)
        .collect()
}

impl Peer<'_> {
    /// Reads what there is; an error means that nothing more will come.
    fn read(
        &mut self,
        session: &Session<'_>,
        answers: &Sender<Answer>,
        said: &mut Said,
    ) -> Result<(), MigrationError> {
        let Self {
            channel,
            stream,
            messages,
            explained,
            ..
        } = self;
        let is_open = messages.read(stream, |message, _| {
            if let Some(answer) = answer(session, *channel, message, explained, said) {
                let _ = answers.send(answer);
            }
        })?;
        if is_open {
            return Ok(());
        }
        Err(MigrationError::Closed { channel: *channel })
    }
}

/// What a message is for the migration thread, if it is for it.
fn answer(
    session: &Session<'_>,
    channel: Channel,
    message: ReturnMessage<'_>,
    explained: &mut bool,
    said: &mut Said,
) -> Option<Answer> {
    match message {
        ReturnMessage::Pong(value) if said.pongs < session.pings.load(Ordering::Acquire) => {
            said.pongs += 1;
            Some(Answer::Pong(value))
        }
        ReturnMessage::Hello { version, accepted } if said.hellos == 0 => {
            said.hellos += 1;
            match accepted {
                Some(accepted) => {
                    session.set_id(accepted.id);
                    Some(Answer::Hello)
                }
                None => {
                    session.fail(MigrationError::other_version(VERSION.into(), version));
                    None
                }
            }
        }
        ReturnMessage::Shut(value) if session.is_committed() => {
            let is_hotlift = session.id().is_some();
            Word::of_shut(value, *explained, is_hotlift).map(Answer::Word)
        }
        ReturnMessage::ErrorText(text) => {
            *explained = true;
            session.explain(printable(text));
            None
        }
        ReturnMessage::Shut(value) => {
            // Only this side ends the guest's life here, so a SHUT before that is a failure
            // whatever its value.
            session.explain(format!("it ended the migration with code {value}"));
            session.fail(MigrationError::Closed { channel });
            None
        }
        other => {
            session.fail(MigrationError::Protocol {
                channel,
                got: format!("{other:?}"),
                doing: "a precopy migration",
            });
            None
        }
    }
}
