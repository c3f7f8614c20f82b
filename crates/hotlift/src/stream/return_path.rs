//! Receiving end of the return path: reads the destination's messages, and keeps their current state.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use hotlift_methods::AUTO;
use hotlift_net::transport::Stream;
use hotlift_tls::ALERT_BEGINS;
use hotlift_wire::handshake::{Accepted, Features, Offer, VERSION};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::{GuestActivity, MigrationId};
use hotlift_wire::{WireError, limits};
use rustix::event::{PollFd, PollFlags};

use crate::error::{Channel, MigrationError, printable};
use crate::handover::DestinationStatement;
use crate::life::wait_mutex::WaitMutex;
use crate::life::{LONG, Life};
use crate::stream::handshake;

/// Reads and decodes the messages of one connection.
#[derive(Debug)]
pub(crate) struct Messages {
    channel: Channel,
    /// Bytes that were read, but not decoded yet: an incomplete message at the end.
    pending: Vec<u8>,
    /// True if `pending` may contain complete messages.
    has_more: bool,
    /// True once the destination has sent the reason of its failure on this connection.
    explained: bool,
}

impl Messages {
    pub(crate) fn new(channel: Channel) -> Self {
        Self {
            channel,
            pending: Vec::with_capacity(2 * limits::RETURN_PATH_PAYLOAD),
            has_more: false,
            explained: false,
        }
    }

    /// Starts with `bytes`, which another reader has read from the connection but not processed.
    pub(crate) fn begin_with(&mut self, bytes: Vec<u8>) {
        self.has_more = !bytes.is_empty();
        self.pending = bytes;
    }

    /// Waits for data, and records every complete message in `answers`. Calls `others` with a message that is for another
    /// reader, and with its bytes. Returns false at the end of the connection.
    ///
    /// # Errors
    /// [`MigrationError::Connection`], [`MigrationError::Wire`] for an invalid message, and the errors of `answers` and
    /// `others`. After an error the connection must not be read.
    pub(crate) fn read(
        &mut self,
        stream: &Stream,
        answers: &Answers,
        mut others: impl FnMut(ReturnMessage<'_>, &[u8]) -> Result<(), MigrationError>,
    ) -> Result<bool, MigrationError> {
        let mut is_open = true;
        if !std::mem::take(&mut self.has_more) {
            let mut here = [0; limits::RETURN_PATH_PAYLOAD];
            let read = read_when_there(stream, &mut here).map_err(|source| {
                MigrationError::Connection {
                    channel: self.channel,
                    doing: "receiving from the destination",
                    source,
                }
            })?;
            self.pending.extend_from_slice(&here[..read]);
            is_open = read > 0;
        }
        // The bytes are not a message, but a TLS alert: the peer expected a TLS handshake.
        if self.pending.starts_with(&ALERT_BEGINS) {
            return Err(MigrationError::SpeaksTls);
        }
        let mut taken = 0;
        loop {
            match ReturnMessage::decode(&self.pending[taken..]) {
                Ok((message, length)) => {
                    let bytes = &self.pending[taken..taken + length];
                    self.explained |= matches!(message, ReturnMessage::ErrorText(_));
                    if !answers.take(&message, self.explained)? {
                        others(message, bytes)?;
                    }
                    taken += length;
                }
                Err(WireError::Truncated { .. }) => break,
                Err(source) => {
                    return Err(MigrationError::Wire {
                        channel: self.channel,
                        source,
                    });
                }
            }
        }
        self.pending.drain(..taken);
        Ok(is_open)
    }
}

/// A connection from which messages are read.
struct Peer<'s> {
    stream: &'s Stream,
    messages: Messages,
    is_open: bool,
}

/// Reads messages from `streams` (main before the multifd channels) until all have ended. Calls `others` with messages for
/// another reader. If a connection ends early, calls `lost` with the reason, before any wait for an answer ends.
pub(crate) fn listen<'s>(
    streams: impl Iterator<Item = &'s Stream>,
    answers: &Answers,
    mut others: impl FnMut(Channel, &ReturnMessage<'_>, &[u8]) -> Result<(), MigrationError>,
    mut lost: impl FnMut(Channel, MigrationError),
) {
    let _ends = AnswersGuard(answers);
    let channels = std::iter::once(Channel::Main).chain((0..=u8::MAX).map(Channel::Multifd));
    let mut peers: Vec<_> = streams
        .zip(channels)
        .map(|(stream, channel)| Peer {
            stream,
            messages: Messages::new(channel),
            is_open: true,
        })
        .collect();
    while !peers.is_empty() {
        for index in readable(&peers) {
            let Peer {
                stream,
                messages,
                is_open,
            } = &mut peers[index];
            let channel = messages.channel;
            let read = messages.read(stream, answers, |message, bytes| {
                others(channel, &message, bytes)
            });
            let ended = match read {
                Ok(true) => continue,
                Ok(false) => answers.ended(MigrationError::Closed { channel }),
                Err(error @ MigrationError::Connection { .. }) => answers.ended(error),
                Err(error) => Err(error),
            };
            *is_open = false;
            if let Err(error) = ended {
                lost(channel, error);
            }
        }
        peers.retain(|peer| peer.is_open);
    }
}

/// Waits until at least one connection has data or has ended. Returns the indexes of these connections.
fn readable(peers: &[Peer<'_>]) -> Vec<usize> {
    if let [_] = peers {
        // With one connection no wait is needed here, because its read blocks.
        return vec![0];
    }
    let all = 0..peers.len();
    let decrypted = |index: &usize| peers[*index].stream.has_plaintext();
    if all.clone().any(|index| decrypted(&index)) {
        return all.filter(decrypted).collect();
    }
    let fds = peers
        .iter()
        .map(|peer| PollFd::new(peer.stream, PollFlags::IN));
    let mut fds: Vec<_> = fds.collect();
    // The wait was interrupted, or the kernel has no memory for it: the caller retries.
    if rustix::event::poll(&mut fds, None).is_err() {
        return Vec::new();
    }
    // Excludes a partial TLS record, because its read would block while other connections have data.
    let answers = |stream: &Stream| {
        stream.is_plain() || !matches!(stream.wait_readable(Duration::ZERO), Ok(false))
    };
    all.filter(|index| !fds[*index].revents().is_empty() && answers(peers[*index].stream))
        .collect()
}

/// Reads from a connection that another thread writes to. Waits with `poll` first: Linux wakes a thread that blocks in a read
/// of a UNIX socket whenever the peer reads in the other direction. That was 27,000 wake-ups per GiB, or 0.1 s of CPU time. A
/// thread in `poll` is not woken.
fn read_when_there(stream: &Stream, into: &mut [u8]) -> io::Result<usize> {
    while !stream.wait_readable(LONG)? {}
    stream.read_some(into)
}

#[derive(Debug, Default)]
struct ReceivedMessages {
    /// Features that a Hotlift destination accepts, and the id that it gave the migration. The first message counts; later ones
    /// are ignored.
    accepted: Option<Accepted>,
    /// Values of PINGs that the destination has not answered yet, the oldest first.
    unanswered: VecDeque<u32>,
    /// True after the commit. Then SHUT is a statement about the guest. Before the commit, SHUT only ends the migration.
    is_committed: bool,
    /// True in postcopy. Then a SHUT without an error message proves nothing: a guest that already ran also causes one.
    is_postcopy: bool,
    statement: Option<DestinationStatement>,
    /// State of the guest at the destination.
    doing: GuestActivity,
    /// The destination's reason for a failure; `None` if it has sent none.
    reason: Option<String>,
    /// True once all connections have ended, so that no more messages can arrive.
    ended: bool,
    /// True once another thread has ended the migration.
    aborted: bool,
}

/// Messages that the destination has sent. The reader thread records them, and the main thread waits for them.
#[derive(Debug)]
pub(crate) struct Answers(WaitMutex<ReceivedMessages>);

impl Answers {
    /// Creates the state before the first message. Changes of `life` end its waits.
    pub(crate) fn new(life: &Life) -> Self {
        Self(WaitMutex::new(life, ReceivedMessages::default()))
    }

    fn lock(&self) -> MutexGuard<'_, ReceivedMessages> {
        self.0.lock()
    }

    fn record(&self, change: impl FnOnce(&mut ReceivedMessages)) {
        self.0.change(change);
    }

    /// Waits, for at most `timeout`, while `waits` returns true.
    fn wait_while(
        &self,
        timeout: Duration,
        waits: impl Fn(&ReceivedMessages) -> bool,
    ) -> MutexGuard<'_, ReceivedMessages> {
        let deadline = Instant::now().checked_add(timeout);
        let keep_waiting = || Ok::<_, Infallible>(());
        let over = |received: &mut ReceivedMessages| (!waits(received)).then_some(());
        let Ok(_) = self.0.wait_until(deadline, keep_waiting, over);
        self.lock()
    }

    /// Registers a PING with the value `ping`. The caller must send it next.
    pub(crate) fn ask(&self, ping: u32) {
        self.record(|received| received.unanswered.push_back(ping));
    }

    /// Returns the value of the oldest unanswered PING; `None` if all are answered.
    pub(crate) fn next_pong(&self) -> Option<u32> {
        self.lock().unanswered.front().copied()
    }

    /// Records the commit: from now on SHUT is a statement about the guest.
    pub(crate) fn commit(&self) {
        self.record(|received| received.is_committed = true);
    }

    /// Records the commit of a postcopy: from now on SHUT is a statement about the guest. At the end the destination states
    /// that it has all pages.
    pub(crate) fn serve(&self) {
        self.record(|received| {
            received.is_committed = true;
            received.is_postcopy = true;
        });
    }

    /// Records that no more messages can arrive.
    pub(crate) fn end(&self) {
        self.record(|received| received.ended = true);
    }

    /// Returns the destination's statement about the guest; `None` if there is none yet.
    pub(crate) fn statement(&self) -> Option<DestinationStatement> {
        self.lock().statement
    }

    /// Ends the waits for PINGs, because the migration has ended.
    pub(crate) fn abort(&self) {
        self.record(|received| received.aborted = true);
    }

    /// Processes a message. Returns false if the message is for another reader. `explained` is true if the destination has sent
    /// the reason of its failure on the same connection.
    fn take(&self, message: &ReturnMessage<'_>, explained: bool) -> Result<bool, MigrationError> {
        let mut received = self.lock();
        match *message {
            ReturnMessage::Hello { version, accepted } => match accepted {
                None => return Err(MigrationError::other_version(VERSION.into(), version)),
                Some(_) if received.accepted.is_some() => return Ok(false),
                Some(accepted) => received.accepted = Some(accepted),
            },
            ReturnMessage::Pong(value) if received.unanswered.front() == Some(&value) => {
                received.unanswered.pop_front();
            }
            ReturnMessage::Shut(value) if received.is_committed => {
                let in_words = received.accepted.is_some() || received.is_postcopy;
                let statement = DestinationStatement::of_shut(value, explained, in_words);
                received.statement = received.statement.or(statement);
            }
            // Before the commit, any SHUT is a failure. A refusal is recorded as a statement, because it stays valid if another
            // thread commits at the same time.
            ReturnMessage::Shut(value) => {
                let statement =
                    DestinationStatement::of_shut(value, explained, received.accepted.is_some());
                received.statement = received
                    .statement
                    .or(statement.filter(|statement| *statement == DestinationStatement::Never));
                return Err(refusal(&received));
            }
            // Before the commit the message is ignored, because the guest still runs at the source.
            ReturnMessage::GuestActivity(doing) if received.is_committed => received.doing = doing,
            ReturnMessage::GuestActivity(_) => {}
            ReturnMessage::ErrorText(text) => {
                received.reason.get_or_insert_with(|| printable(text));
            }
            _ => return Ok(false),
        }
        drop(received);
        self.0.notify();
        Ok(true)
    }

    /// Waits until all PINGs sent so far are answered. Calls `doing` at least once per `every`, and at each change of the
    /// lifetime; an error of `doing` ends the wait. `limit` is a timeout, with the name of the awaited event.
    ///
    /// # Errors
    /// The error of `doing`; [`MigrationError::Timeout`]; [`MigrationError::Closed`] if no answer can arrive any more.
    pub(crate) fn await_answers<E: From<MigrationError>>(
        &self,
        limit: Option<(Duration, &str)>,
        every: Duration,
        mut doing: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let begun = Instant::now();
        loop {
            let left = limit.map(|(timeout, _)| timeout.saturating_sub(begun.elapsed()));
            let until = Instant::now() + left.map_or(every, |left| left.min(every));
            let ended = self.0.wait_until(Some(until), &mut doing, |received| {
                let is_answered = received.unanswered.is_empty();
                (is_answered || received.is_over()).then_some(is_answered)
            })?;
            match (ended, limit) {
                (Some(true), _) => return Ok(()),
                (Some(false), _) => {
                    // `doing` may know the cause of the end, and return it.
                    doing()?;
                    let closed = MigrationError::main_closed;
                    let refused = self.ended(closed()).err();
                    return Err(refused.unwrap_or_else(closed).into());
                }
                (None, Some((timeout, waiting_for))) if begun.elapsed() >= timeout => {
                    return Err(MigrationError::Timeout {
                        waiting_for: waiting_for.to_owned(),
                        waited: timeout,
                    }
                    .into());
                }
                (None, _) => {}
            }
        }
    }

    /// Returns true if the destination is a Hotlift. Must be called after the destination has answered `offer`.
    ///
    /// # Errors
    /// [`MigrationError::Mismatch`] if the destination does not accept the stream that `offer` describes.
    pub(crate) fn opened(&self, offer: Offer) -> Result<bool, MigrationError> {
        match self.lock().accepted {
            Some(accepted) => {
                handshake::check(offer, accepted.features)?;
                let by_packet = Features::METHOD_BY_PACKET;
                if offer.features.contains(by_packet) && !accepted.features.contains(by_packet) {
                    return Err(MigrationError::Mismatch {
                        what: "multifd-compression".to_owned(),
                        source_has: AUTO.name.to_owned(),
                        destination_has: "one method for all packets: it is an older hotlift"
                            .to_owned(),
                    });
                }
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Returns true if the destination is a Hotlift that accepts the stream feature `feature`.
    pub(crate) fn takes(&self, feature: Features) -> bool {
        let accepted = self.lock().accepted;
        accepted.is_some_and(|accepted| accepted.features.contains(feature))
    }

    /// Returns the id that a Hotlift destination gave the migration; `None` before its first message, or for a QEMU.
    pub(crate) fn id(&self) -> Option<MigrationId> {
        self.lock().accepted.map(|accepted| accepted.id)
    }

    /// Waits for the destination's statement about the guest. Returns `None` after `timeout`, or once all connections have
    /// ended. A cancel does not end this wait, because the guest may already run at the destination.
    pub(crate) fn wait_statement(&self, timeout: Duration) -> Option<DestinationStatement> {
        self.wait_while(timeout, |received| {
            received.statement.is_none() && !received.ended
        })
        .statement
    }

    /// Waits like [`Answers::wait_statement`]. Also returns the guest's state at the destination.
    pub(crate) fn wait_statement_and_activity(
        &self,
        timeout: Duration,
    ) -> Option<(DestinationStatement, GuestActivity)> {
        let statement = self.wait_statement(timeout)?;
        Some((statement, self.lock().doing))
    }

    /// Waits, for at most `timeout`, for the reason of the destination's failure. Returns `None` if no reason arrives.
    pub(crate) fn wait_reason(&self, timeout: Duration) -> Option<String> {
        let received = self.wait_while(timeout, |received| {
            received.reason.is_none() && !received.ended
        });
        received.reason.clone()
    }

    /// Records `reason` as the destination's reason, unless the destination has sent a reason.
    pub(crate) fn explain(&self, reason: &str) {
        self.record(|received| {
            received.reason.get_or_insert_with(|| reason.to_owned());
        });
    }

    /// Returns the error for a destination that refuses to run the guest, with the reason that the destination has sent.
    pub(crate) fn refusal(&self) -> MigrationError {
        refusal(&self.lock())
    }

    /// Handles the end of the only connection. Returns success if the destination has stated that the guest runs or that it has
    /// all pages.
    ///
    /// # Errors
    /// The destination's refusal if it has sent one, otherwise `lost`, which is the cause of the connection's end.
    pub(crate) fn ended(&self, lost: MigrationError) -> Result<(), MigrationError> {
        let received = self.lock();
        match received.statement {
            Some(DestinationStatement::Runs | DestinationStatement::HasAll) => Ok(()),
            None if received.reason.is_none() => Err(lost),
            Some(DestinationStatement::Never) | None => Err(refusal(&received)),
        }
    }
}

impl ReceivedMessages {
    fn is_over(&self) -> bool {
        self.ended || self.aborted || self.statement == Some(DestinationStatement::Never)
    }
}

fn refusal(received: &ReceivedMessages) -> MigrationError {
    let unexplained = match received.accepted {
        Some(_) => "it does not run the guest and sent no reason: see the log of 'hotlift' there",
        None => {
            "its QEMU could not load the guest and sent no reason on the stream: see the log of that QEMU"
        }
    };
    let reason = received.reason.clone();
    MigrationError::Destination {
        reason: reason.unwrap_or_else(|| unexplained.to_owned()),
    }
}

/// Guard that ends the waits for answers when the reader thread ends, even after a panic.
pub(crate) struct AnswersGuard<'a>(pub &'a Answers);

impl Drop for AnswersGuard<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Encodes `messages` one after another.
pub(crate) fn encode(messages: &[ReturnMessage<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for message in messages {
        // Encoding can fail only for a block name, and these messages have none.
        let _ = message.encode(&mut bytes);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn the_end_of_one_connection_leaves_the_statement_to_the_others() {
        let (main, far_main) = Stream::pair().unwrap();
        let (channel, far_channel) = Stream::pair().unwrap();
        let answers = Answers::new(&Life::default());
        answers.commit();
        let (ended, ends) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let lost = |channel, _| ended.send(channel).unwrap();
                listen(
                    [&main, &channel].into_iter(),
                    &answers,
                    |_, _, _| Ok(()),
                    lost,
                );
            });
            drop(far_main);
            assert_eq!(ends.recv(), Ok(Channel::Main));
            let statement = encode(&[ReturnMessage::Shut(0)]);
            (&far_channel).write_all(&statement).unwrap();
            drop(far_channel);
            assert_eq!(
                answers.wait_statement(LONG),
                Some(DestinationStatement::Runs)
            );
        });
        // After the final statement the end of a connection loses nothing.
        assert!(ends.try_recv().is_err());
    }

    #[test]
    fn a_refusal_after_the_commit_counts_and_a_success_before_it_does_not() {
        for (value, statement) in [(1, Some(DestinationStatement::Never)), (0, None)] {
            let answers = Answers::new(&Life::default());
            let shut = answers.take(&ReturnMessage::Shut(value), false);
            assert!(shut.is_err(), "it fails a migration that is not committed");
            answers.commit();
            drop(AnswersGuard(&answers));
            assert_eq!(answers.wait_statement(Duration::ZERO), statement);
        }
    }
}
