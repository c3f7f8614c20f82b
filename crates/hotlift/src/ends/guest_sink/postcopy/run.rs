//! Threads of a postcopy, from PACKAGED to the end.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use hotlift_net::transport::Stream;
use hotlift_wire::main_channel::PageContent;
use hotlift_wire::return_path::ReturnMessage;

use super::LazyRam;
use super::link::Link;
use crate::ends::guest_sink::announce;
use crate::ends::guest_sink::sink::{GuestSink, PreCommitWait};
use crate::error::MigrationError;
use crate::figures::Counters;
use crate::handover::DestinationSide;
use crate::life::threads::{OnPanic, caught, spawn};
use crate::pipe::session::Session;
use crate::pipe::sink::Sink;
use crate::status::Status;
use crate::stream::main_channel::{Action, MainChannel, unexpected};
use crate::stream::main_recv::{MainInput, WaitCondition};
use crate::stream::preempt;
use crate::stream::return_path::encode;

/// State of a postcopy at the destination, which its threads share.
pub(super) struct Incoming<'a> {
    pub(super) session: &'a Session<'a>,
    pub(super) sink: &'a GuestSink<'a>,
    pub(super) lazy: LazyRam<'a>,
    pub(super) link: Link<'a>,
}

/// Loads the devices of a complete package, answers the package's `pings`, starts the guest, and receives its pages. Returns
/// when all pages have arrived.
///
/// # Errors
/// [`MigrationError::PagesMissing`] if the guest runs here, and the operator has cancelled the transfer of the missing pages.
/// After any other error the source keeps the guest.
pub(crate) fn run<'a>(
    session: &'a Session<'a>,
    sink: &'a GuestSink<'a>,
    machine: &mut MainChannel,
    input: &mut MainInput<'_>,
    pings: &[u32],
) -> Result<(), MigrationError> {
    let preempt = match sink.options.postcopy.preempt {
        true => Some(sink.await_preempt(&PreCommitWait(session))?),
        false => None,
    };
    let incoming = Incoming {
        session,
        sink,
        lazy: LazyRam::new(sink)?,
        link: Link::new(sink),
    };
    session.set_switched();
    session.control.set_takes_pages();
    sink.source.main.notice_loss();
    let outcome = incoming.run(machine, input, pings, preempt.as_deref());
    match session.destination_handover.side() {
        DestinationSide::Runs => {
            let waits = incoming.lazy.waits.lock().figures(session.since.elapsed());
            let _ = sink.postcopy.set(waits);
            // `end` is not called: threads of the guest keep waiting for missing pages.
            outcome
        }
        _ => {
            incoming.lazy.end();
            outcome.and(Err(MigrationError::Cancelled))
        }
    }
}

impl Incoming<'_> {
    fn run(
        &self,
        machine: &mut MainChannel,
        input: &mut MainInput<'_>,
        pings: &[u32],
        preempt: Option<&Stream>,
    ) -> Result<(), MigrationError> {
        let session = self.session;
        let (stop, stopped) = Stream::pair().map_err(MigrationError::opening)?;
        let failed = |error| {
            session.fail(match session.destination_handover.side() {
                DestinationSide::Runs => MigrationError::PagesMissing {
                    source: Box::new(error),
                },
                _ => error,
            });
            // Wakes the thread that loads the devices, if it waits for a page.
            if session.destination_handover.side() == DestinationSide::Never {
                self.lazy.end();
            }
        };
        let threads = &session.threads;
        thread::scope(|scope| {
            // Both threads are necessary: the devices may wait for pages. If a thread cannot be started, the source keeps the
            // guest.
            threads.spawn(scope, "mig/dst/fault".to_owned(), &failed, move || {
                let ask = |fault: hotlift_mem::Fault| self.link.ask_for(fault.block, fault.page);
                self.lazy.report_faults(&stopped, ask)
            })?;
            let pages = spawn(scope, "mig/dst/listen".to_owned(), || {
                let outcome = caught(|| self.listen(machine, input, preempt));
                threads.record_cpu_time("mig/dst/listen");
                outcome.map_err(|error| {
                    failed(error);
                    MigrationError::Cancelled
                })
            })?;
            let loaded = caught(|| self.load(pings));
            if let Err(error) = loaded {
                failed(error);
            }
            let outcome = pages.join().and_then(|all| all);
            let outcome = outcome.and_then(|()| self.complete());
            drop(stop);
            outcome
        })
    }

    /// Loads the devices, and starts the guest.
    fn load(&self, pings: &[u32]) -> Result<(), MigrationError> {
        let (session, sink) = (self.session, self.sink);
        sink.await_loaded()?;
        let pongs: Vec<_> = pings.iter().copied().map(ReturnMessage::Pong).collect();
        // Errors are ignored: a source that does not receive the answers detects the broken connection.
        let _ = self.link.send(&encode(&pongs));
        if !(session.destination_handover.loaded() && session.destination_handover.commit()) {
            return Err(MigrationError::Cancelled);
        }
        session.control.set_too_late(true);
        let _unsure = OnPanic(|| session.destination_handover.unsure());
        if sink.run(session, Status::PostcopyActive) {
            session.destination_handover.record_run();
            announce::start(sink.guest, &sink.options.announce);
        }
        Ok(())
    }

    /// Receives pages until all have arrived. Replaces a lost connection, and then continues.
    fn listen(
        &self,
        machine: &mut MainChannel,
        input: &mut MainInput<'_>,
        preempt: Option<&Stream>,
    ) -> Result<(), MigrationError> {
        let mut outcome = self.all_pages(machine, input, preempt);
        while let Err(lost) = outcome {
            // Abandons the guest, unless it is starting. Main stays open, because an error message may be sent on it. If the
            // guest is starting, waits for the result.
            self.session.destination_handover.abandon();
            if !self
                .session
                .destination_handover
                .wait_for_decision(|| false)
            {
                return Err(lost);
            }
            self.link.lose();
            self.session.control.set_status(Status::PostcopyPaused);
            outcome = match self.recover(machine) {
                Some(outcome) => outcome,
                None => return Err(lost),
            };
        }
        // Pages that were never sent become zero pages, and the devices may wait for them.
        self.lazy.end();
        Ok(())
    }

    /// Receives pages until all have arrived, on one main channel and its preempt channel.
    pub(super) fn all_pages(
        &self,
        machine: &mut MainChannel,
        input: &mut MainInput<'_>,
        preempt: Option<&Stream>,
    ) -> Result<(), MigrationError> {
        let Some(stream) = preempt else {
            return self.pages(machine, input);
        };
        // `whole`: main has ended, normally after its last page. `over`: the preempt channel has ended.
        let (whole, over) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            let urgent = spawn(scope, "mig/dst/preempt".to_owned(), || {
                let outcome = self.urgent_pages(stream);
                over.store(true, Ordering::Release);
                self.session.control.life().wake();
                // The preempt channel ended too early: pages requested from now on would not arrive.
                if !whole.load(Ordering::Acquire) {
                    self.link.cut();
                }
                self.session.threads.record_cpu_time("mig/dst/preempt");
                outcome
            });
            let outcome = urgent.and_then(|urgent| {
                let mut outcome = self.pages(machine, input);
                whole.store(true, Ordering::Release);
                // The end of main may arrive before pages on the preempt channel: waits for these pages.
                if outcome.is_ok() {
                    let timeout = self.sink.options.limits.handshake_timeout;
                    let is_over = || over.load(Ordering::Acquire);
                    outcome = self.lazy.wait_until_met(timeout, self, is_over);
                }
                let was_over = over.load(Ordering::Acquire);
                stream.shutdown(Shutdown::Both);
                match (outcome, urgent.join()?) {
                    // The early end of the preempt channel has cut main: its error is the cause.
                    (Err(_), Err(first)) if was_over => Err(first),
                    (outcome, _) => outcome,
                }
            });
            stream.shutdown(Shutdown::Both);
            outcome
        })
    }

    pub(super) fn main_counters(&self) -> &Counters {
        &self.session.received[self.sink.source.multifd.len()]
    }

    fn urgent_pages(&self, stream: &Stream) -> Result<(), MigrationError> {
        let counters = self.main_counters();
        let blocks = &self.sink.blocks;
        preempt::read_pages(stream, blocks, counters, |block, offset, content| {
            self.lazy.place(block, offset, content)?;
            let normal = usize::from(content.is_some());
            counters.add_pages(normal, 1 - normal);
            Ok(())
        })
    }

    /// Reads main up to its last page.
    fn pages(
        &self,
        machine: &mut MainChannel,
        input: &mut MainInput<'_>,
    ) -> Result<(), MigrationError> {
        let mut keep_waiting = true;
        while keep_waiting {
            let taken = input.step(machine, self, |action, _| self.take(&action))?;
            keep_waiting = taken.unwrap_or(true);
        }
        Ok(())
    }

    /// Executes an action of the machine; returns false after the last page.
    fn take(&self, action: &Action<'_>) -> Result<bool, MigrationError> {
        match action {
            Action::Nothing => {}
            Action::Page {
                block,
                offset,
                content,
            } => {
                let bytes = match content {
                    PageContent::Normal(bytes) => Some(*bytes),
                    _ => None,
                };
                self.lazy.place(*block, *offset, bytes)?;
                let counters = self.main_counters();
                counters.add_pages(bytes.is_some().into(), bytes.is_none().into());
            }
            Action::Pong(value) => {
                // Errors are ignored: the reader of the connection detects its loss.
                let _ = self.link.send(&encode(&[ReturnMessage::Pong(*value)]));
            }
            Action::Eof { .. } => return Ok(false),
            _ => return Err(unexpected("a record that a running guest does not accept")),
        }
        Ok(true)
    }

    /// Ends the postcopy of a guest that runs and has all pages.
    fn complete(&self) -> Result<(), MigrationError> {
        let session = self.session;
        if session.destination_handover.side() != DestinationSide::Runs {
            return Err(MigrationError::Cancelled);
        }
        self.lazy.end();
        session.destination_handover.all_pages_arrived();
        session.control.set_status(Status::Completed);
        let _ = self.link.send(&encode(&[ReturnMessage::Shut(0)]));
        Ok(())
    }
}

impl WaitCondition for Incoming<'_> {
    fn check(&self) -> Result<(), MigrationError> {
        let session = self.session;
        if session.control.life().is_stopped() {
            session.destination_handover.abandon();
        }
        match session.destination_handover.side() {
            DestinationSide::Never => Err(MigrationError::Cancelled),
            _ if session.control.take_pause() => Err(MigrationError::main_closed()),
            _ => Ok(()),
        }
    }
}
