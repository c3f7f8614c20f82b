//! The switch to postcopy, and the phase after it: the guest runs at the destination, and its missing pages follow.
//!
//! ```text
//! switch   stop guest, list of pages to discard, PING           status device
//! commit   devices and RUN in one package                       the guest is the destination's
//! pages    requested pages, and all others after them           status postcopy-active
//! lost     another connection, or the end of it                 status postcopy-paused, postcopy-recover
//! end      END, EOF; SHUT(0)                                    status completed
//! ```

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_net::admission::ConnectionToken;
use hotlift_net::transport::{Address, Stream};
use hotlift_wire::main_channel::postcopy;

use super::Migration;
use crate::ends::guest_source::postcopy_pages::GuestPages;
use crate::ends::guest_source::reporter::INTERVAL;
use crate::ends::guest_source::source::GuestSource;
use crate::ends::stream_sink::LOADING;
use crate::error::{Channel, MigrationError};
use crate::handover::settle::{Question, Step};
use crate::handover::{DestinationStatement, SourceOutcome, confirm_outcome, query_once};
use crate::life::LONG;
use crate::life::threads::spawn;
use crate::pipe::sink::Postcopy;
use crate::postcopy::{Connection, Ledger, resume_postcopy};
use crate::remote::Remote;
use crate::status::Status;
use crate::stream::main_send::{LOADED, MainLink, MainSend};
use crate::stream::multifd_send::connect_with;
use crate::stream::return_path::{Answers, Messages};
use crate::tls;

impl Migration<'_> {
    /// Runs the switch to postcopy and the phase after it. Returns once the destination has all pages. The result is the
    /// downtime of the guest, which was stopped at `stopped_at`.
    pub(super) fn postcopy(&mut self, stopped_at: Instant) -> Result<Duration, MigrationError> {
        let (session, source) = (self.session, self.source);
        let (out, control) = (source.out, source.control);
        out.link.pacer.lift();
        self.sync()?;
        self.discard()?;
        let devices = source.guest.save_devices()?;
        let (package, ping) = out.main.take().package(&devices, LOADED)?;
        let ledger = Arc::new(Ledger::new(&self.opening.ram.blocks));
        let _ = source.ledger.set(Arc::clone(&ledger));
        if !session
            .source_handover
            .serve(|| !control.life().is_stopped())
        {
            return Err(MigrationError::Cancelled);
        }
        session.switch();
        out.answers.serve();
        out.answers.ask(ping);
        let pages = GuestPages::new(source);
        let mut downtime = None;
        let first = (Arc::clone(&out.link), None);
        // From here on a failure loses only the connection; it does not move the guest.
        let sent = out.main.take().raw(&package);
        let mut outcome = sent.and_then(|()| {
            source.postcopy_begins();
            control.set_status(Status::PostcopyActive);
            self.serve(&pages, ledger, first, &out.answers, &mut || {
                downtime.get_or_insert_with(|| stopped_at.elapsed());
            })
        });
        while let Err(error) = outcome {
            // Prefers the cause of the lost connection to an error that follows from it.
            let error = source.lost.take().unwrap_or(error);
            let streams = out.streams();
            streams.for_each(|stream| stream.shutdown(Shutdown::Both));
            outcome = match self.await_resume(error)? {
                Some(to) => self.resume(&to),
                None => Ok(()),
            };
        }
        session.source_handover.all_pages_arrived();
        Ok(downtime.unwrap_or_else(|| stopped_at.elapsed()))
    }

    /// Makes the destination discard outdated pages: pages that the guest has written since they were sent. Includes pages that
    /// were never sent.
    fn discard(&mut self) -> Result<(), MigrationError> {
        let GuestSource { ram, out, .. } = self.source;
        if ram.pending() == 0 {
            // A QEMU waits forever if there is nothing to discard.
            ram.put_back(0, 0);
        }
        let mut discards = Vec::new();
        for (index, block) in self.opening.ram.blocks.iter().enumerate() {
            postcopy::put_discards(&block.name, &ram.dirty_ranges(index), &mut discards)
                .map_err(MigrationError::main_wire)?;
        }
        out.main.take().raw(&discards)?;
        let postcopy = self.session.sink.postcopy();
        postcopy.map_or(Ok(()), Postcopy::await_ready)
    }

    /// Sends pages over one connection until the destination has all of them. Starts a thread that reads `messages`; the first
    /// connection passes `None`, because it already has a reader.
    fn serve(
        &mut self,
        pages: &GuestPages<'_>,
        ledger: Arc<Ledger>,
        (link, messages): (Arc<MainLink>, Option<Messages>),
        answers: &Answers,
        on_loaded: &mut dyn FnMut(),
    ) -> Result<(), MigrationError> {
        let (session, source) = (self.session, self.source);
        let control = source.control;
        let (reporter, estimator, round) = (&mut self.reporter, &self.estimator, self.round);
        let sent_all = &mut self.sent_all;
        let is_first = messages.is_none();
        let before = source.postcopy_requests.load(Ordering::Relaxed);
        control.set_postcopy_link(&link);
        let pace = control.steering().postcopy_pacer(&source.options.postcopy);
        let cpu = control.steering().cpu_budget(&source.options.stream);
        let connection = Connection::new(
            (pages, ledger),
            (&source.out.main, link),
            answers,
            (pace, cpu),
        );
        if let Some(stream) = self.preempt.take() {
            connection.answer_on(stream, false);
        }
        let count = || {
            let served = connection.ledger.order.lock().served;
            let all = before + served;
            source.postcopy_requests.store(all, Ordering::Relaxed);
        };
        let failed = |error| connection.fail(error);
        thread::scope(|scope| {
            let outcome = (|| {
                if let Some(messages) = messages {
                    spawn(scope, "mig/src/return".to_owned(), || {
                        connection.receive(messages);
                    })?;
                }
                let answer = || {
                    connection.answer_all();
                    Ok(())
                };
                let threads = &session.threads;
                threads.spawn(scope, "mig/src/answer".to_owned(), &failed, answer)?;
                let waiting = "the destination's message that it loaded the devices";
                let limit = Some((LOADING, waiting));
                answers.await_answers(limit, LONG, || match answers.statement() {
                    // The destination stays connected until its refusal has been received.
                    Some(DestinationStatement::Never) => Err(answers.refusal()),
                    _ => Ok(()),
                })?;
                on_loaded();
                spawn(scope, "mig/src/report".to_owned(), || {
                    while !connection.ledger.wait_for_end(INTERVAL) {
                        count();
                        reporter.report(round, estimator);
                    }
                    // The loss of the first connection may be noticed late.
                    if is_first && source.lost.is_set() {
                        // The background may sleep because of its limits.
                        connection.close();
                    }
                })?;
                // One thread suffices: it reads memory as fast as one connection sends.
                if !connection.send_background(scope, "mig/src/push_", 1)? {
                    return Err(MigrationError::main_closed());
                }
                *sent_all = true;
                connection.end()
            })();
            match outcome {
                Err(error) => connection.fail(error),
                Ok(()) => {
                    if let Some(id) = source.out.answers.id() {
                        confirm_outcome(&connection.link.transport, id);
                    }
                    connection.close();
                }
            }
        });
        count();
        connection.take_failure().map_or(Ok(()), Err)
    }

    /// After a lost connection, waits until an operator resumes the migration. Returns the new address. Returns `None` if the
    /// destination turns out to have all pages.
    ///
    /// # Errors
    /// The error `lost` after a cancel. Also an error if the destination states that it will never run the guest.
    fn await_resume(&self, lost: MigrationError) -> Result<Option<Address>, MigrationError> {
        let GuestSource {
            control,
            out,
            options,
            ..
        } = self.source;
        let (source_handover, answers) = (&self.session.source_handover, &out.answers);
        control.set_status(Status::PostcopyPaused);
        // Only a refusal counts here: the destination states that all pages arrived only at the end of the stream.
        let mut statement = answers
            .statement()
            .filter(|statement| *statement == DestinationStatement::Never);
        let timeout = options.limits.settle_timeout;
        let mut question = Question::while_paused(Instant::now(), timeout);
        loop {
            if let Some(statement) = statement.take() {
                source_handover.settle(Some(statement));
                if source_handover.outcome() == Some(SourceOutcome::Moved) {
                    return Ok(None);
                }
                if source_handover.outcome() == Some(SourceOutcome::Refused) {
                    return Err(match lost {
                        MigrationError::Closed { .. } | MigrationError::Connection { .. } => {
                            answers.refusal()
                        }
                        other => other,
                    });
                }
            }
            if control.is_cancelled() || control.life().is_stopped() {
                source_handover.settle(None);
                return Err(lost);
            }
            // If the guest is known to run, the only open question is if all pages arrived. The source asks it only after it
            // has sent all pages.
            let may_ask = self.sent_all || !source_handover.is_known_to_run();
            let id = answers.id().filter(|_| may_ask);
            let wait = match id.and_then(|_| question.next(Instant::now())) {
                Some(Step::Ask(within)) => {
                    let asked = id.and_then(|id| query_once(&out.to, id, within));
                    statement = asked.map(|(statement, _)| statement);
                    continue;
                }
                Some(Step::Listen(wait) | Step::Pause(wait)) => wait,
                None => LONG,
            };
            if let Some(to) = control.take_resume(wait) {
                return Ok(Some(to));
            }
        }
    }

    /// Continues the postcopy over a new connection to `to`. The destination first lists the pages that it has.
    fn resume(&mut self, to: &Address) -> Result<(), MigrationError> {
        let GuestSource {
            control,
            options,
            out,
            ram,
            ..
        } = self.source;
        control.set_status(Status::PostcopyRecover);
        let remote = Remote::new(to, tls::of_options(&options.tls, &options.limits, to)?);
        let link = Arc::new(MainLink {
            transport: self.connect(&remote)?,
            counters: Arc::clone(&out.link.counters),
            pacer: Arc::clone(&out.link.pacer),
            life: control.life().clone(),
        });
        let blocks = &self.opening.ram.blocks;
        let ledger = Arc::new(Ledger::new(blocks));
        let mut messages = Messages::new(Channel::Main);
        let mut preempt = None;
        messages.begin_with(resume_postcopy(
            &link.transport,
            &ledger,
            control.life(),
            || {
                preempt = self.connect_preempt(&remote)?;
                Ok(())
            },
        )?);
        self.preempt = preempt;
        self.session
            .source_handover
            .settle(Some(DestinationStatement::Runs));
        for block in 0..blocks.len() {
            for page in 0..ledger.pages(block) {
                match ledger.is_sent(block, page) {
                    true => ram.settle(block, page),
                    false => ram.put_back(block, page),
                }
            }
        }
        let configuration = self.opening.configuration;
        *out.main.take() = MainSend::resume(Arc::clone(&link), configuration, None, blocks)?;
        let answers = Answers::new(control.life());
        answers.serve();
        control.set_status(Status::PostcopyActive);
        let pages = GuestPages::new(self.source);
        let connection = (link, Some(messages));
        self.serve(&pages, ledger, connection, &answers, &mut || ())
    }

    /// Makes an additional connection of this migration, to `to`. To a Hotlift, sends the id of the migration, so that a
    /// Hotlift that waits for another migration rejects the connection.
    fn connect(&self, to: &Remote) -> Result<Stream, MigrationError> {
        let GuestSource {
            options,
            control,
            out,
            ..
        } = self.source;
        let pass = out.answers.id().map(|id| ConnectionToken::new(id.0, None));
        let timeout = options.limits.handshake_timeout;
        connect_with(pass.as_ref(), to, timeout, &control.dialing())
    }

    /// With `postcopy-preempt`, makes the connection for requested pages. Returns `None` without this option.
    pub(super) fn connect_preempt(&self, to: &Remote) -> Result<Option<Stream>, MigrationError> {
        let preempts = self.source.options.postcopy.preempt;
        preempts.then(|| self.connect(to)).transpose()
    }

    /// Returns true if the guest runs at the destination but will not get all of its pages.
    pub(super) fn has_lost_pages(&self) -> bool {
        self.session.source_handover.outcome() == Some(SourceOutcome::PagesLost)
    }
}
