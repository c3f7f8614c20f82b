//! Replaces a lost connection of a postcopy: the source asks which pages have arrived, and sends the missing ones.
//!
//! A Hotlift source proves its identity by the id of the migration. A QEMU source is recognised only by its first bytes, and
//! the destination tries to resume with it. Any other client is rejected, and the wait for the source continues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::Fault;
use hotlift_net::admission::{Admitted, ConnectionClass, Listener};
use hotlift_net::transport::Stream;
use hotlift_wire::return_path::ReturnMessage;

use super::agreement::{self, Agreement, Answer};
use super::run::Incoming;
use crate::ends::guest_sink::accept;
use crate::error::MigrationError;
use crate::life::LONG;
use crate::life::threads::{caught, spawn};
use crate::status::Status;
use crate::stream::accept_loop::AcceptLoop;
use crate::stream::main_channel::MainChannel;
use crate::stream::main_recv::{MainInput, WaitCondition};
use crate::stream::preempt::missing_preempt;
use crate::stream::return_path::encode;

impl Incoming<'_> {
    /// Receives the missing pages from a source that connects to the listener of `Control::recover`, and returns the result.
    /// Returns `None` after a cancel.
    pub(super) fn recover(&self, machine: &mut MainChannel) -> Option<Result<(), MigrationError>> {
        loop {
            let listener = self.session.control.await_recovery()?;
            match self.recover_at(&listener, machine) {
                // Cancelled, or the source will connect to another listener.
                Ok(None) => {}
                Ok(Some(outcome)) => return Some(outcome),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    fn recover_at(
        &self,
        listener: &Listener,
        machine: &mut MainChannel,
    ) -> Result<Option<Result<(), MigrationError>>, MigrationError> {
        let (session, sink) = (self.session, self.sink);
        let control = &session.control;
        let mut accept_loop = accept::open(listener, sink.options, control)?;
        while !control.life().is_stopped() && !control.has_recovery() {
            for arrival in self.arrivals(&mut accept_loop, LONG)? {
                if !self.is_the_source(&arrival) {
                    control
                        .rejections()
                        .reject("a connection of another source than the lost one");
                    continue;
                }
                let main = Arc::new(arrival.stream);
                control.set_status(Status::PostcopyRecover);
                let mut input =
                    MainInput::new(&main, self.main_counters(), &session.memory, control.life())?;
                self.link.recover(Arc::clone(&main));
                machine.reconnect(sink.options.limits.handshake_timeout);
                match self.agree_in_time(machine, &mut input, &mut accept_loop) {
                    Ok(preempt) => {
                        let preempt = preempt.as_ref();
                        return Ok(Some(self.receive_missing(machine, &mut input, preempt)));
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

    fn arrivals(
        &self,
        accept_loop: &mut AcceptLoop<'_>,
        wait: Duration,
    ) -> Result<Vec<Admitted>, MigrationError> {
        // A client that asks for the outcome learns that the guest runs.
        let asked = self.session.query_subject(&|| ());
        let step = accept_loop.step(wait, &[], Some(&asked));
        Ok(step.map_err(MigrationError::opening)?.0)
    }

    fn is_the_source(&self, arrival: &Admitted) -> bool {
        match arrival.head() {
            ConnectionClass::Token(_) => true,
            ConnectionClass::Resumed if !self.sink.source.is_hotlift() => {
                let first = &self.sink.source.main;
                // Without this check any peer with a certificate of the same CA could send the same bytes.
                first.peer().is_none() || first.host().is_at_the_end_of(&arrival.stream)
            }
            _ => false,
        }
    }

    /// Runs [`Incoming::agree`]. Cuts the connection, even during a read or a write, in three cases:
    ///
    /// - the time limit of the agreement is reached
    /// - the migration is cancelled
    /// - `Control::recover` gets a newer listener
    fn agree_in_time(
        &self,
        machine: &mut MainChannel,
        input: &mut MainInput<'_>,
        accept_loop: &mut AcceptLoop<'_>,
    ) -> Result<Option<Stream>, MigrationError> {
        let control = &self.session.control;
        let options = self.sink.options;
        let agreement = Agreement::new(
            Instant::now(),
            options.limits.handshake_timeout,
            options.postcopy.preempt,
        );
        let is_over = AtomicBool::new(false);
        let is_waited_for = || !is_over.load(Ordering::Acquire) && !control.has_recovery();
        thread::scope(|scope| {
            let limit = spawn(scope, "mig/dst/agree".to_owned(), || {
                control.life().sleep_while(agreement.until(), is_waited_for);
                if !is_over.load(Ordering::Acquire) {
                    self.link.cut();
                }
            })?;
            let agreed = caught(|| self.agree(&agreement, machine, input, accept_loop));
            is_over.store(true, Ordering::Release);
            control.life().wake();
            limit.join().and(agreed)
        })
    }

    /// Answers the source's requests for bitmaps of received pages, until the source resumes. Returns the source's preempt
    /// channel; `None` without `postcopy-preempt`.
    fn agree(
        &self,
        agreement: &Agreement,
        machine: &mut MainChannel,
        input: &mut MainInput<'_>,
        accept_loop: &mut AcceptLoop<'_>,
    ) -> Result<Option<Stream>, MigrationError> {
        loop {
            let answer = input.step(machine, self, |action, _| {
                agreement.take(&action, Instant::now())
            })?;
            match answer {
                None => {}
                Some(Answer::Bitmap(block)) => self.send(&self.bitmap(block))?,
                Some(Answer::AwaitPreempt(until)) => {
                    return self.await_preempt(accept_loop, until).map(Some);
                }
                Some(Answer::Agreed) => return Ok(None),
            }
        }
    }

    fn await_preempt(
        &self,
        accept_loop: &mut AcceptLoop<'_>,
        until: Instant,
    ) -> Result<Stream, MigrationError> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.session.control.has_recovery() {
                return Err(missing_preempt(
                    self.sink.options.limits.handshake_timeout / 2,
                ));
            }
            let mut arrivals = self.arrivals(accept_loop, left)?;
            if let Some(stream) = self.sink.find_preempt(accept_loop, &mut arrivals) {
                return Ok(stream);
            }
            self.check()?;
        }
    }

    /// Confirms the resume, and receives the missing pages. Before this call, the source has learned which pages are missing.
    fn receive_missing(
        &self,
        machine: &mut MainChannel,
        input: &mut MainInput<'_>,
        preempt: Option<&Stream>,
    ) -> Result<(), MigrationError> {
        self.session.control.set_status(Status::PostcopyActive);
        self.send(&encode(&[ReturnMessage::ResumeAck(1)]))?;
        self.link.resume_requests();
        input.socket().notice_loss();
        let open = self.lazy.waits.lock().open();
        for Fault { block, page } in open {
            self.link.ask_for(block, page);
        }
        self.all_pages(machine, input, preempt)
    }

    fn bitmap(&self, block: usize) -> Vec<u8> {
        let ram = &self.sink.guest.ram()[block];
        let word = |word| self.lazy.received_word(block, word);
        agreement::bitmap(ram.name(), ram.pages(), word)
    }

    fn send(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.link.send(bytes).map_err(MigrationError::opening)
    }
}
