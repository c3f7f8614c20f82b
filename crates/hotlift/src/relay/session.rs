//! What the threads of one relayed migration share, and how any of them ends it.

use std::io::Write;
use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use hotlift_methods::{Accelerator, MemoryLimit};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::MigrationId;

use super::Hooks;
use super::batch::Batch;
use super::sink::Sink;
use crate::barrier::Barrier;
use crate::control::{Control, Status};
use crate::door::Asked;
use crate::error::{Channel, MigrationError};
use crate::failure::Failure;
use crate::figures::{Counters, Counts, ThreadCpu, ThreadTimes};
use crate::flow::Flow;
use crate::handover::{SourceSide, Taking, Verdict, Word};
use crate::stream::graceful_close;
use crate::stream::main_recv::Waiting;
use crate::transport::Stream;

/// How long a source may leave answers unread before it is given up.
const ANSWERING: Duration = Duration::from_secs(5);

/// The source's connections.
#[derive(Debug)]
pub(super) struct Upstream {
    pub main: Stream,
    /// By channel id.
    pub multifd: Vec<Stream>,
    /// The source is a relay.
    pub is_relay: bool,
    /// The source takes answers.
    pub return_path: bool,
    /// Keeps answers of different threads apart.
    answering: Mutex<()>,
}

impl Upstream {
    pub(super) fn new(
        main: Stream,
        multifd: Vec<Stream>,
        is_relay: bool,
        return_path: bool,
    ) -> Self {
        // A socket that refuses the time-out is one that has gone.
        let _ = main.set_write_timeout(ANSWERING);
        Self {
            main,
            multifd,
            is_relay,
            return_path,
            answering: Mutex::new(()),
        }
    }

    /// Sends answers, if the source takes any. One that has gone cannot be told; its going is noticed
    /// where it is read from.
    pub(super) fn answer(&self, bytes: &[u8]) {
        let _ = self.answer_surely(bytes);
    }

    /// The same, where it matters.
    ///
    /// # Errors
    /// [`MigrationError::Connection`] if the source has gone, or reads nothing.
    pub(super) fn answer_surely(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        if !self.return_path {
            return Ok(());
        }
        let _one = self
            .answering
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        (&self.main).write_all(bytes).map_err(|source| {
            // A part of a message may be on its way: nothing can follow it.
            self.main.shutdown(Shutdown::Both);
            MigrationError::Connection {
                channel: Channel::Main,
                doing: "answering the source",
                source,
            }
        })
    }

    /// Whether the source has closed its main channel.
    pub(super) fn is_closed(&self) -> bool {
        self.main.is_hung_up()
    }

    /// Frees the threads that read multifd channels.
    pub(super) fn shut_channels(&self) {
        for stream in &self.multifd {
            stream.shutdown(Shutdown::Both);
        }
    }

    pub(super) fn shut_down(&self) {
        for stream in std::iter::once(&self.main).chain(&self.multifd) {
            stream.shutdown(Shutdown::Both);
        }
    }

    /// Closes all connections, main so that what was said on it last arrives.
    pub(super) fn close(&self) {
        self.shut_channels();
        if !self.return_path {
            // It hears nothing, and what it writes on must not look taken.
            return self.shut_down();
        }
        graceful_close::close(&[&self.main]);
    }
}

/// Whether a wait is to go on.
pub(super) struct Call<'a> {
    control: &'a Control,
    session: Option<&'a Session<'a>>,
}

impl<'a> Call<'a> {
    /// Before there is a session.
    pub(super) fn early(control: &'a Control) -> Self {
        Self {
            control,
            session: None,
        }
    }
}

impl Waiting for Call<'_> {
    fn check(&self) -> Result<(), MigrationError> {
        let failed = self.session.is_some_and(|session| session.failure.is_set());
        let too_late = self.session.is_some_and(Session::is_offered);
        if failed || (self.control.is_cancelled() && !too_late) {
            return Err(MigrationError::Cancelled);
        }
        Ok(())
    }
}

/// One migration on its way through.
pub(super) struct Session<'a> {
    pub control: Control,
    /// Whether incoming channels use their method's accelerator.
    pub accelerator: Accelerator,
    /// What the source can make this relay take.
    pub memory: MemoryLimit,
    pub flow: Flow<Batch>,
    pub barrier: Barrier,
    pub sink: &'a dyn Sink,
    /// One an incoming multifd channel, and the last for main.
    pub received: Vec<Counters>,
    /// Pages that workers have passed on.
    pub pages: Counters,
    pub barriers: AtomicU64,
    pub threads: ThreadTimes,
    pub since: Instant,
    /// What this side calls the migration.
    pub id: MigrationId,
    /// The hand-over from a source that is a relay.
    pub taking: Taking,
    /// The hand-over to the other side.
    side: Mutex<SourceSide>,
    /// The other side has the guest.
    moved_at: OnceLock<Instant>,
    pub failure: Failure,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        control: Control,
        accelerator: Accelerator,
        memory: MemoryLimit,
        sink: &'a dyn Sink,
        received: Vec<Counters>,
        since: Instant,
        id: MigrationId,
    ) -> Self {
        // The last is that of main.
        let channels = received.len() - 1;
        Self {
            control,
            accelerator,
            memory,
            // One in the hands of each thread, and one between each pair of them.
            flow: Flow::new((0..2 * channels.max(1) + 2 * sink.workers()).map(|_| Batch::new())),
            barrier: Barrier::new(channels),
            sink,
            received,
            pages: Counters::default(),
            barriers: AtomicU64::new(0),
            threads: ThreadTimes::default(),
            since,
            id,
            taking: Taking::new(1),
            side: Mutex::default(),
            moved_at: OnceLock::new(),
            failure: Failure::default(),
        }
    }

    pub(super) fn call(&'a self) -> Call<'a> {
        Call {
            control: &self.control,
            session: Some(self),
        }
    }

    /// Keeps `error` if it is the first, and ends every thread's waiting. After the commit it does nothing:
    /// the other side may run the guest, and its stream is not to be touched.
    pub(super) fn fail(&self, error: MigrationError) {
        {
            let mut failure = self.failure.lock();
            self.lock_side().fail();
            if self.is_committed() {
                return;
            }
            failure.get_or_insert(error);
        }
        self.taking.abandon();
        self.control.stop();
        self.release_waiting();
        self.sink.abort();
    }

    /// The main thread has ended with `error`, before the commit or behind it.
    pub(super) fn end(&self, error: MigrationError) {
        if self.is_committed() {
            self.failure.keep(error);
        } else {
            self.fail(error);
        }
    }

    /// Ends every wait of the threads for each other: something failed, or everything is done.
    pub(super) fn release_waiting(&self) {
        self.flow.break_up();
        self.barrier.break_up();
    }

    /// The source is about to be told that all is loaded: it may give the guest up, and a cancel comes too
    /// late. False if the migration has failed.
    pub(super) fn offer(&self) -> bool {
        let may = self.lock_side().offer();
        self.control.set_too_late(may);
        may
    }

    /// The source has given the guest up.
    pub(super) fn source_released(&self) {
        self.lock_side().released();
    }

    /// The source has taken the guest back all the same.
    pub(super) fn source_kept_it(&self) {
        self.lock_side().taken_back();
        self.control.set_too_late(false);
    }

    /// Whether the source may have given the guest up.
    pub(super) fn is_offered(&self) -> bool {
        self.lock_side().is_offered()
    }

    fn lock_side(&self) -> MutexGuard<'_, SourceSide> {
        self.side.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts what the other side has said in place of what its going away looked like from here.
    pub(super) fn explain(&self, words: Option<String>) {
        if let (Some(failure), Some(reason)) = (&mut *self.failure.lock(), words)
            && matches!(
                failure,
                MigrationError::Connection { .. } | MigrationError::Closed { .. }
            )
        {
            *failure = MigrationError::Destination { reason };
        }
    }

    /// The point of no return: EOF goes out next, if this is true. From here on nothing that fails decides
    /// anything, and no cancel is heard.
    pub(super) fn commit(&self, hooks: Hooks<'_>) -> bool {
        let failure = self.failure.lock();
        if failure.is_some() || !self.lock_side().commit() {
            return false;
        }
        self.control.set_too_late(true);
        drop(failure);
        if let Some(on_commit) = hooks.on_commit {
            on_commit();
        }
        true
    }

    /// What became of the guest, by the other side's word or for want of one.
    pub(super) fn settle(&self, word: Option<Word>) {
        let mut side = self.lock_side();
        match word {
            Some(word) => side.hear(word),
            None => side.give_up(),
        };
        if side.verdict() == Some(Verdict::Moved) {
            // Whoever watches need not wait until the source knows it.
            self.control.set_status(Status::Completed);
            let _ = self.moved_at.set(Instant::now());
        }
    }

    /// Whether EOF may have gone out, unless the other side has said that it never runs the guest.
    pub(super) fn is_committed(&self) -> bool {
        self.lock_side().is_committed()
    }

    /// How the hand-over has ended, if it has.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        self.lock_side().verdict()
    }

    /// What questions are about; `refuse` ends the migration.
    pub(super) fn asked<'s>(&'s self, refuse: &'s (dyn Fn() + Sync)) -> Asked<'s> {
        Asked {
            id: self.id,
            taking: &self.taking,
            refuse,
        }
    }

    /// From the source's first connection until the other side had the guest.
    pub(super) fn total(&self) -> Duration {
        let end = self.moved_at.get().copied().unwrap_or_else(Instant::now);
        end.saturating_duration_since(self.since)
    }

    /// What was passed on of a VM of type `machine`.
    pub(super) fn relayed(&self, machine: &str) -> Relayed {
        Relayed {
            total: self.total(),
            received_bytes: self.received().transferred_bytes,
            sent_bytes: self.sink.sent_bytes(),
            pages: self.pages.read(),
            barriers: self.barriers.load(Ordering::Relaxed),
            machine: machine.to_owned(),
            method: self.sink.method(),
            passed_through: None,
            threads: self.threads.read(),
        }
    }

    pub(super) fn received(&self) -> Counts {
        self.received.iter().map(Counters::read).sum()
    }
}

/// What was passed on.
pub(super) struct Relayed {
    pub total: Duration,
    pub received_bytes: u64,
    pub sent_bytes: u64,
    pub pages: Counts,
    pub barriers: u64,
    pub machine: String,
    pub method: &'static str,
    pub passed_through: Option<String>,
    pub threads: Vec<ThreadCpu>,
}

/// The bytes of `messages`.
pub(super) fn encode(messages: &[ReturnMessage<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for message in messages {
        // Only block names can be refused, and none of these has one.
        let _ = message.encode(&mut bytes);
    }
    bytes
}
