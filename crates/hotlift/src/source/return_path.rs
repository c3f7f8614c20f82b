//! The thread that listens to the destination: answers, reasons, and sockets that close.
//!
//! It watches all connections, so that a destination that dies is noticed while nothing is being
//! sent. Before the guest is handed over, any closed connection ends the migration. Afterwards the
//! destination answers SHUT(0) on *every* socket once it runs the guest, and the source takes the
//! first: one that is cut or garbled then does no harm. A Hotlift that runs the guest says so on all
//! sockets before it closes any, so that all closed without a word means that it does not run there.

use std::io::Read;
use std::sync::mpsc::Sender;

use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{WireError, limits};
use rustix::event::{PollFd, PollFlags};

use super::session::Session;
use crate::error::{Channel, MigrationError};
use crate::transport::Stream;

/// What the destination said, or what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// It is a Hotlift.
    Hello,
    /// It has worked through the stream up to the PING with this value.
    Pong(u32),
    /// It runs the guest.
    Running,
    /// Every connection is closed, and it never said that it runs the guest.
    Gone,
    /// Every connection is gone, one of them by time-out: nobody knows.
    Lost,
}

/// One connection and the bytes of a message that is not complete.
struct Peer<'a> {
    channel: Channel,
    stream: &'a Stream,
    pending: Vec<u8>,
    open: bool,
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
            pending: Vec::with_capacity(limits::RETURN_PATH_PAYLOAD),
            open: true,
        })
        .collect();
    let mut timed_out = false;
    while peers.iter().any(|peer| peer.open) {
        for index in readable(&peers) {
            let peer = &mut peers[index];
            if let Err(error) = peer.read(session, answers) {
                peer.open = false;
                timed_out |= error.kind() == std::io::ErrorKind::TimedOut;
                if !session.is_committed() {
                    session.fail(if error.kind() == std::io::ErrorKind::UnexpectedEof {
                        MigrationError::Closed {
                            channel: peer.channel,
                        }
                    } else {
                        MigrationError::Connection {
                            channel: peer.channel,
                            doing: "listening to the destination",
                            source: error,
                        }
                    });
                }
            }
        }
    }
    let _ = answers.send(if timed_out {
        Answer::Lost
    } else {
        Answer::Gone
    });
}

/// Indexes of the peers that have something to read or have ended.
fn readable(peers: &[Peer<'_>]) -> Vec<usize> {
    let open: Vec<_> = (0..peers.len()).filter(|&i| peers[i].open).collect();
    let mut fds: Vec<_> = open
        .iter()
        .map(|&index| PollFd::new(peers[index].stream, PollFlags::IN))
        .collect();
    if rustix::event::poll(&mut fds, None).is_err() {
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
    fn read(&mut self, session: &Session<'_>, answers: &Sender<Answer>) -> std::io::Result<()> {
        let mut buffer = [0; 1024];
        let read = (&*self.stream).read(&mut buffer)?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.pending.extend_from_slice(&buffer[..read]);
        loop {
            let (answer, used) = match ReturnMessage::decode(&self.pending) {
                Err(WireError::Truncated { .. }) => return Ok(()),
                Err(source) => {
                    // After the hand-over the other sockets still speak; before it, this is the end.
                    if !session.is_committed() {
                        session.fail(MigrationError::Wire {
                            channel: self.channel,
                            source,
                        });
                    }
                    return Err(std::io::ErrorKind::InvalidData.into());
                }
                Ok((message, used)) => (self.answer(session, message), used),
            };
            if let Some(answer) = answer {
                let _ = answers.send(answer);
            }
            self.pending.drain(..used);
        }
    }

    fn answer(&self, session: &Session<'_>, message: ReturnMessage<'_>) -> Option<Answer> {
        match message {
            ReturnMessage::Pong(value) => Some(Answer::Pong(value)),
            ReturnMessage::Hello(_) => Some(Answer::Hello),
            ReturnMessage::Shut(0) if session.is_committed() => Some(Answer::Running),
            ReturnMessage::ErrorText(text) => {
                let reason: String = text.chars().filter(|c| !c.is_control()).collect();
                session.explain(MigrationError::Destination { reason });
                None
            }
            ReturnMessage::Shut(value) => {
                // Only this side ends the guest's life here, so a SHUT before that is a failure
                // whatever its value.
                if !session.is_committed() {
                    session.explain(MigrationError::Destination {
                        reason: format!("it ended the migration with code {value}"),
                    });
                    session.fail(MigrationError::Closed {
                        channel: self.channel,
                    });
                }
                None
            }
            other => {
                if !session.is_committed() {
                    session.fail(MigrationError::Protocol {
                        channel: self.channel,
                        got: format!("{other:?}"),
                        doing: "a precopy migration",
                    });
                }
                None
            }
        }
    }
}
