//! Migrates the guest of a running QEMU into a relay of this process. Starts the migration, shows its progress, and cancels it
//! on a signal.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use hotlift::relay::{
    GuestActivity, Hooks, Incoming, Outgoing, RelayProgress, RelayReport, RelaySettings,
};
use hotlift::{Address, Control, MigrationError};
use hotlift_mem::is_readable;
use hotlift_qmp::MigrationInfo;
use hotlift_terminal::output::warn;
use hotlift_terminal::progress::{Display, jobs, rounded};
use hotlift_terminal::signals::{Interrupt, OwnFolder, run_alongside};
use serde_json::Value;

use crate::capabilities::Purpose;
use crate::downtime_limit::{DowntimeLimit, LimitArgs, RampedLimit};
use crate::downtime_ramp::{DowntimeRamp, Figures, ThrottleTrigger};
use crate::error::{QemuError, at_source};
use crate::progress::{Watch, not_connected};
use crate::settings::{self, DOWNTIME_LIMIT};
use crate::source::Source;

/// Interval between queries for QEMU's figures: QEMU sends no event when they change.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Minimum time between two queries that QEMU's events cause. Short rounds end every millisecond.
const AFTER_EVENT: Duration = Duration::from_millis(20);

/// Time without a connection after which the operator is shown the relay's address. The same as for a silent host in a
/// migration (`REPORTED` of hotlift's liveness).
const UNCONNECTED: Duration = Duration::from_secs(5);

/// Time in which a relay must notice that QEMU has aborted its migration.
const GRACE: Duration = Duration::from_secs(5);

/// Migration of a QEMU's guest into a relay of this process.
pub struct OutgoingMigration<'a> {
    /// The guest's QEMU.
    pub source: &'a Source,
    /// Signals that cancel the migration.
    pub interrupt: &'a Interrupt,
    /// Settings of the relay.
    pub settings: &'a RelaySettings,
    /// Destination to which the relay sends.
    pub outgoing: Outgoing<'a>,
    /// True if no progress is shown.
    pub quiet: bool,
}

/// Waits until one of the descriptors is readable, or until the given time. Also receives the handle that controls the relay.
pub type WaitFn<'a> = &'a mut dyn FnMut(&[BorrowedFd<'_>], Instant, &Control);

/// Result of a migration through a relay.
pub struct Relayed {
    /// The relay's report, or its error.
    pub outcome: Result<RelayReport, MigrationError>,
    /// True if the destination may have received the order to run the guest. If false, the destination will never receive it.
    pub may_run_there: bool,
    /// Run state of the guest at the destination, as its relay reports it.
    pub activity: GuestActivity,
    /// Downtime limit at the end; `None` if the limit was not ramped.
    pub downtime_limit: Option<DowntimeLimit>,
}

/// Prepares QEMU for a relay with these settings. Returns the downtime limit, unless it is constant.
///
/// # Errors
/// If QEMU refuses.
pub fn change_settings(
    source: &Source,
    purpose: Purpose,
    settings: &RelaySettings,
    limit: LimitArgs,
) -> Result<Option<RampedLimit>, QemuError> {
    let channels = settings.outgoing.channels();
    let (capabilities, mut parameters) = settings::for_relay(purpose, channels);
    // The operator's limit applies to the wire, after compression. The relay enforces it, and then reads more slowly from QEMU.
    parameters.insert("max-bandwidth".to_owned(), 0.into());
    if let Some(limit) = limit.own_ms() {
        parameters.insert(DOWNTIME_LIMIT.to_owned(), limit.into());
    }
    let most = parameters.get(DOWNTIME_LIMIT).and_then(Value::as_u64);
    let ramp = match limit.ramps {
        true => ramp_to(source, most)?,
        false => None,
    };
    let mut limits = &[][..];
    if let Some(ramp) = &ramp {
        parameters.insert(DOWNTIME_LIMIT.to_owned(), ramp.limit().into());
        limits = ramp.steps();
    }
    source.change_settings(&capabilities, &parameters, limits)?;
    Ok(ramp.map(RampedLimit::of_first))
}

/// Returns the ramp of the downtime limit up to `most` milliseconds, or up to QEMU's own limit if `most` is `None`. Returns
/// `None` if no lower limit exists.
fn ramp_to(source: &Source, most: Option<u64>) -> Result<Option<DowntimeRamp>, QemuError> {
    let mut qemu = source.qemu();
    let parameters = qemu.query_parameters().map_err(at_source)?;
    let capabilities = qemu.query_capabilities().map_err(at_source)?;
    let number = |name: &str| parameters.get(name).and_then(Value::as_u64);
    let throttles = |(name, is_on): &(String, bool)| {
        *is_on && ["auto-converge", "dirty-limit"].contains(&name.as_str())
    };
    let trigger = capabilities.iter().any(throttles).then(|| {
        let percent = number("throttle-trigger-threshold");
        percent.map_or_else(ThrottleTrigger::default, |percent| ThrottleTrigger {
            percent,
        })
    });
    let most = most.or_else(|| number(DOWNTIME_LIMIT));
    Ok(most.and_then(|most| DowntimeRamp::new(most, trigger)))
}

impl OutgoingMigration<'_> {
    /// Runs the relay and the migration to their end. All waits use `wait`, which may return early. `limit` is the downtime
    /// limit, unless it is constant.
    ///
    /// # Errors
    /// If the migration could not be started. The relay's own error is in [`Relayed::outcome`].
    pub fn run(
        &self,
        mut limit: Option<RampedLimit>,
        wait: WaitFn<'_>,
    ) -> Result<Relayed, QemuError> {
        let folder = OwnFolder::private()?;
        let path = folder.path().join("outgoing");
        let uri = format!("unix:{}", path.display());
        let listener = Address::Unix { path }.listen()?;
        let control = Control::new();
        let latest = Mutex::new(RelayProgress::default());
        let note = |progress: &RelayProgress| {
            if let Ok(mut latest) = latest.lock() {
                *latest = *progress;
            }
        };
        let ownership = || self.source.ownership();
        let may_run_there = AtomicBool::new(false);
        let on_commit = || may_run_there.store(true, Ordering::SeqCst);
        let activity = OnceLock::new();
        let on_run = |does: GuestActivity| {
            let _ = activity.set(does);
        };
        let hooks = Hooks {
            on_progress: Some(&note),
            ownership: Some(&ownership),
            on_commit: Some(&on_commit),
            on_run: Some(&on_run),
            ..Hooks::default()
        };
        let relay = || {
            let incoming = Incoming::Listener(&listener);
            hotlift::relay::relay(incoming, &self.outgoing, self.settings, &control, hooks)
        };
        let (outcome, started) = run_alongside(relay, |ended| {
            let started = self.source.migrate(&uri);
            if started.is_err() {
                control.cancel();
            }
            let latest = || {
                latest
                    .lock()
                    .map_or_else(|_| RelayProgress::default(), |it| *it)
            };
            self.watch(ended, &control, &latest, limit.as_mut(), wait);
            started
        })?;
        let may_run_there = may_run_there.load(Ordering::SeqCst);
        match started {
            // A QMP error is returned only if the relay failed before the commit.
            Err(error) if outcome.is_err() && !may_run_there => Err(error),
            _ => Ok(Relayed {
                outcome,
                may_run_there,
                activity: activity.get().copied().unwrap_or_default(),
                downtime_limit: limit.as_ref().and_then(RampedLimit::report),
            }),
        }
    }

    /// Shows progress until `ended` is readable; cancels the migration on a signal.
    fn watch(
        &self,
        ended: BorrowedFd<'_>,
        control: &Control,
        latest: &dyn Fn() -> RelayProgress,
        mut limit: Option<&mut RampedLimit>,
        wait: WaitFn<'_>,
    ) {
        let display = Display::new("migration", self.quiet, control);
        let mut watch = match self.outgoing {
            Outgoing::File { .. } => Watch::of_save(),
            Outgoing::Address(_) => Watch::default(),
        };
        let mut poll_at = Instant::now() + POLL_INTERVAL;
        let mut given_up_at: Option<Instant> = None;
        let mut wakes = vec![ended, self.interrupt.wake_fd()];
        // An event reports the end of each round. Without the descriptor the limit is still raised, but later.
        let mut qmp = self.source.qemu().client().descriptor().ok();
        let mut events_at = Instant::now();
        while !is_readable(ended) {
            if self.interrupt.is_raised() && wakes.len() > 1 {
                wakes.truncate(1);
                display.finish();
                warn!("cancelling");
                // If the cancel is too late, QEMU ignores it; otherwise QEMU closes its sockets, which ends the relay.
                if self.source.cancel().is_err() {
                    control.cancel();
                }
            }
            let is_ramping = limit.as_ref().is_some_and(|it| !it.ramp().has_ended());
            let event = qmp.as_ref().filter(|_| is_ramping).map(AsFd::as_fd);
            let (until, event) = match event {
                Some(_) if Instant::now() < events_at => (poll_at.min(events_at), None),
                event => (poll_at, event),
            };
            let others: Vec<_> = wakes.iter().copied().chain(event).collect();
            wait(&others, until, control);
            let is_event = event.is_some_and(is_readable);
            let now = Instant::now();
            if now < poll_at && !is_event {
                continue;
            }
            events_at = now + AFTER_EVENT;
            let info = self.source.poll();
            match (&info, limit.as_deref_mut()) {
                (Ok(info), Some(limit)) => self.ramp(limit, info, now),
                (Ok(_), None) => {}
                // The descriptor of a closed connection would always be readable.
                (Err(_), _) => qmp = None,
            }
            if now < poll_at {
                continue;
            }
            poll_at = now + POLL_INTERVAL;
            if let Ok(info) = info {
                let mut line = match control.connecting() {
                    Some((address, time)) if time >= UNCONNECTED => not_connected(&address, time),
                    _ => watch.poll(&info, latest(), control.stall()),
                };
                line.text.push_str(&jobs(&control.jobs()));
                if let Some(limit) = limit.as_deref_mut() {
                    limit.show(&mut line);
                }
                display.show_line(watch.round(), || line);
                if info.has_failed() {
                    given_up_at.get_or_insert(now);
                }
            }
            if given_up_at.is_some_and(|since| now - since >= GRACE) {
                control.cancel();
            }
        }
        display.finish();
    }

    /// Passes QEMU's figures to the ramp, and sets its limit.
    fn ramp(&self, limit: &mut RampedLimit, info: &MigrationInfo, now: Instant) {
        let (Some(ram), "active") = (&info.ram, info.status()) else {
            return;
        };
        let figures = Figures {
            rounds: ram.dirty_sync_count,
            remaining: ram.remaining,
            dirty: ram.dirty_pages_rate.saturating_mul(ram.page_size.max(1)),
            sent: rounded(ram.mbps * 1e6 / 8.0),
            is_throttled: info.cpu_throttle_percentage.unwrap_or(0) > 0,
        };
        limit.poll(now, figures, |limit| self.source.set_downtime_limit(limit));
    }
}
