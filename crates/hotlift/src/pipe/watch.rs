//! The watch thread. It handles events while all other threads are blocked: a cancel, and the loss of the source.
//!
//! A destination that reads nothing blocks the workers, and blocked workers block the readers. Then no thread reads from the
//! source, so no other thread notices that the source has disconnected.
//!
//! The watch thread sleeps until a connection ends, the lifetime changes, or a deadline passes. It wakes periodically only for
//! progress reports, and for samples of connections to other hosts ([`Liveness`]).

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hotlift_net::transport::Stream;
use rustix::event::{PollFd, PollFlags};

use crate::error::{Channel, MigrationError};
use crate::life::LONG;
use crate::life::wake_fd::WakeFd;
use crate::liveness::Liveness;
use crate::pipe::hooks::RelayProgress;
use crate::pipe::session::Session;
use crate::pipe::source::Source;

/// Interval of progress reports.
pub(crate) const REPORT: Duration = Duration::from_millis(500);

/// Time in which a destination may report that it has loaded the guest, after it has closed a channel. The destination may have
/// closed the channel because it has read everything. If not, a QEMU waits forever for the missing data, and no longer reads
/// its other channels.
const LOST_CHANNEL_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for the source to close its connections after a failure. Then this process closes the main channel.
const GRACEFUL_CLOSE: Duration = Duration::from_secs(8);

/// Optional callback for progress reports.
type OnProgress<'a> = Option<&'a (dyn Fn(&RelayProgress) + Sync)>;

/// Watch thread of one migration.
pub(crate) struct Watch<'a> {
    session: &'a Session<'a>,
    source: &'a dyn Source,
    wake_fd: WakeFd,
    is_over: AtomicBool,
}

impl<'a> Watch<'a> {
    /// Creates the watch thread's state.
    ///
    /// # Errors
    /// The system's error if it cannot create a descriptor.
    pub(crate) fn new(session: &'a Session<'a>, source: &'a dyn Source) -> io::Result<Self> {
        Ok(Self {
            session,
            source,
            wake_fd: WakeFd::new(session.control.life())?,
            is_over: AtomicBool::new(false),
        })
    }

    /// Returns a guard that ends the watch thread when the guard is dropped, even after a panic of the main thread.
    pub(crate) fn ends(&self) -> impl Drop {
        EndsWatch(self)
    }

    /// Runs the watch thread until the migration ends. Reports to `on_progress` every [`REPORT`].
    ///
    /// # Errors
    /// An event ends the migration: see `Watch::check`. Also the system's error if it cannot wait.
    pub(crate) fn run(
        &self,
        total_bytes: u64,
        on_progress: OnProgress<'_>,
    ) -> Result<(), MigrationError> {
        let session = self.session;
        let life = session.control.life();
        let streams = || {
            let incoming = self.source.streams();
            session.sink.streams().into_iter().chain(incoming)
        };
        let mut liveness = Liveness::new(session.silence_timeout, streams());
        let mut report_at = on_progress.map(|_| life.now() + REPORT);
        let (mut lost_until, mut closes_until) = (None, None);
        let mut has_failed = false;
        while !self.is_over.load(Ordering::Acquire) {
            let now = life.now();
            let is_over = |until: &Option<Instant>| until.is_some_and(|until| now >= until);
            let answers = liveness.poll_for(&session.control, streams());
            if session.may_fail()
                && let Err(error) = self.check(now, &mut lost_until, answers)
            {
                session.fail(error);
            }
            let next_poll = self.source.poll(session, now);
            if session.source_handover.failure.is_set() && !std::mem::replace(&mut has_failed, true)
            {
                self.source.free_readers(session);
                closes_until = Some(now + GRACEFUL_CLOSE);
            }
            if is_over(&closes_until) {
                closes_until = None;
                self.source.shut_down();
            }
            if let Some(on_progress) = on_progress.filter(|_| is_over(&report_at)) {
                report_at = Some(now + REPORT);
                on_progress(&self.progress(total_bytes));
            }
            let mut deadlines = vec![report_at, closes_until, next_poll, liveness.next(now)];
            let mut fds = Vec::new();
            if session.may_fail() {
                let ends = |stream| PollFd::new(stream, PollFlags::RDHUP);
                fds.extend(self.source.kept_open().map(ends));
                match lost_until {
                    None => fds.extend(session.sink.streams().into_iter().skip(1).map(ends)),
                    lost_until => deadlines.push(lost_until),
                }
            }
            let next = deadlines.into_iter().flatten().min();
            let wait = next.map_or(LONG, |next| next.saturating_duration_since(now));
            self.wake_fd
                .poll(&mut fds, wait)
                .map_err(|source| MigrationError::Connection {
                    channel: Channel::Main,
                    doing: "watching the connections",
                    source,
                })?;
        }
        Ok(())
    }

    /// Checks, at the time `now`, if the migration must end:
    ///
    /// - after a cancel
    /// - after the loss of the connection that the source must keep open
    /// - at the time `lost_until`, set here when the destination closes a channel
    /// - in precopy, if `answers` is an error: another host does not answer
    fn check(
        &self,
        now: Instant,
        lost_until: &mut Option<Instant>,
        answers: Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let session = self.session;
        // At a guest's destination, a cancel ends the waits without this thread. In a relay's postcopy, a cancel is ignored.
        let is_noticed = session.sink.is_guest() || session.is_switched();
        if session.control.is_cancelled() && !is_noticed {
            return Err(MigrationError::Cancelled);
        }
        if self.source.kept_open().is_some_and(Stream::is_hung_up) {
            return Err(MigrationError::main_closed());
        }
        if let Some(channel) = session.sink.lost_channel()
            && now >= *lost_until.get_or_insert(now + LOST_CHANNEL_TIMEOUT)
        {
            return Err(MigrationError::Closed { channel });
        }
        answers.or_else(|error| match session.is_switched() {
            true => Ok(()),
            false => Err(error),
        })
    }

    fn progress(&self, total_bytes: u64) -> RelayProgress {
        let session = self.session;
        let pages = session.pages.read();
        RelayProgress {
            elapsed: session.since.elapsed(),
            received_bytes: session.received().transferred_bytes,
            sent_bytes: session.sink.sent_bytes(),
            normal_pages: pages.normal_pages,
            zero_pages: pages.zero_pages,
            barriers: session.barriers.load(Ordering::Relaxed),
            total_bytes,
        }
    }
}

struct EndsWatch<'a>(&'a Watch<'a>);

impl Drop for EndsWatch<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Release);
        self.0.session.control.life().wake();
    }
}
