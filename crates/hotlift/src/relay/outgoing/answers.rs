//! What the other side has said on the return path so far.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotlift_wire::handshake::{Accepted, Offer, VERSION};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::MigrationId;

use crate::control::Control;
use crate::error::{Channel, MigrationError};
use crate::handover::Word;
use crate::hello;
use crate::stream::return_path::Messages;
use crate::transport::Stream;

/// How often a wait looks whether it was called off.
const TICK: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
struct Heard {
    /// What a Hotlift takes, and what it calls the migration; its first word stands.
    relay: Option<Accepted>,
    /// It is a Hotlift of another version.
    other_version: Option<u32>,
    /// The relay's own PING that is not answered yet. Others are the source's.
    asked: Option<u32>,
    shut: Option<u32>,
    /// Why it gave up, in its words.
    reason: Option<String>,
    ended: bool,
    aborted: bool,
}

/// Kept by the thread that listens, waited for by the main thread.
#[derive(Debug, Default)]
pub(super) struct Answers {
    heard: Mutex<Heard>,
    changed: Condvar,
}

impl Answers {
    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, change: impl FnOnce(&mut Heard)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// The relay sends a PING of its own now, whose answer is awaited next.
    pub(super) fn ask(&self, ping: u32) {
        self.note(|heard| heard.asked = Some(ping));
    }

    /// Ends all waits.
    pub(super) fn abort(&self) {
        self.note(|heard| heard.aborted = true);
    }

    /// Listens to `stream` until it ends. What is not for the relay goes to `forward`.
    pub(super) fn listen(
        &self,
        stream: &Stream,
        forward: &dyn Fn(&[u8]),
    ) -> Result<(), MigrationError> {
        let outcome = self.read_all(stream, forward);
        self.note(|heard| heard.ended = true);
        outcome
    }

    fn read_all(&self, stream: &Stream, forward: &dyn Fn(&[u8])) -> Result<(), MigrationError> {
        let mut messages = Messages::new(Channel::Main);
        loop {
            match messages.read(stream, |message, bytes| self.take(message, bytes, forward)) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                // It has said all that it had to say.
                Err(MigrationError::Connection { .. }) if self.lock().shut.is_some() => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&self, message: ReturnMessage<'_>, bytes: &[u8], forward: &dyn Fn(&[u8])) {
        match message {
            ReturnMessage::Hello { version, accepted } => self.note(|heard| match accepted {
                Some(accepted) => {
                    heard.relay.get_or_insert(accepted);
                }
                None => heard.other_version = Some(version),
            }),
            ReturnMessage::Pong(value) if self.lock().asked == Some(value) => {
                self.note(|heard| heard.asked = None);
            }
            ReturnMessage::Shut(value) => self.note(|heard| heard.shut = Some(value)),
            ReturnMessage::ErrorText(text) => {
                self.note(|heard| heard.reason = Some(crate::error::printable(text)));
            }
            _ => forward(bytes),
        }
    }

    /// Waits for the answer to `offer`; true if the other side is a relay.
    pub(super) fn await_opened(
        &self,
        offer: Offer,
        timeout: Duration,
        control: &Control,
    ) -> Result<bool, MigrationError> {
        let doing = "the destination's answer to the opening (is its machine the source's, has it as \
                     many multifd channels, and the same method?)";
        self.wait(timeout, control, doing)?;
        let heard = self.lock();
        match (heard.other_version, heard.relay) {
            (Some(version), _) => Err(MigrationError::other_version(VERSION.into(), version)),
            (None, Some(accepted)) => {
                hello::check(offer, accepted.features)?;
                Ok(true)
            }
            (None, None) => Ok(false),
        }
    }

    /// Waits for word that all devices are loaded.
    pub(super) fn await_loaded(
        &self,
        timeout: Duration,
        control: &Control,
    ) -> Result<(), MigrationError> {
        let doing = "the destination's word that it has loaded the guest";
        self.wait(timeout, control, doing)
    }

    /// What a relay calls the migration.
    pub(super) fn id(&self) -> Option<MigrationId> {
        self.lock().relay.map(|accepted| accepted.id)
    }

    /// Waits for its word on what became of the guest, as long as the connection may bring one. Nothing calls
    /// this wait off: the guest may run.
    pub(super) fn await_word(&self, patience: Duration) -> Option<Word> {
        let (heard, _) = self
            .changed
            .wait_timeout_while(self.lock(), patience, |heard| {
                heard.word().is_none() && !heard.ended && !heard.aborted
            })
            .unwrap_or_else(PoisonError::into_inner);
        heard.word()
    }

    /// Its refusal, in its words.
    pub(super) fn refusal(&self) -> MigrationError {
        gave_up(&self.lock())
    }

    fn wait(
        &self,
        timeout: Duration,
        control: &Control,
        waiting_for: &str,
    ) -> Result<(), MigrationError> {
        let deadline = Instant::now() + timeout;
        let mut heard = self.lock();
        loop {
            if heard.asked.is_none() {
                return Ok(());
            }
            if heard.shut.is_some_and(|value| value != 0) || heard.reason.is_some() {
                return Err(gave_up(&heard));
            }
            if heard.ended {
                return Err(MigrationError::Closed {
                    channel: Channel::Main,
                });
            }
            if heard.aborted || control.is_cancelled() {
                return Err(MigrationError::Cancelled);
            }
            if Instant::now() > deadline {
                return Err(MigrationError::Timeout {
                    waiting_for: waiting_for.to_owned(),
                    waited: timeout,
                });
            }
            (heard, _) = self
                .changed
                .wait_timeout(heard, TICK)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The other side's reason to give up, if it comes within `patience`.
    pub(super) fn reason(&self, patience: Duration) -> Option<String> {
        let (heard, _) = self
            .changed
            .wait_timeout_while(self.lock(), patience, |heard| {
                heard.reason.is_none() && !heard.ended
            })
            .unwrap_or_else(PoisonError::into_inner);
        heard.reason.clone()
    }

    /// What became of a connection that has ended: fine if the guest runs there.
    pub(super) fn ending(&self) -> Result<(), MigrationError> {
        let heard = self.lock();
        match heard.shut {
            Some(0) => Ok(()),
            None if heard.reason.is_none() => Err(MigrationError::Closed {
                channel: Channel::Main,
            }),
            _ => Err(gave_up(&heard)),
        }
    }
}

impl Heard {
    fn word(&self) -> Option<Word> {
        Word::of_shut(self.shut?, self.reason.is_some(), self.relay.is_some())
    }
}

fn gave_up(heard: &Heard) -> MigrationError {
    let reason = heard.reason.clone().unwrap_or_else(|| {
        "it could not load the guest; its own log says why (QEMU sends no reason)".to_owned()
    });
    MigrationError::Destination { reason }
}
