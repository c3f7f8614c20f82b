//! State that the threads of one migration share. Any of them can end the migration.

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

/// Condition of a wait: the wait ends after a failure, or after a cancel that is not too late.
pub(crate) struct WaitCheck<'a> {
    control: &'a Control,
    session: Option<&'a Session<'a>>,
}

impl<'a> WaitCheck<'a> {
    /// Creates the condition for waits before the session exists.
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

/// Shared state of one migration from a source to a sink.
pub(crate) struct Session<'a> {
    pub control: Control,
    /// Use of an accelerator to decode the incoming channels: automatic, required, or off.
    pub accelerator: Accelerator,
    /// Limit of the memory that the source can make this process allocate.
    pub memory: MemoryLimit,
    /// RAM that the QEMU beside this relay omits.
    pub unused_ram: Vec<UnusedRam>,
    /// Limit of the CPU time of all channel threads, incoming and outgoing together.
    pub cpu: Arc<CpuBudget>,
    pub flow: Arc<Flow<Batch>>,
    pub barrier: Barrier,
    pub sink: &'a dyn Sink,
    /// Counters of each incoming multifd channel. The last entry counts the main channel.
    pub received: Vec<Counters>,
    /// Counts of pages that workers have forwarded: with content, and zero.
    pub pages: Counters,
    pub barriers: AtomicU64,
    pub threads: ThreadTimes,
    pub since: Instant,
    /// Maximum time without data from another host; zero for no limit.
    pub silence_timeout: Duration,
    /// Time in which a source may query the outcome.
    pub query_period: Duration,
    /// Id of the migration that this process has chosen.
    pub id: MigrationId,
    /// State of the handover from the source, as the destination's side of it.
    pub destination_handover: DestinationHandover,
    /// State of the handover to the destination, as the source's side of it.
    pub source_handover: SourceHandover,
    /// True once postcopy has begun. From then on the source does not resume its guest by itself, and its channels carry no
    /// pages.
    switched: AtomicBool,
    /// In postcopy: true once the guest may run at the destination, although some of its pages have not arrived.
    may_run_there: AtomicBool,
    /// True while the source's QEMU would resume its guest if the connection ended. This QEMU has not yet received the answer
    /// that the devices are loaded.
    source_resumes: AtomicBool,
    /// Time at which the destination had the guest; unset before.
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
        let commit_connections = if sink.is_guest() { channels + 1 } else { 1 };
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
            destination_handover: DestinationHandover::new(commit_connections, control.life()),
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

    /// Returns true if a failure that the watch thread finds, for example the end of a connection, can still end the migration.
    pub(crate) fn may_fail(&self) -> bool {
        let is_the_sources = match self.sink.is_guest() {
            true => {
                self.destination_handover.side() == DestinationSide::Loading && !self.is_switched()
            }
            false => !self.source_handover.is_offered(),
        };
        is_the_sources && !self.source_handover.failure.is_set()
    }

    /// Records `error` if it is the first error, then ends every thread's wait. Has no effect after the commit (see
    /// [`SourceHandover::fail`]).
    pub(crate) fn fail(&self, error: MigrationError) {
        if self.source_handover.fail(error) {
            self.release();
        }
    }

    /// Records that the main thread has ended with `error`. Also has an effect after the commit.
    pub(crate) fn end(&self, error: MigrationError) {
        if self.source_handover.end(error) {
            self.release();
        }
    }

    /// Ends all waits, and aborts the sink.
    fn release(&self) {
        self.destination_handover.abandon();
        self.control.life().close();
        self.sink.abort();
    }

    /// Waits until every reader thread is paused at the barrier: before its first page, at a sync point, or after its last
    /// page.
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

    /// Starts RAM at the sink, and sends the device sections that follow the RAM section's START. Then releases the readers.
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

    /// Records the offer: next the source receives the answer that all is loaded. The source may then release the guest, so a
    /// cancel is too late. Returns false if the migration has failed.
    pub(crate) fn offer(&self) -> bool {
        let may = self.source_handover.offer();
        self.control.set_too_late(may);
        may
    }

    /// Records that the source has resumed its guest after the offer. A cancel is possible again.
    pub(crate) fn record_taken_back(&self) {
        self.source_handover.taken_back();
        self.control.set_too_late(false);
    }

    /// Commits the handover to the destination; returns false if the migration has failed or was cancelled in time. After true,
    /// the caller sends EOF next. From then on no failure changes the outcome, and a cancel is ignored.
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

    /// Records the start of postcopy. From then on a cancel is ignored.
    pub(crate) fn switch(&self) {
        self.control.set_too_late(true);
        self.set_switched();
    }

    /// Records the start of postcopy without making a cancel too late. For a guest of this process: until the guest runs, a
    /// cancel is still possible.
    pub(crate) fn set_switched(&self) {
        self.switched.store(true, Ordering::Release);
    }

    /// Returns true once postcopy has begun.
    pub(crate) fn is_switched(&self) -> bool {
        self.switched.load(Ordering::Acquire)
    }

    /// In postcopy, records that the next bytes allow the destination to run the guest. If the migration fails later, the guest
    /// lacks some of its pages until source and destination are reconnected.
    pub(crate) fn switch_over(&self, hooks: Hooks<'_>) -> Result<(), MigrationError> {
        self.call().check()?;
        if let Some(on_commit) = hooks.on_commit {
            on_commit();
        }
        self.may_run_there.store(true, Ordering::Release);
        Ok(())
    }

    /// Records that the package of devices asks for an answer. Until the answer is sent, the source's QEMU resumes its guest if
    /// the connection ends.
    pub(crate) fn note_source_resumes(&self) {
        self.source_resumes.store(true, Ordering::Release);
    }

    /// Must be called before each answer to the source. Notes the answer that the devices are loaded: from then on the source's
    /// QEMU no longer resumes its guest if the connection ends.
    pub(crate) fn note_answer(&self, message: &ReturnMessage<'_>) {
        if *message == ReturnMessage::Pong(DEVICES_LOADED) {
            self.source_resumes.store(false, Ordering::Release);
        }
    }

    /// Returns true while the source's QEMU would resume its guest if the connection ended.
    pub(crate) fn source_resumes(&self) -> bool {
        self.source_resumes.load(Ordering::Acquire)
    }

    /// Returns true once [`Session::switch_over`] has succeeded.
    pub(crate) fn may_run_there(&self) -> bool {
        self.may_run_there.load(Ordering::Acquire)
    }

    /// Settles the outcome of the handover: by the destination's statement, or with `None` if there is none.
    pub(crate) fn settle(&self, statement: Option<DestinationStatement>) {
        self.source_handover.settle(statement);
        if self.source_handover.outcome() == Some(SourceOutcome::Moved) {
            // Set before the source knows the outcome: an observer need not wait for that.
            self.control.set_status(Status::Completed);
            let _ = self.moved_at.set(self.control.life().now());
        }
    }

    /// Returns the information that outcome queries need. `refuse` is called to end the migration.
    pub(crate) fn query_subject<'s>(&'s self, refuse: &'s (dyn Fn() + Sync)) -> QuerySubject<'s> {
        QuerySubject {
            id: self.id,
            destination_handover: &self.destination_handover,
            refuse,
        }
    }

    /// Returns the time from the source's first connection until the destination had the guest, or until now.
    pub(crate) fn total(&self) -> Duration {
        let moved_at = self.moved_at.get().copied();
        let end = moved_at.unwrap_or_else(|| self.control.life().now());
        end.saturating_duration_since(self.since)
    }

    /// Returns the statistics of this migration. `machine` is the machine type of the VM.
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

/// Statistics of one migration through a relay.
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
