//! Watching and steering a migration from outside: state, events, what may be changed while it runs,
//! cancel, and the way every thread of it learns that it is over.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use hotlift_wire::settle::MigrationId;

use crate::accelerator_stats::AcceleratorStats;
use crate::auto::Auto;
use crate::cpu_limit::CpuBudget;
use crate::figures::{JobFigures, MethodFigures, ThreadCpu};
use crate::options::Options;
use crate::pacing::Pacer;
pub use crate::pacing::SharedRate;
use crate::progress::Stall;
use crate::stream::main_send::MainLink;
use crate::threads::lock;
use crate::transport::{Address, Listener};

/// State of a migration; QEMU's names (`MigrationStatus`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Not started.
    None,
    /// Connecting and sending the list of RAM blocks.
    Setup,
    /// Sending rounds while the guest runs.
    Active,
    /// The guest stands still until [`Control::proceed`], with `pause-before-switchover`.
    PreSwitchover,
    /// The guest stands still; the rest of its state is on its way.
    Device,
    /// The guest runs at the destination, and gets its pages as it asks for them.
    PostcopyActive,
    /// The same, and the connection is lost: see [`Control::resume`] and [`Control::recover`].
    PostcopyPaused,
    /// Another connection takes the place of the one that was lost.
    PostcopyRecover,
    /// The guest runs on the destination.
    Completed,
    /// It failed; the guest is given back to the source.
    Failed,
    /// A cancel was asked for.
    Cancelling,
    /// It was cancelled; the guest runs on the source.
    Cancelled,
}

impl Status {
    /// All states.
    pub const ALL: [Self; 12] = [
        Self::None,
        Self::Setup,
        Self::Active,
        Self::PreSwitchover,
        Self::Device,
        Self::PostcopyActive,
        Self::PostcopyPaused,
        Self::PostcopyRecover,
        Self::Completed,
        Self::Failed,
        Self::Cancelling,
        Self::Cancelled,
    ];

    /// QEMU's name of the state.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Setup => "setup",
            Self::Active => "active",
            Self::PreSwitchover => "pre-switchover",
            Self::Device => "device",
            Self::PostcopyActive => "postcopy-active",
            Self::PostcopyPaused => "postcopy-paused",
            Self::PostcopyRecover => "postcopy-recover",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }
}

/// What happens in a migration, as it happens; QMP's events of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigrationEvent {
    /// The state has changed (`MIGRATION`).
    Status(Status),
    /// The dirty log was read, for the so-manyth time; 1 is its start, when all pages count as dirty
    /// (`MIGRATION_PASS`).
    Pass(u64),
    /// The guest was stopped to be switched over (`STOP`).
    Stopped,
    /// The guest runs: here again after a failure, or now, at a destination (`RESUME`).
    Resumed,
}

/// Takes events, on the thread in which they happen; must not block for long.
pub type Watcher = Box<dyn Fn(MigrationEvent) + Send + Sync>;

/// Reasons to turn strangers away that are told apart: what they say of themselves is in some.
const REASONS: usize = 64;

/// A handle on one migration, shared by its threads and by whoever steers it. Clones are the same
/// migration.
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
    /// What it is asked about by, at a destination.
    id: OnceLock<MigrationId>,
    cancelled: AtomicBool,
    /// The guest has been handed over.
    too_late: AtomicBool,
    watcher: Option<Watcher>,
    /// Connections of strangers, by what was wrong with them.
    turned_away: Mutex<BTreeMap<String, u64>>,
    stats: AcceleratorStats,
    /// Set by [`Control::proceed`].
    proceeds: Mutex<bool>,
    /// Set by [`Control::start_postcopy`].
    postcopy: AtomicBool,
    /// Set by [`Control::resume`], until it is taken.
    resume: Mutex<Option<Address>>,
    /// The connection of a postcopy, for [`Control::pause_postcopy`].
    postcopy_link: Mutex<Weak<MainLink>>,
    /// Set by [`Control::suspect_peer`].
    peer_is_suspect: AtomicBool,
    /// See [`Control::stall`].
    stall: Mutex<Option<Stall>>,
    /// Set by [`Control::set_takes_pages`].
    takes_pages: AtomicBool,
    /// Set by [`Control::pause_postcopy`] at a destination, until it is taken.
    pause: AtomicBool,
    live: Mutex<Live>,
    /// Set by [`Control::recover`], until it is taken.
    recovery: Mutex<Option<Listener>>,
    /// Set once by whatever ends the migration before its time.
    stopped: Mutex<bool>,
    wake: Condvar,
}

/// What may change while a migration runs.
#[derive(Default)]
struct Live {
    /// The latest options of [`Control::change`].
    changed: Option<Options>,
    /// What this migration keeps together with others.
    shared: Option<SharedRate>,
    /// Paces this migration.
    pacer: Option<Arc<Pacer>>,
    /// Paces the pages of a postcopy that nobody has asked for.
    postcopy_pacer: Option<Arc<Pacer>>,
    /// Limits its CPU time.
    cpu: Option<Arc<CpuBudget>>,
    /// Chooses the method of its packets.
    auto: Option<Arc<Auto>>,
}

impl Control {
    /// A migration that has not started.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, with somebody who hears of all that happens in it.
    #[must_use]
    pub fn watched(watcher: Watcher) -> Self {
        Self(Arc::new(Shared {
            watcher: Some(watcher),
            ..Shared::default()
        }))
    }

    /// Tells whoever watches.
    pub(crate) fn tell(&self, event: MigrationEvent) {
        if let Some(watcher) = &self.0.watcher {
            watcher(event);
        }
    }

    /// The present state.
    #[must_use]
    pub fn status(&self) -> Status {
        let status =
            Status::ALL[usize::from(self.0.status.load(Ordering::Acquire)) % Status::ALL.len()];
        match status {
            // Its own thread says so as soon as it notices.
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
        if before != status as u8 {
            self.tell(MigrationEvent::Status(status));
        }
    }

    /// Whether `id` is what a source asks about this migration by.
    #[must_use]
    pub fn is_asked_about_by(&self, id: &[u8; 16]) -> bool {
        self.0.id.get().is_some_and(|own| own.0 == *id)
    }

    pub(crate) fn set_id(&self, id: MigrationId) {
        // The first is kept: a control is of one migration.
        let _ = self.0.id.set(id);
    }

    /// Whether a cancel comes too late, as it does once the guest has been handed over.
    pub(crate) fn set_too_late(&self, too_late: bool) {
        self.0.too_late.store(too_late, Ordering::Release);
    }

    /// What has done the work of the method so far, on this side.
    #[must_use]
    pub fn jobs(&self) -> JobFigures {
        self.0.stats.read()
    }

    /// What has looked for zero pages so far, if devices were to.
    #[must_use]
    pub fn zero_jobs(&self) -> JobFigures {
        self.0.stats.read_zero()
    }

    pub(crate) fn accelerator_stats(&self) -> &AcceleratorStats {
        &self.0.stats
    }

    /// Connections that were none of the migration's, by why they were dropped.
    #[must_use]
    pub fn turned_away(&self) -> BTreeMap<String, u64> {
        lock(&self.0.turned_away).clone()
    }

    pub(crate) fn turn_away(&self, why: &str) {
        let mut turned_away = lock(&self.0.turned_away);
        let known = turned_away.len() < REASONS || turned_away.contains_key(why);
        let why = if known { why } else { "for other reasons" };
        *turned_away.entry(why.to_owned()).or_default() += 1;
    }

    /// Asks the migration to end; the guest goes on where it is. Too late once the source has
    /// handed the guest over: then the migration completes. In [`Status::PostcopyPaused`] it gives up what the guest still
    /// needs, and in [`Status::PostcopyActive`] it does nothing.
    pub fn cancel(&self) {
        // Kept, it would give the guest's pages up as soon as a connection is lost.
        if self.0.status.load(Ordering::Acquire) == Status::PostcopyActive as u8 {
            return;
        }
        self.0.cancelled.store(true, Ordering::Release);
        self.stop();
    }

    /// Lets a migration go on that waits in [`Status::PreSwitchover`]; does nothing in any other state.
    pub fn proceed(&self) {
        if self.status() == Status::PreSwitchover {
            *lock(&self.0.proceeds) = true;
            self.wake();
        }
    }

    /// Lets the guest run at the destination as soon as it can be switched over, and before it has all pages there. Does
    /// nothing without `postcopy-ram`, or once the guest has been stopped.
    pub fn start_postcopy(&self) {
        self.0.postcopy.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether [`Control::start_postcopy`] was called.
    pub(crate) fn wants_postcopy(&self) -> bool {
        self.0.postcopy.load(Ordering::Acquire)
    }

    /// Has a migration that waits in [`Status::PostcopyPaused`] go on over a connection to `to`, where its destination
    /// listens once more (`migrate-recover`). False in any other state.
    pub fn resume(&self, to: &Address) -> bool {
        let is_paused = self.status() == Status::PostcopyPaused;
        if is_paused {
            *lock(&self.0.resume) = Some(to.clone());
            self.wake();
        }
        is_paused
    }

    /// Waits up to `time` for [`Control::resume`], and takes what it says.
    pub(crate) fn take_resume(&self, time: Duration) -> Option<Address> {
        let until = Instant::now() + time;
        self.sleep_while(until, || lock(&self.0.resume).is_none());
        lock(&self.0.resume).take()
    }

    /// Ends the connection of a migration that is in [`Status::PostcopyActive`], as if it was lost: of its source or its
    /// destination, which is a guest's. False in any other state.
    pub fn pause_postcopy(&self) -> bool {
        if self.status() != Status::PostcopyActive {
            return false;
        }
        let link = lock(&self.0.postcopy_link).upgrade();
        match link {
            Some(link) => link.transport.shutdown(Shutdown::Both),
            None if !self.0.takes_pages.load(Ordering::Acquire) => return false,
            None => self.0.pause.store(true, Ordering::Release),
        }
        true
    }

    /// Reports that the other host may be lost: another connection to it has broken. A silence of its connections that
    /// has begun already ends the migration then, without the rest of `silence-timeout`.
    pub fn suspect_peer(&self) {
        self.0.peer_is_suspect.store(true, Ordering::Release);
    }

    /// The host that holds the migration up at present.
    #[must_use]
    pub fn stall(&self) -> Option<Stall> {
        *lock(&self.0.stall)
    }

    /// Reports that host, or that none does.
    pub fn set_stall(&self, stall: Option<Stall>) {
        *lock(&self.0.stall) = stall;
    }

    /// Whether [`Control::suspect_peer`] was called.
    pub(crate) fn is_peer_suspect(&self) -> bool {
        self.0.peer_is_suspect.load(Ordering::Acquire)
    }

    /// This side is a postcopy's destination, which looks at [`Control::take_pause`].
    pub(crate) fn set_takes_pages(&self) {
        self.0.takes_pages.store(true, Ordering::Release);
    }

    /// Whether [`Control::pause_postcopy`] was called at a destination since the last time.
    pub(crate) fn take_pause(&self) -> bool {
        self.0.pause.swap(false, Ordering::AcqRel)
    }

    /// What [`Control::pause_postcopy`] closes.
    pub(crate) fn set_postcopy_link(&self, link: &Arc<MainLink>) {
        *lock(&self.0.postcopy_link) = Arc::downgrade(link);
    }

    /// Has a destination that waits in [`Status::PostcopyPaused`] go on with a source that connects to `listener`
    /// (`migrate-recover`). In [`Status::PostcopyRecover`] it gives up the connection over which nothing is agreed yet.
    ///
    /// # Errors
    /// `listener` itself in any other state.
    pub fn recover(&self, listener: Listener) -> Result<(), Listener> {
        // Whoever has connected where it listened before may say nothing of use for long.
        let waits = [Status::PostcopyPaused, Status::PostcopyRecover];
        if !waits.contains(&self.status()) {
            return Err(listener);
        }
        *lock(&self.0.recovery) = Some(listener);
        self.wake();
        Ok(())
    }

    /// Whether [`Control::recover`] was called since the last listener was taken.
    pub(crate) fn has_recovery(&self) -> bool {
        lock(&self.0.recovery).is_some()
    }

    /// Waits for [`Control::recover`]; `None` once the migration is stopped.
    pub(crate) fn await_recovery(&self) -> Option<Listener> {
        /// Nothing but a call or the end of the migration ends the wait.
        const ROUND: Duration = Duration::from_secs(60);
        loop {
            let until = Instant::now() + ROUND;
            self.sleep_while(until, || lock(&self.0.recovery).is_none());
            match lock(&self.0.recovery).take() {
                None if !self.is_stopped() => {}
                listener => return listener,
            }
        }
    }

    /// Takes over those of `options` that may change while a migration runs (`live` in the table of
    /// options). Others are not looked at.
    pub fn change(&self, options: &Options) {
        let mut live = lock(&self.0.live);
        live.changed = Some(options.clone());
        if let Some(pacer) = &live.pacer {
            pacer.set_rate(options.max_bandwidth);
        }
        if let Some(pacer) = &live.postcopy_pacer {
            pacer.set_rate(options.max_postcopy_bandwidth);
        }
        if let Some(cpu) = &live.cpu {
            cpu.set_limit(options.cpu_limit.into());
        }
        if let Some(auto) = &live.auto {
            auto.set_goal(options.goal);
        }
        drop(live);
        self.wake();
    }

    /// Has a migration that has not begun keep `rate` together with others, besides its own `max-bandwidth`. One whose guest
    /// stands still counts, and does not wait.
    pub fn share_rate(&self, rate: &SharedRate) {
        lock(&self.0.live).shared = Some(rate.clone());
    }

    /// `options` with what [`Control::change`] has changed of them.
    pub(crate) fn latest(&self, options: &Options) -> Options {
        let mut latest = options.clone();
        if let Some(changed) = &lock(&self.0.live).changed {
            latest.take_live(changed);
        }
        latest
    }

    /// The budget of all of the migration's channels, which follows [`Control::change`].
    pub(crate) fn pacer(&self, options: &Options) -> Arc<Pacer> {
        let mut live = lock(&self.0.live);
        let rate = live.changed.as_ref().unwrap_or(options).max_bandwidth;
        let pacer = Arc::new(Pacer::new(rate).under(live.shared.clone()));
        live.pacer = Some(Arc::clone(&pacer));
        pacer
    }

    /// The same of the pages of a postcopy that nobody has asked for.
    pub(crate) fn postcopy_pacer(&self, options: &Options) -> Arc<Pacer> {
        let mut live = lock(&self.0.live);
        let latest = live.changed.as_ref().unwrap_or(options);
        let pacer = Arc::new(Pacer::new(latest.max_postcopy_bandwidth));
        live.postcopy_pacer = Some(Arc::clone(&pacer));
        pacer
    }

    /// The budget of CPU time of this side's channel threads, which follows [`Control::change`].
    pub(crate) fn cpu_budget(&self, options: &Options) -> Arc<CpuBudget> {
        let mut live = lock(&self.0.live);
        let limit = live.changed.as_ref().unwrap_or(options).cpu_limit;
        let budget = live
            .cpu
            .get_or_insert_with(|| Arc::new(CpuBudget::new(limit.into())));
        Arc::clone(budget)
    }

    /// CPU time that this side's channel threads have used, as far as they have booked it: each does with each packet.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        self.used().into_iter().map(|(_, time)| time).sum()
    }

    /// Returns that CPU time by thread.
    #[must_use]
    pub fn cpu_times(&self) -> Vec<ThreadCpu> {
        let thread = |(name, time): (String, Duration)| ThreadCpu {
            name,
            cpu_s: time.as_secs_f64(),
        };
        self.used().into_iter().map(thread).collect()
    }

    fn used(&self) -> Vec<(String, Duration)> {
        let live = lock(&self.0.live);
        live.cpu.as_ref().map(|cpu| cpu.used()).unwrap_or_default()
    }

    /// Packets and pages by method so far, where each packet has its own (method auto); else empty.
    #[must_use]
    pub fn method_figures(&self) -> Vec<MethodFigures> {
        let auto = lock(&self.0.live).auto.clone();
        auto.map(|auto| auto.figures()).unwrap_or_default()
    }

    /// What chooses the method of each packet, where that is to be, by a goal that follows [`Control::change`].
    pub(crate) fn auto(&self, options: &Options) -> Option<Arc<Auto>> {
        let mut live = lock(&self.0.live);
        let goal = live.changed.as_ref().unwrap_or(options).goal;
        live.auto = Auto::of(options, goal).map(Arc::new);
        live.auto.clone()
    }

    /// Waits up to `time` for [`Control::proceed`]; true if it has been called since the state is
    /// [`Status::PreSwitchover`].
    pub(crate) fn may_proceed(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        self.sleep_while(until, || !*lock(&self.0.proceeds));
        *lock(&self.0.proceeds)
    }

    /// True once [`Control::cancel`] was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }

    /// Makes all sleepers look whether they still have to.
    pub(crate) fn wake(&self) {
        // With the lock that they look under: none of them is between its look and its sleep.
        let _stopped = lock(&self.0.stopped);
        self.0.wake.notify_all();
    }

    /// Ends all sleeps, now and later.
    pub(crate) fn stop(&self) {
        *lock(&self.0.stopped) = true;
        self.0.wake.notify_all();
    }

    /// True once the migration is to end before its time.
    pub(crate) fn is_stopped(&self) -> bool {
        *lock(&self.0.stopped)
    }

    /// Sleeps until `until`, for as long as `waits` says so and the migration is not stopped.
    pub(crate) fn sleep_while(&self, until: Instant, waits: impl Fn() -> bool) {
        let mut stopped = lock(&self.0.stopped);
        while !*stopped && waits() {
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                return;
            };
            if left.is_zero() {
                return;
            }
            stopped = self
                .0
                .wake
                .wait_timeout(stopped, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
