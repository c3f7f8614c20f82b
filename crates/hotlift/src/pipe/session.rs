//! State that the threads of one migration share, and its end by any of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hotlift_methods::{Accelerator, MemoryLimit};
use hotlift_wire::main_channel::postcopy::DEVICES_LOADED;
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::MigrationId;

use crate::control::Control;
use crate::cpu_limit::CpuBudget;
use crate::error::{Channel, MigrationError};
use crate::figures::{Counters, Counts, MethodFigures, ThreadCpu};
use crate::handover::{
    DestinationHandover, DestinationSide, DestinationStatement, SourceHandover, SourceOutcome,
};
use crate::life::threads::ThreadTimes;
use crate::pipe::barrier::Barrier;
use crate::pipe::batch::Batch;
use crate::pipe::flow::Flow;
use crate::pipe::hooks::Hooks;
use crate::pipe::settings::{RelaySettings, UnusedRam};
use crate::pipe::sink::{EarlySections, Sink};
use crate::status::Status;
use crate::stream::accept_loop::QuerySubject;
use crate::stream::main_recv::WaitCondition;

/// Check whether a wait continues.
pub(crate) struct WaitCheck<'a> {
    control: &'a Control,
    session: Option<&'a Session<'a>>,
}

impl<'a> WaitCheck<'a> {
    /// Creates the check for the time before there is a session.
    pub(crate) fn early(control: &'a Control) -> Self {
        Self {
            control,
            session: None,
        }
    }
}

impl WaitCondition for WaitCheck<'_> {
    fn check(&self) -> Result<(), MigrationError> {
        let source_handover = self.session.map(|session| &session.source_handover);
        let failed =
            source_handover.is_some_and(|source_handover| source_handover.failure.is_set());
        let switched = self.session.is_some_and(Session::is_switched);
        let too_late = switched || source_handover.is_some_and(SourceHandover::is_offered);
        if failed || (self.control.is_cancelled() && !too_late) {
            return Err(MigrationError::Cancelled);
        }
        Ok(())
    }
}

/// One migration from a source to a sink.
pub(crate) struct Session<'a> {
    pub control: Control,
    /// Use of an accelerator by the method of incoming channels.
    pub accelerator: Accelerator,
    /// Limit of the memory that the source can make this side allocate.
    pub memory: MemoryLimit,
    /// RAM that this relay's local QEMU omits.
    pub unused_ram: Vec<UnusedRam>,
    /// CPU time that the channels of both sides may take together.
    pub cpu: Arc<CpuBudget>,
    pub flow: Arc<Flow<Batch>>,
    pub barrier: Barrier,
    pub sink: &'a dyn Sink,
    /// Counters of each incoming multifd channel, and finally of main.
    pub received: Vec<Counters>,
    /// Pages that workers have forwarded.
    pub pages: Counters,
    pub barriers: AtomicU64,
    pub threads: ThreadTimes,
    pub since: Instant,
    /// Longest silence of another host; zero for no limit.
    pub silence_timeout: Duration,
    /// Period in which a source may query the outcome.
    pub query_period: Duration,
    /// Name of the migration at this side.
    pub id: MigrationId,
    /// Handover from a source that is a relay.
    pub destination_handover: DestinationHandover,
    /// Handover to the destination.
    pub source_handover: SourceHandover,
    /// True once postcopy has begun: its source does not continue alone, and its channels bring no pages.
    switched: AtomicBool,
    /// True with postcopy once the guest may run at the destination while pages are missing there.
    may_run_there: AtomicBool,
    /// True while the end of the connection makes the source's QEMU resume its guest: it has no answer yet that the devices are
    /// loaded.
    source_resumes: AtomicBool,
    /// Time at which the destination had the guest.
    moved_at: OnceLock<Instant>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(
        control: &Control,
        settings: &RelaySettings,
        memory: MemoryLimit,
        sink: &'a dyn Sink,
        received: Vec<Counters>,
        since: Instant,
        id: MigrationId,
    ) -> Self {
        // The last counter is that of main.
        let channels = received.len() - 1;
        let options = &settings.outgoing;
        // Count of connections that can bring the source's commit.
        let words = if sink.is_guest() { channels + 1 } else { 1 };
        // Two for each thread: one in use, and one in transit to or from the other threads.
        let batches = match sink.workers() {
            0 => 0,
            workers => 2 * channels.max(1) + 2 * workers,
        };
        let flow = Arc::new(Flow::new((0..batches).map(|_| Batch::new())));
        control.life().register(&flow);
        Self {
            control: control.clone(),
            accelerator: options.accelerator,
            memory,
            cpu: control.steering().cpu_budget(options),
            unused_ram: settings.unused_ram.clone(),
            flow,
            barrier: Barrier::new(channels, control.life()),
            sink,
            received,
            pages: Counters::default(),
            barriers: AtomicU64::new(0),
            threads: ThreadTimes::default(),
            since,
            silence_timeout: settings.limits.silence_timeout,
            query_period: settings.limits.time_for_questions(),
            id,
            destination_handover: DestinationHandover::new(words, control.life()),
            source_handover: SourceHandover::new(control.life()),
            switched: AtomicBool::new(false),
            may_run_there: AtomicBool::new(false),
            source_resumes: AtomicBool::new(false),
            moved_at: OnceLock::new(),
        }
    }

    pub(crate) fn call(&'a self) -> WaitCheck<'a> {
        WaitCheck {
            control: &self.control,
            session: Some(self),
        }
    }

    /// Returns true if a failure outside the migration's own threads still ends it.
    pub(crate) fn may_fail(&self) -> bool {
        let is_the_sources = match self.sink.is_guest() {
            true => {
                self.destination_handover.side() == DestinationSide::Loading && !self.is_switched()
            }
            false => !self.source_handover.is_offered(),
        };
        is_the_sources && !self.source_handover.failure.is_set()
    }

    /// Stores `error` if it is the first, and ends every thread's wait. Has no effect after the commit (see
    /// [`SourceHandover::fail`]).
    pub(crate) fn fail(&self, error: MigrationError) {
        if self.source_handover.fail(error) {
            self.release();
        }
    }

    /// Records that the main thread has ended with `error`, before or after the commit.
    pub(crate) fn end(&self, error: MigrationError) {
        if self.source_handover.end(error) {
            self.release();
        }
    }

    /// Ends all waits and sends.
    fn release(&self) {
        self.destination_handover.abandon();
        self.control.life().close();
        self.sink.abort();
    }

    /// Waits until every reader is paused: before its first page, at a sync point, or after its last page.
    pub(crate) fn await_readers(&self) -> Result<(), MigrationError> {
        let is_cancelled = || self.call().check().is_err();
        if self.barrier.wait_for_channels(is_cancelled) {
            return Ok(());
        }
        self.call().check()?;
        Err(MigrationError::Protocol {
            channel: Channel::Main,
            got: "the end of a multifd channel before its SYNC".to_owned(),
            doing: "waiting at a barrier",
        })
    }

    /// Begins RAM at the sink, with the device sections after its START, and releases the readers.
    pub(crate) fn start_ram(&self, early: &EarlySections) -> Result<(), MigrationError> {
        self.await_readers()?;
        self.sink.ram_start()?;
        for section in &early.behind_start {
            self.sink.early_section(section)?;
        }
        self.barrier.pass();
        self.control.set_status(Status::Active);
        Ok(())
    }

    /// Marks the offer: the source is about to learn that all is loaded. It may then release the guest, and a cancel is too
    /// late. Returns false if the migration has failed.
    pub(crate) fn offer(&self) -> bool {
        let may = self.source_handover.offer();
        self.control.set_too_late(may);
        may
    }

    /// Records that the source has taken the guest back after the offer.
    pub(crate) fn record_taken_back(&self) {
        self.source_handover.taken_back();
        self.control.set_too_late(false);
    }

    /// Commits: EOF is sent next if this returns true. From here on no failure changes the outcome, and a cancel is ignored.
    pub(crate) fn commit(&self, hooks: Hooks<'_>) -> bool {
        // A cancel after the offer is too late.
        let too_late = self.source_handover.is_offered();
        let may = || too_late || !self.control.life().is_stopped();
        if !self.source_handover.commit(may) {
            return false;
        }
        self.control.set_too_late(true);
        if let Some(on_commit) = hooks.on_commit
            && !self.may_run_there()
        {
            on_commit();
        }
        true
    }

    /// Marks the start of postcopy: a cancel is ignored from here on.
    pub(crate) fn switch(&self) {
        self.control.set_too_late(true);
        self.set_switched();
    }

    /// Marks the start of postcopy for a guest of this process, which a cancel may still prevent from running.
    pub(crate) fn set_switched(&self) {
        self.switched.store(true, Ordering::Release);
    }

    /// Returns true once postcopy has begun.
    pub(crate) fn is_switched(&self) -> bool {
        self.switched.load(Ordering::Acquire)
    }

    /// Marks that the destination may run the guest from the next byte on. A later failure leaves the guest without some of its
    /// pages, until source and destination are reconnected.
    pub(crate) fn switch_over(&self, hooks: Hooks<'_>) -> Result<(), MigrationError> {
        self.call().check()?;
        if let Some(on_commit) = hooks.on_commit {
            on_commit();
        }
        self.may_run_there.store(true, Ordering::Release);
        Ok(())
    }

    /// Records that the package requests an answer: until it arrives, the source's QEMU resumes its guest if the connection
    /// ends.
    pub(crate) fn note_source_resumes(&self) {
        self.source_resumes.store(true, Ordering::Release);
    }

    /// Records an answer that is sent to the source next.
    pub(crate) fn note_answer(&self, message: &ReturnMessage<'_>) {
        if *message == ReturnMessage::Pong(DEVICES_LOADED) {
            self.source_resumes.store(false, Ordering::Release);
        }
    }

    /// Returns true if the source's QEMU resumes its guest when the connection ends.
    pub(crate) fn source_resumes(&self) -> bool {
        self.source_resumes.load(Ordering::Acquire)
    }

    /// Returns true after [`Session::switch_over`].
    pub(crate) fn may_run_there(&self) -> bool {
        self.may_run_there.load(Ordering::Acquire)
    }

    /// Records the outcome by the destination's statement, or by its absence.
    pub(crate) fn settle(&self, statement: Option<DestinationStatement>) {
        self.source_handover.settle(statement);
        if self.source_handover.outcome() == Some(SourceOutcome::Moved) {
            // Set before the source knows the outcome: an observer need not wait for that.
            self.control.set_status(Status::Completed);
            let _ = self.moved_at.set(self.control.life().now());
        }
    }

    /// Returns the subject of outcome queries; `refuse` ends the migration.
    pub(crate) fn query_subject<'s>(&'s self, refuse: &'s (dyn Fn() + Sync)) -> QuerySubject<'s> {
        QuerySubject {
            id: self.id,
            destination_handover: &self.destination_handover,
            refuse,
        }
    }

    /// Returns the time from the source's first connection until the destination had the guest.
    pub(crate) fn total(&self) -> Duration {
        let moved_at = self.moved_at.get().copied();
        let end = moved_at.unwrap_or_else(|| self.control.life().now());
        end.saturating_duration_since(self.since)
    }

    /// Returns the statistics of a relayed VM of type `machine`.
    pub(crate) fn relayed(&self, machine: &str) -> Relayed {
        Relayed {
            total: self.total(),
            received_bytes: self.received().transferred_bytes,
            sent_bytes: self.sink.sent_bytes(),
            pages: self.pages.read(),
            barriers: self.barriers.load(Ordering::Relaxed),
            machine: machine.to_owned(),
            method: self.sink.method(),
            methods: self.sink.methods(),
            passed_through: None,
            threads: self.threads.read(),
        }
    }

    pub(crate) fn received(&self) -> Counts {
        self.received.iter().map(Counters::read).sum()
    }
}

/// Statistics of a relay.
pub(crate) struct Relayed {
    pub total: Duration,
    pub received_bytes: u64,
    pub sent_bytes: u64,
    pub pages: Counts,
    pub barriers: u64,
    pub machine: String,
    pub method: &'static str,
    pub methods: Vec<MethodFigures>,
    pub passed_through: Option<String>,
    pub threads: Vec<ThreadCpu>,
}
