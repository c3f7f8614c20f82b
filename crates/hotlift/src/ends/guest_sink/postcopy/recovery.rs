//! Another connection in the place of one that was lost: the source asks what has come, and sends the rest.

use std::sync::Arc;
use std::time::Duration;

use hotlift_mem::Fault;
use hotlift_wire::main_channel::postcopy::{PostcopyCommand, put_bitmap};
use hotlift_wire::main_channel::{MainDecoder, MainEvent, Step};
use hotlift_wire::return_path::ReturnMessage;

use super::run::{Incoming, out_of_place};
use crate::control::Status;
use crate::error::MigrationError;
use crate::stream::door::Door;
use crate::stream::main_recv::{MainInput, Silence, event_name};
use crate::stream::return_path::encode;
use crate::tls;
use crate::transport::{Acceptor, Listener, Stream};

/// Between two looks whether a wait was called off.
const TICK: Duration = Duration::from_millis(100);

impl Incoming<'_> {
    /// Waits until somebody has said where to listen, and a source has connected there; `None` once the rest is called
    /// off.
    pub(super) fn await_recovery(&self) -> Option<Result<Stream, MigrationError>> {
        let control = &self.session.control;
        loop {
            let listener = control.await_recovery()?;
            match self.accept(&listener) {
                Ok(Some(stream)) => {
                    control.set_status(Status::PostcopyRecover);
                    return Some(Ok(stream));
                }
                // Called off, or the source is to come to another listener.
                Ok(None) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// The first connection that is let in; `None` once the rest is called off, or there is another listener.
    fn accept(&self, listener: &Listener) -> Result<Option<Stream>, MigrationError> {
        let session = self.session;
        let address = listener.address().map_err(MigrationError::opening)?;
        let acceptor = Acceptor::new(listener, tls::of_options(session.options, &address)?);
        let acceptor = acceptor.map_err(MigrationError::opening)?;
        let patience = session.options.handshake_timeout;
        let mut door = Door::new(acceptor, None, patience, &session.control);
        while !session.control.is_stopped() && !session.control.has_recovery() {
            if let Some(stream) = door.take_any(TICK).map_err(MigrationError::opening)? {
                return Ok(Some(stream));
            }
        }
        Ok(None)
    }

    /// Tells the source on `stream` which pages have come, and takes the others.
    pub(super) fn go_on(
        &self,
        decoder: &mut MainDecoder,
        stream: Stream,
    ) -> Result<(), MigrationError> {
        let session = self.session;
        let stream = Arc::new(stream);
        decoder.reconnect();
        let patience = session.options.handshake_timeout;
        let mut input = MainInput::new(
            &stream,
            session.main_counters(),
            Silence::Always(patience),
            &session.memory,
        );
        self.link.recover(Arc::clone(&stream));
        loop {
            let next = decoder.next(input.unread());
            let (event, consumed) = match next.map_err(MigrationError::main_wire)? {
                Step::Need(needed) => {
                    if !input.fill(needed, self)? {
                        return Err(MigrationError::main_closed());
                    }
                    continue;
                }
                Step::Event { event, consumed } => (event, consumed),
            };
            let resumes = match event {
                MainEvent::Postcopy(PostcopyCommand::RecvBitmap(block)) => {
                    self.say(&self.bitmap(block))?;
                    false
                }
                MainEvent::Postcopy(PostcopyCommand::Resume) => true,
                other => return Err(out_of_place(&event_name(&other))),
            };
            input.take(consumed);
            if resumes {
                break;
            }
        }
        session.control.set_status(Status::PostcopyActive);
        self.say(&encode(&[ReturnMessage::ResumeAck(1)]))?;
        self.link.go_on();
        for Fault { block, page } in self.lazy.open() {
            self.link.ask_for(block, page);
        }
        input.be_patient(patience / 2);
        self.pages(decoder, &mut input)
    }

    fn bitmap(&self, block: usize) -> Vec<u8> {
        let ram = &self.session.guest.ram()[block];
        let mut answer = encode(&[ReturnMessage::RecvBitmap { block: ram.name() }]);
        let word = |word| self.lazy.received_word(block, word);
        put_bitmap(ram.pages(), word, &mut answer);
        answer
    }

    fn say(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.link.say(bytes).map_err(MigrationError::opening)
    }
}
