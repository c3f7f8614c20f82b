//! Monitoring and control of a migration: state, events, options that may change while it runs, and cancel. The migration's
//! threads also check here whether it has ended.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use hotlift_net::admission::Listener;
use hotlift_net::transport::Address;
use hotlift_wire::settle::MigrationId;

use crate::accelerator_stats::AcceleratorStats;
use crate::error::MigrationError;
use crate::figures::{JobFigures, MethodFigures, ThreadCpu};
use crate::life::Life;
use crate::life::threads::spawn;
pub use crate::life::wake_fd::WakeFd;
use crate::lock::lock;
use crate::options::{Options, StreamOptions};
pub use crate::pacing::SharedRate;
use crate::pacing::{Pace, Pacer};
use crate::progress::Stall;
use crate::remote::{Connecting, Dialing};
use crate::status::{MigrationEvent, Status};
use crate::steering::Steering;
use crate::stream::main_send::MainLink;
use crate::stream::multifd_send::Sending;
use crate::stream::rejections::Rejections;

/// Callback for events. It runs in the thread in which an event happens, and must not block for long.
pub type Watcher = Box<dyn Fn(MigrationEvent) + Send + Sync>;

/// A handle on one migration, shared by its threads and its callers. All clones refer to the same migration.
#[derive(Clone, Default)]
pub struct Control(Arc<Shared>);

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Shared {
    status: AtomicU8,
    /// At a destination: id of the migration, which a source names in its outcome queries.
    id: OnceLock<MigrationId>,
    life: Life,
    /// True once the guest has been handed over.
    too_late: AtomicBool,
    watcher: Option<Watcher>,
    rejections: Rejections,
    stats: Arc<AcceleratorStats>,
    steering: Steering,
    /// Set by [`Control::proceed`].
    proceeds: Mutex<bool>,
    /// Set by [`Control::start_postcopy`].
    postcopy: AtomicBool,
    /// Set by [`Control::resume`]; cleared by [`Control::take_resume`].
    resume: Mutex<Option<Address>>,
    /// The connection of a postcopy, for [`Control::pause_postcopy`].
    postcopy_link: Mutex<Weak<MainLink>>,
    /// Set by [`Control::suspect_peer`].
    peer_is_suspect: AtomicBool,
    /// See [`Control::stall`].
    stall: Mutex<Option<Stall>>,
    /// See [`Control::connecting`].
    connecting: Connecting,
    /// Set by [`Control::set_takes_pages`].
    takes_pages: AtomicBool,
    /// Set by [`Control::pause_postcopy`] at a destination; cleared by [`Control::take_pause`].
    pause: AtomicBool,
    /// Set by [`Control::recover`]; cleared by [`Control::await_recovery`].
    recovery: Mutex<Option<Listener>>,
}

impl Control {
    /// Creates the control of a migration that has not started.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the control of a migration that has not started, with a watcher that receives all events.
    #[must_use]
    pub fn watched(watcher: Watcher) -> Self {
        Self(Arc::new(Shared {
            watcher: Some(watcher),
            ..Shared::default()
        }))
    }

    /// Sends `event` to the watcher.
    pub(crate) fn report(&self, event: MigrationEvent) {
        if let Some(watcher) = &self.0.watcher {
            watcher(event);
        }
    }

    /// Returns the present state.
    #[must_use]
    pub fn status(&self) -> Status {
        let status =
            Status::ALL[usize::from(self.0.status.load(Ordering::Acquire)) % Status::ALL.len()];
        match status {
            // The migration's own thread sets this state as soon as it notices the cancel.
            Status::Setup | Status::Active | Status::PreSwitchover | Status::Device
                if self.is_cancelled() && !self.0.too_late.load(Ordering::Acquire) =>
            {
                Status::Cancelling
            }
            _ => status,
        }
    }

    pub(crate) fn set_status(&self, status: Status) {
        let before = self.0.status.swap(status as u8, Ordering::AcqRel);
        self.0.steering.phase().set(match status {
            Status::Setup => Pace::Opening,
            Status::PreSwitchover | Status::Device => Pace::Paused,
            _ => Pace::Running,
        });
        if before != status as u8 {
            self.report(MigrationEvent::Status(status));
        }
    }

    /// Returns true if `id` names this migration in outcome queries.
    #[must_use]
    pub fn has_id(&self, id: &[u8; 16]) -> bool {
        self.0.id.get().is_some_and(|own| own.0 == *id)
    }

    pub(crate) fn set_id(&self, id: MigrationId) {
        // The first one is kept: a control belongs to one migration.
        let _ = self.0.id.set(id);
    }

    /// Sets whether a cancel is too late to have an effect, because the guest has been handed over.
    pub(crate) fn set_too_late(&self, too_late: bool) {
        self.0.too_late.store(too_late, Ordering::Release);
        // A pending cancel takes effect once it is no longer too late.
        self.0.life.wake();
    }

    /// Returns job statistics of the compression method so far, at this end of the migration.
    #[must_use]
    pub fn jobs(&self) -> JobFigures {
        self.0.stats.read()
    }

    /// Returns statistics of zero page detection so far. They are empty unless devices have to detect zero pages.
    #[must_use]
    pub fn zero_jobs(&self) -> JobFigures {
        self.0.stats.read_zero()
    }

    pub(crate) fn accelerator_stats(&self) -> &Arc<AcceleratorStats> {
        &self.0.stats
    }

    /// Returns the number of rejected connections, which did not belong to the migration, by the reason of the rejection.
    #[must_use]
    pub fn rejected_connections(&self) -> BTreeMap<String, u64> {
        self.0.rejections.counts()
    }

    /// Returns the counters of rejected connections.
    pub(crate) fn rejections(&self) -> &Rejections {
        &self.0.rejections
    }

    /// Asks the migration to end. The guest then continues at the source, with these exceptions:
    ///
    /// - Once the source has handed the guest over, the cancel has no effect, and the migration completes.
    /// - In [`Status::PostcopyPaused`], the migration abandons the pages that the guest still needs.
    /// - In [`Status::PostcopyActive`], the cancel has no effect.
    pub fn cancel(&self) {
        // If this cancel were stored, a later loss of the connection would abandon the guest's pages.
        if self.0.status.load(Ordering::Acquire) == Status::PostcopyActive as u8 {
            return;
        }
        self.0.life.cancel();
    }

    /// Continues a migration that waits in [`Status::PreSwitchover`]; does nothing in any other state.
    pub fn proceed(&self) {
        if self.status() == Status::PreSwitchover {
            *lock(&self.0.proceeds) = true;
            self.0.life.wake();
        }
    }

    /// Starts postcopy as soon as possible: the guest then runs at the destination before all its pages are there. Has no
    /// effect without `postcopy-ram`, or once the guest has been stopped.
    pub fn start_postcopy(&self) {
        self.0.postcopy.store(true, Ordering::Release);
        self.0.life.wake();
    }

    /// Returns true once [`Control::start_postcopy`] was called.
    pub(crate) fn wants_postcopy(&self) -> bool {
        self.0.postcopy.load(Ordering::Acquire)
    }

    /// Continues a migration that waits in [`Status::PostcopyPaused`]. It connects to `to`, where its destination listens again
    /// (`migrate-recover`). Returns false in any other state.
    pub fn resume(&self, to: &Address) -> bool {
        let is_paused = self.status() == Status::PostcopyPaused;
        if is_paused {
            *lock(&self.0.resume) = Some(to.clone());
            self.0.life.wake();
        }
        is_paused
    }

    /// Waits up to `time` for [`Control::resume`], and returns its address; `None` if it was not called.
    pub(crate) fn take_resume(&self, time: Duration) -> Option<Address> {
        let until = Instant::now() + time;
        self.0
            .life
            .sleep_while(until, || lock(&self.0.resume).is_none());
        lock(&self.0.resume).take()
    }

    /// Ends the connection of a migration in [`Status::PostcopyActive`], as if it were lost. Works at the source, and at a
    /// destination whose guest is in this process. Otherwise does nothing and returns false.
    pub fn pause_postcopy(&self) -> bool {
        if self.status() != Status::PostcopyActive {
            return false;
        }
        let link = lock(&self.0.postcopy_link).upgrade();
        match link {
            Some(link) => link.transport.shutdown(Shutdown::Both),
            None if !self.0.takes_pages.load(Ordering::Acquire) => return false,
            None => {
                self.0.pause.store(true, Ordering::Release);
                self.0.life.wake();
            }
        }
        true
    }

    /// Reports that the peer's host may be lost, because another connection to it has broken. From now on, the migration fails
    /// as soon as the silence of that host counts as a stall. It does not wait for the rest of `silence-timeout`.
    pub fn suspect_peer(&self) {
        self.0.peer_is_suspect.store(true, Ordering::Release);
    }

    /// Returns the host that stalls the migration at present; `None` if no host does.
    #[must_use]
    pub fn stall(&self) -> Option<Stall> {
        *lock(&self.0.stall)
    }

    /// Sets the host that stalls the migration; `None` if no host does.
    pub fn set_stall(&self, stall: Option<Stall>) {
        *lock(&self.0.stall) = stall;
    }

    /// Returns the address that this side is connecting to, and for how long; `None` if it is not connecting.
    #[must_use]
    pub fn connecting(&self) -> Option<(Address, Duration)> {
        self.0.connecting.address()
    }

    /// Returns the context for an outgoing connection: the lifetime that ends its attempts, and the state for
    /// [`Control::connecting`].
    pub(crate) fn dialing(&self) -> Dialing {
        Dialing {
            life: self.0.life.clone(),
            connecting: self.0.connecting.clone(),
        }
    }

    /// Returns true once [`Control::suspect_peer`] was called.
    pub(crate) fn is_peer_suspect(&self) -> bool {
        self.0.peer_is_suspect.load(Ordering::Acquire)
    }

    /// Records that this side is the destination of a postcopy, which polls [`Control::take_pause`].
    pub(crate) fn set_takes_pages(&self) {
        self.0.takes_pages.store(true, Ordering::Release);
    }

    /// Returns true if [`Control::pause_postcopy`] was called at a destination since the last call.
    pub(crate) fn take_pause(&self) -> bool {
        self.0.pause.swap(false, Ordering::AcqRel)
    }

    /// Sets the connection that [`Control::pause_postcopy`] closes.
    pub(crate) fn set_postcopy_link(&self, link: &Arc<MainLink>) {
        *lock(&self.0.postcopy_link) = Arc::downgrade(link);
    }

    /// Makes a destination that waits in [`Status::PostcopyPaused`] continue with a source that connects to `listener`
    /// (`migrate-recover`). In [`Status::PostcopyRecover`], it drops its present connection, on which it has not agreed with a
    /// source yet.
    ///
    /// # Errors
    /// `listener` itself in any other state.
    pub fn recover(&self, listener: Listener) -> Result<(), Listener> {
        // A client that connected to the earlier listener may send nothing useful for long.
        let waits = [Status::PostcopyPaused, Status::PostcopyRecover];
        if !waits.contains(&self.status()) {
            return Err(listener);
        }
        *lock(&self.0.recovery) = Some(listener);
        self.0.life.wake();
        Ok(())
    }

    /// Returns true if [`Control::recover`] was called since the last listener was taken.
    pub(crate) fn has_recovery(&self) -> bool {
        lock(&self.0.recovery).is_some()
    }

    /// Waits for [`Control::recover`], and returns its listener; `None` once the migration is stopped.
    pub(crate) fn await_recovery(&self) -> Option<Listener> {
        /// Duration of one wait in the loop. Only a call of [`Control::recover`] or the end of the migration ends the loop.
        const ROUND: Duration = Duration::from_secs(60);
        loop {
            let until = Instant::now() + ROUND;
            self.0
                .life
                .sleep_while(until, || lock(&self.0.recovery).is_none());
            match lock(&self.0.recovery).take() {
                None if !self.0.life.is_stopped() => {}
                listener => return listener,
            }
        }
    }

    /// Applies the options that may change while a migration runs (`live` in the table of options). Ignores all other options.
    pub fn change(&self, options: &Options) {
        self.0.steering.change(options);
        self.0.life.wake();
    }

    /// Makes a migration that has not begun share the limit `rate` with others, in addition to its own `max-bandwidth`. While
    /// its guest is paused, its bytes count, but the migration does not wait.
    pub fn share_rate(&self, rate: &SharedRate) {
        self.0.steering.share_rate(rate);
    }

    /// Waits until `bytes` of other traffic, not of a migration, may be sent at `rate`, or until this control is cancelled.
    pub fn wait_for_rate(&self, rate: &SharedRate, bytes: usize) {
        rate.wait(bytes, &self.0.life);
    }

    /// Returns the settings that may change while the migration runs.
    pub(crate) fn steering(&self) -> &Steering {
        &self.0.steering
    }

    /// Returns the CPU time of all channel threads of this side. Each thread records its CPU time after each packet.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        let used = self.0.steering.cpu_used();
        used.into_iter().map(|(_, time)| time).sum()
    }

    /// Returns the CPU time of each thread that [`Control::cpu_time`] includes.
    #[must_use]
    pub fn cpu_times(&self) -> Vec<ThreadCpu> {
        let thread = |(name, time): (String, Duration)| ThreadCpu {
            name,
            cpu_s: time.as_secs_f64(),
        };
        let used = self.0.steering.cpu_used();
        used.into_iter().map(thread).collect()
    }

    /// Returns packets and pages by method so far; empty without method `auto`, which selects a method for each packet.
    #[must_use]
    pub fn method_figures(&self) -> Vec<MethodFigures> {
        let auto = self.0.steering.auto();
        auto.map(|auto| auto.figures()).unwrap_or_default()
    }

    /// Returns the state that the multifd channels of a sender share.
    pub(crate) fn sending(&self, options: &StreamOptions, pacer: &Arc<Pacer>) -> Sending {
        Sending {
            auto: self.0.steering.make_auto(options),
            pacer: Arc::clone(pacer),
            cpu: self.0.steering.cpu_budget(options),
            stats: Arc::clone(&self.0.stats),
            life: self.0.life.clone(),
        }
    }

    /// Waits up to `time` for [`Control::proceed`]. Returns true if it has been called since the migration entered
    /// [`Status::PreSwitchover`].
    pub(crate) fn may_proceed(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        self.0.life.sleep_while(until, || !*lock(&self.0.proceeds));
        *lock(&self.0.proceeds)
    }

    /// Returns true once [`Control::cancel`] was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.life.is_cancelled()
    }

    /// Creates a descriptor that wakes polls at a cancel and at [`Control::wake`].
    ///
    /// # Errors
    /// The system's error if it cannot create a descriptor.
    pub fn wake_fd(&self) -> std::io::Result<WakeFd> {
        WakeFd::new(&self.0.life)
    }

    /// Wakes the polls of each [`WakeFd`], after a change that they wait for.
    pub fn wake(&self) {
        self.0.life.wake();
    }

    /// Returns the lifetime, which ends the migration and its waits.
    pub(crate) fn life(&self) -> &Life {
        &self.0.life
    }
}

/// Runs one side of a migration in a new thread with the name `name`, and updates the side's status.
pub(crate) fn run_as<T: Send>(
    name: &str,
    control: &Control,
    work: impl FnOnce() -> Result<T, MigrationError> + Send,
) -> Result<T, MigrationError> {
    control.set_status(Status::Setup);
    let outcome = thread::scope(|scope| spawn(scope, name.to_owned(), work)?.join())
        .and_then(|outcome| outcome);
    control.set_status(match &outcome {
        // The guest runs, and waits for pages.
        Err(MigrationError::PagesMissing { .. }) if control.status() == Status::PostcopyPaused => {
            Status::PostcopyPaused
        }
        Ok(_) => Status::Completed,
        Err(MigrationError::Cancelled) => {
            control.set_status(Status::Cancelling);
            Status::Cancelled
        }
        Err(_) => Status::Failed,
    });
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_bandwidth_reaches_a_packet_that_waits_at_the_old_one() {
        let control = Control::new();
        let slow = Options {
            stream: StreamOptions {
                max_bandwidth: 1,
                ..StreamOptions::default()
            },
            ..Options::default()
        };
        let pacer = control.steering().pacer(&slow.stream);
        // Takes days at this rate.
        pacer.wait(1 << 20, control.life());
        thread::scope(|scope| {
            let waits = scope.spawn(|| pacer.wait(1, control.life()));
            control.change(&Options {
                stream: StreamOptions {
                    max_bandwidth: 1 << 30,
                    ..slow.stream
                },
                ..slow
            });
            waits.join().unwrap();
        });
        assert!(!control.life().is_stopped());
    }
}
