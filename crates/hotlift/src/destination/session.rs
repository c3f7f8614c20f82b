//! What the threads of one incoming migration share, and how any of them ends it.

use std::io::Write;
use std::net::Shutdown;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotlift_mem::DirtyBitmap;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::multifd::Method;
use hotlift_wire::return_path::ReturnMessage;

use super::accept::Accepted;
use super::barrier::Barrier;
use crate::control::{Control, Status};
use crate::error::MigrationError;
use crate::figures::{Counters, Counts, ThreadTimes};
use crate::guest::Guest;
use crate::options::Options;

/// How far the hand-over of the guest has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Pages and device state are arriving; the guest is the source's.
    Loading,
    /// Everything is in place; the source decides.
    Loaded,
    /// The source has let go, and the guest is this side's.
    Taken,
}

struct Handover {
    phase: Phase,
    /// Connections that can still bring the source's decision.
    open: usize,
}

/// One incoming migration.
pub(super) struct Session<'a> {
    pub guest: &'a dyn Guest,
    pub options: &'a Options,
    pub control: Control,
    pub method: Method,
    pub accepted: Accepted,
    /// The guest's RAM blocks, as packets name them.
    pub blocks: Vec<RamBlockEntry>,
    /// Pages that hold something: received, or not known to be fresh.
    pub written: Vec<DirtyBitmap>,
    pub barrier: Barrier,
    pub counters: Vec<Counters>,
    pub started: Instant,
    handover: Mutex<Handover>,
    decided: Condvar,
    /// CPU time of the threads that have ended.
    pub threads: ThreadTimes,
    failure: Mutex<Option<MigrationError>>,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        guest: &'a dyn Guest,
        options: &'a Options,
        control: Control,
        method: Method,
        accepted: Accepted,
    ) -> Self {
        let channels = accepted.multifd.len();
        let written: Vec<_> = guest
            .ram()
            .iter()
            .map(|block| DirtyBitmap::new(block.pages()))
            .collect();
        if !guest.ram_is_fresh() {
            written.iter().for_each(DirtyBitmap::set_all);
        }
        let blocks = guest
            .ram()
            .iter()
            .map(|block| RamBlockEntry::new(block.name(), block.len() as u64))
            .collect();
        Self {
            guest,
            options,
            control,
            method,
            blocks,
            written,
            barrier: Barrier::new(channels),
            counters: (0..=channels).map(|_| Counters::default()).collect(),
            started: accepted.since,
            accepted,
            handover: Mutex::new(Handover {
                phase: Phase::Loading,
                open: channels + 1,
            }),
            decided: Condvar::new(),
            threads: ThreadTimes::default(),
            failure: Mutex::new(None),
        }
    }

    fn lock_handover(&self) -> MutexGuard<'_, Handover> {
        self.handover.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_failure(&self) -> MutexGuard<'_, Option<MigrationError>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn phase(&self) -> Phase {
        self.lock_handover().phase
    }

    /// Everything has arrived and was loaded: the source may now let go.
    pub(super) fn loaded(&self) {
        self.lock_handover().phase = Phase::Loaded;
        self.control.set_status(Status::Device);
    }

    /// The source has let go, says one of the connections; the first to say so makes the guest run.
    pub(super) fn take_over(&self) -> Result<(), MigrationError> {
        {
            let mut handover = self.lock_handover();
            if handover.phase != Phase::Loaded {
                return Ok(());
            }
            handover.phase = Phase::Taken;
        }
        let resumed = self.guest.resume();
        if resumed.is_ok() {
            self.control.set_status(Status::Completed);
            // On every socket, so that one that is cut or garbled leaves the source no doubt.
            let mut running = Vec::new();
            if ReturnMessage::Shut(0).encode(&mut running).is_ok() {
                for mut stream in std::iter::once(&self.accepted.main).chain(self.answer_sockets())
                {
                    let _ = stream.write_all(&running);
                }
            }
        }
        self.decided.notify_all();
        Ok(resumed?)
    }

    /// Multifd connections that take answers: those of a Hotlift. QEMU reads nothing there.
    fn answer_sockets(&self) -> impl Iterator<Item = &crate::transport::Stream> {
        let count = if self.accepted.is_hotlift {
            self.accepted.multifd.len()
        } else {
            0
        };
        self.accepted.multifd[..count].iter()
    }

    /// A connection can bring no decision any more.
    pub(super) fn connection_ended(&self) {
        self.lock_handover().open -= 1;
        self.decided.notify_all();
    }

    /// Waits until the guest is taken over, or until no connection can bring the word for it; true
    /// if it was taken over.
    pub(super) fn wait_for_decision(&self) -> bool {
        let handover = self
            .decided
            .wait_while(self.lock_handover(), |handover| {
                handover.phase == Phase::Loaded && handover.open > 0
            })
            .unwrap_or_else(PoisonError::into_inner);
        handover.phase == Phase::Taken
    }

    /// Keeps `error` if it is the first, and ends every thread's waiting. The main channel stays
    /// open, to tell the source.
    pub(super) fn fail(&self, error: MigrationError) {
        {
            let mut failure = self.lock_failure();
            if failure.is_none() {
                *failure = Some(error);
            }
        }
        self.control.stop();
        self.barrier.break_up();
        for stream in &self.accepted.multifd {
            stream.shutdown(Shutdown::Both);
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.lock_failure().is_some()
    }

    pub(super) fn take_failure(&self) -> Option<MigrationError> {
        self.lock_failure().take()
    }

    pub(super) fn counts(&self) -> Counts {
        self.counters.iter().map(Counters::read).sum()
    }

    /// How long the migration has taken.
    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Counters of the main channel.
    pub(super) fn main_counters(&self) -> &Counters {
        &self.counters[self.counters.len() - 1]
    }

    /// What ended the migration, as one line, if something has.
    pub(super) fn failure_text(&self) -> Option<String> {
        self.lock_failure().as_ref().map(MigrationError::chain)
    }

    /// A channel's thread has ended. Once everything has arrived a lost channel is no failure, as
    /// long as another can bring the source's word.
    pub(super) fn channel_ended(&self, outcome: Result<(), MigrationError>) {
        if let Err(error) = outcome
            && (self.phase() == Phase::Loading || matches!(error, MigrationError::Guest(_)))
        {
            self.fail(error);
        }
        self.connection_ended();
    }

    /// Closes every connection in both directions.
    pub(super) fn shut_down(&self) {
        for stream in std::iter::once(&self.accepted.main).chain(&self.accepted.multifd) {
            stream.shutdown(Shutdown::Both);
        }
    }
}
