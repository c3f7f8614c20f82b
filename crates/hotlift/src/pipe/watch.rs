//! The thread that sees what no other one can while it waits: a cancel, and a source that has gone.
//!
//! A destination that takes nothing stops the workers, those stop the readers, and then nobody reads from
//! the source, whose going would be noticed there.

use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::MigrationError;
use crate::liveness::Liveness;
use crate::pipe::hooks::RelayProgress;
use crate::pipe::session::Session;
use crate::pipe::source::Source;

/// How often it looks.
const LOOK: Duration = Duration::from_millis(50);

/// How often progress is told.
pub(crate) const REPORT: Duration = Duration::from_millis(500);

/// How long a destination that has lost a channel may still say that it has loaded the guest. It may have read everything
/// before; if not, a QEMU waits for the rest without end, and reads its other channels no more.
const LOST: Duration = Duration::from_secs(5);

/// How long the graceful close towards a source may take before its main channel is closed all the same.
const GRACEFUL_CLOSE: Duration = Duration::from_secs(8);

/// Ends the watch when the main thread does, however it does.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    over: Mutex<bool>,
    changed: Condvar,
}

impl Watch {
    /// The migration is over.
    pub(crate) fn end(&self) {
        *self.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits for [`LOOK`]; true once it is over.
    fn rest(&self) -> bool {
        let over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        let (over, _) = self
            .changed
            .wait_timeout_while(over, LOOK, |over| !*over)
            .unwrap_or_else(PoisonError::into_inner);
        *over
    }

    /// Watches, and tells `on_progress`, until the end.
    pub(crate) fn run(
        &self,
        session: &Session<'_>,
        source: &dyn Source,
        total_bytes: u64,
        on_progress: Option<&(dyn Fn(&RelayProgress) + Sync)>,
    ) {
        let mut told = Instant::now();
        let mut failed_at = None;
        let mut lost_at = None;
        let streams = || session.sink.streams().into_iter().chain(source.streams());
        let mut liveness = Liveness::new(session.silence_timeout, streams());
        while !self.rest() {
            if session.control.is_cancelled()
                && !session.giving.is_offered()
                && !session.is_switched()
            {
                session.fail(MigrationError::Cancelled);
            }
            source.look(session);
            if !session.giving.is_offered() && source.has_gone() {
                session.fail(MigrationError::main_closed());
            }
            if !session.giving.is_offered()
                && !session.giving.is_committed()
                && let Some(channel) = session.sink.lost_channel()
                && lost_at.get_or_insert_with(Instant::now).elapsed() > LOST
            {
                session.fail(MigrationError::Closed { channel });
            }
            if let Err(error) = liveness.look_for(&session.control, streams())
                && !session.giving.is_offered()
                && !session.is_switched()
            {
                session.fail(error);
            }
            if session.giving.failure.is_set() {
                source.free_readers();
                let since = *failed_at.get_or_insert_with(Instant::now);
                if since.elapsed() > GRACEFUL_CLOSE {
                    source.shut_down();
                }
            }
            if let Some(on_progress) = on_progress
                && told.elapsed() >= REPORT
            {
                told = Instant::now();
                let pages = session.pages.read();
                on_progress(&RelayProgress {
                    elapsed: session.since.elapsed(),
                    received_bytes: session.received().transferred_bytes,
                    sent_bytes: session.sink.sent_bytes(),
                    normal_pages: pages.normal_pages,
                    zero_pages: pages.zero_pages,
                    barriers: session.barriers.load(Ordering::Relaxed),
                    total_bytes,
                });
            }
        }
    }
}

/// Ends a watch when it goes out of scope.
pub(crate) struct EndsWatch<'a>(pub &'a Watch);

impl Drop for EndsWatch<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
