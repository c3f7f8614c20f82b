//! Another connection in the place of one that was lost: the source asks what has come, and sends the rest.
//!
//! A Hotlift shows first what the migration is called. Of a QEMU only the first bytes tell, and it is tried whether it goes
//! on. Whoever else connects is turned away, and the source is waited for further on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use hotlift_mem::Fault;
use hotlift_wire::main_channel::postcopy::{PostcopyCommand, put_bitmap};
use hotlift_wire::main_channel::{MainDecoder, MainEvent, Step};
use hotlift_wire::return_path::ReturnMessage;

use super::run::{Incoming, out_of_place};
use crate::error::MigrationError;
use crate::life::LONG;
use crate::life::threads::{caught, spawn};
use crate::status::Status;
use crate::stream::door::{Arrival, Door, Kind, RESUMED_MAGIC};
use crate::stream::main_recv::{MainInput, Silence, Waiting, event_name};
use crate::stream::preempt::has_not_come;
use crate::stream::return_path::encode;
use crate::tls;
use crate::transport::{Acceptor, Listener, Stream};

/// Within so many times what a handshake may take it is to be agreed what is missing: the bitmaps of 1 TiB are 32 MiB.
const AGREEING: u32 = 2;

impl Incoming<'_> {
    /// Takes the rest from a source that connects to where somebody says that it will; how that ended. `None` once the
    /// rest is called off.
    pub(super) fn recover(&self, decoder: &mut MainDecoder) -> Option<Result<(), MigrationError>> {
        loop {
            let listener = self.session.control.await_recovery()?;
            match self.recover_at(&listener, decoder) {
                // Called off, or the source is to come to another listener.
                Ok(None) => {}
                Ok(Some(outcome)) => return Some(outcome),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    fn recover_at(
        &self,
        listener: &Listener,
        decoder: &mut MainDecoder,
    ) -> Result<Option<Result<(), MigrationError>>, MigrationError> {
        let session = self.session;
        let control = &session.control;
        let address = listener.address().map_err(MigrationError::opening)?;
        let acceptor = Acceptor::new(listener, tls::of_options(session.options, &address)?);
        let acceptor = acceptor.map_err(MigrationError::opening)?;
        let patience = session.options.handshake_timeout;
        let mut door = Door::new(
            acceptor,
            None,
            patience,
            control.strangers(),
            control.life(),
        )
        .map_err(MigrationError::opening)?;
        while !control.life().is_stopped() && !control.has_recovery() {
            for arrival in self.arrivals(&mut door)? {
                if !self.is_the_source(&arrival) {
                    control
                        .strangers()
                        .turn_away("a connection that is not of the source that was lost");
                    continue;
                }
                let main = Arc::new(arrival.stream);
                control.set_status(Status::PostcopyRecover);
                let mut input = MainInput::new(
                    &main,
                    session.main_counters(),
                    Silence::Always(patience),
                    &session.memory,
                    control.life(),
                )?;
                self.link.recover(Arc::clone(&main));
                match self.agree_in_time(decoder, &mut input, &mut door) {
                    Ok(preempt) => {
                        input.be_patient(patience / 2);
                        let preempt = preempt.as_ref();
                        return Ok(Some(self.go_on(decoder, &mut input, preempt)));
                    }
                    Err(_) => {
                        self.link.lose();
                        control.set_status(Status::PostcopyPaused);
                    }
                }
            }
        }
        Ok(None)
    }

    fn arrivals(&self, door: &mut Door<'_>) -> Result<Vec<Arrival>, MigrationError> {
        // Whoever asks is told that the guest runs.
        let asked = self.session.asked(&|| ());
        let step = door.step(LONG, &[], Some(&asked));
        Ok(step.map_err(MigrationError::opening)?.0)
    }

    fn is_the_source(&self, arrival: &Arrival) -> bool {
        let mut magic = [0; RESUMED_MAGIC.len()];
        match arrival.kind {
            Kind::Named => true,
            Kind::Main if !self.session.is_hotlift() => {
                let first = &self.session.accepted.main;
                let seen = arrival.stream.peek(&mut magic);
                matches!(seen, Ok(Some(_)))
                    && magic == RESUMED_MAGIC
                    // Whoever has a certificate of the same authority may say the same.
                    && (first.peer().is_none() || first.host().is_at_the_end_of(&arrival.stream))
            }
            Kind::Main | Kind::Channel(_) | Kind::OtherVersion(_) => false,
        }
    }

    /// [`Incoming::agree`], unless that takes too long, is called off, or the source is to come to another listener: then
    /// the connection is cut, whatever is read or written on it.
    fn agree_in_time(
        &self,
        decoder: &mut MainDecoder,
        input: &mut MainInput<'_>,
        door: &mut Door<'_>,
    ) -> Result<Option<Stream>, MigrationError> {
        let control = &self.session.control;
        let until = Instant::now() + AGREEING * self.session.options.handshake_timeout;
        let is_over = AtomicBool::new(false);
        let is_waited_for = || !is_over.load(Ordering::Acquire) && !control.has_recovery();
        thread::scope(|scope| {
            let limit = spawn(scope, "mig/dst/agree".to_owned(), || {
                control.life().sleep_while(until, is_waited_for);
                if !is_over.load(Ordering::Acquire) {
                    self.link.cut();
                }
            })?;
            let agreed = caught(|| self.agree(decoder, input, door));
            is_over.store(true, Ordering::Release);
            control.life().wake();
            limit.join().and(agreed)
        })
    }

    /// Tells the source which pages have come, until it goes on; its preempt channel, if it is to have one.
    fn agree(
        &self,
        decoder: &mut MainDecoder,
        input: &mut MainInput<'_>,
        door: &mut Door<'_>,
    ) -> Result<Option<Stream>, MigrationError> {
        decoder.reconnect();
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
        // The source has made it before it goes on.
        match self.session.options.postcopy_preempt {
            true => self.await_preempt(door).map(Some),
            false => Ok(None),
        }
    }

    fn await_preempt(&self, door: &mut Door<'_>) -> Result<Stream, MigrationError> {
        let patience = self.session.options.handshake_timeout / 2;
        let begun = Instant::now();
        loop {
            let mut arrivals = self.arrivals(door)?;
            if let Some(stream) = self.session.find_preempt(door, &mut arrivals) {
                return Ok(stream);
            }
            self.check()?;
            if begun.elapsed() > patience || self.session.control.has_recovery() {
                return Err(has_not_come(patience));
            }
        }
    }

    /// Takes the pages that have not come, of a source that knows which.
    fn go_on(
        &self,
        decoder: &mut MainDecoder,
        input: &mut MainInput<'_>,
        preempt: Option<&Stream>,
    ) -> Result<(), MigrationError> {
        self.session.control.set_status(Status::PostcopyActive);
        self.say(&encode(&[ReturnMessage::ResumeAck(1)]))?;
        self.link.go_on();
        input.socket().notice_loss();
        for Fault { block, page } in self.lazy.open() {
            self.link.ask_for(block, page);
        }
        self.all_pages(decoder, input, preempt)
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
