//! Migrates a running QEMU into a relay of this process: starts, watches and shows it, and cancels it on a signal.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use hotlift::relay::{Doing, Hooks, Incoming, Outgoing, RelayProgress, RelayReport, RelaySettings};
use hotlift::{Address, Control, MigrationError};
use hotlift_mem::is_readable;
use hotlift_terminal::output::complain;
use hotlift_terminal::progress::{Display, jobs};
use hotlift_terminal::signals::{Interrupt, OwnFolder, beside};

use crate::capabilities::Purpose;
use crate::error::QemuError;
use crate::progress::{Watch, not_connected};
use crate::settings;
use crate::source::Source;

/// Interval between queries for QEMU's figures, for which it sends no event.
const LOOK: Duration = Duration::from_millis(500);

/// Time without a connection after which the operator is shown the address, the same as for a silent host in a migration
/// (`REPORTED` of hotlift's liveness).
const UNCONNECTED: Duration = Duration::from_secs(5);

/// Time in which a relay must notice that QEMU has aborted.
const GRACE: Duration = Duration::from_secs(5);

/// An outgoing migration.
pub struct Moving<'a> {
    /// QEMU of the guest.
    pub source: &'a Source,
    /// Cancels it.
    pub interrupt: &'a Interrupt,
    /// Settings of the relay.
    pub settings: &'a RelaySettings,
    /// Destination of the relay.
    pub outgoing: Outgoing<'a>,
    /// True if no progress is shown.
    pub quiet: bool,
}

/// Waits during a migration, with the relay's control.
pub type Attend<'a> = &'a mut dyn FnMut(&[BorrowedFd<'_>], Instant, &Control);

/// Result of a migration's relay.
pub struct Relayed {
    /// The relay's report, or its error.
    pub outcome: Result<RelayReport, MigrationError>,
    /// The destination may have received the order to run the guest; if false, it never will.
    pub is_told: bool,
    /// Run state of the guest at the destination, as its relay reports it.
    pub doing: Doing,
}

/// Prepares QEMU for a relay with these settings. With `own_downtime_limit` QEMU gets their downtime limit; otherwise it keeps
/// its own.
///
/// # Errors
/// If QEMU refuses.
pub fn change_settings(
    source: &Source,
    purpose: Purpose,
    settings: &RelaySettings,
    own_downtime_limit: bool,
) -> Result<(), QemuError> {
    let channels = settings.outgoing.channels();
    let (capabilities, mut parameters) = settings::for_relay(purpose, channels);
    // The limit applies to the wire, after compression. The relay enforces it, and its socket slows QEMU down.
    parameters.insert("max-bandwidth".to_owned(), 0.into());
    if own_downtime_limit {
        let limit = settings.outgoing.downtime_limit.as_millis();
        let limit = u64::try_from(limit).unwrap_or(u64::MAX);
        parameters.insert("downtime-limit".to_owned(), limit.into());
    }
    source.change_settings(&capabilities, &parameters)
}

impl Moving<'_> {
    /// Runs relay and migration to their end. `attend` does all waits: until the given time, or until a descriptor is readable.
    /// It may return earlier.
    ///
    /// # Errors
    /// If the migration could not be started. The relay's own error is in [`Relayed::outcome`].
    pub fn run(&self, attend: Attend<'_>) -> Result<Relayed, QemuError> {
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
        let is_told = AtomicBool::new(false);
        let on_commit = || is_told.store(true, Ordering::SeqCst);
        let doing = OnceLock::new();
        let on_taken = |does: Doing| {
            let _ = doing.set(does);
        };
        let hooks = Hooks {
            on_progress: Some(&note),
            ownership: Some(&ownership),
            on_commit: Some(&on_commit),
            on_taken: Some(&on_taken),
            ..Hooks::default()
        };
        let relay = || {
            let incoming = Incoming::Listener(&listener);
            hotlift::relay::relay(incoming, &self.outgoing, self.settings, &control, hooks)
        };
        let (outcome, started) = beside(relay, |ended| {
            let started = self.source.migrate(&uri);
            if started.is_err() {
                control.cancel();
            }
            let latest = || {
                latest
                    .lock()
                    .map_or_else(|_| RelayProgress::default(), |it| *it)
            };
            self.watch(ended, &control, &latest, attend);
            started
        })?;
        let is_told = is_told.load(Ordering::SeqCst);
        match started {
            // QMP's error counts only if the relay failed before the commit.
            Err(error) if outcome.is_err() && !is_told => Err(error),
            _ => Ok(Relayed {
                outcome,
                is_told,
                doing: doing.get().copied().unwrap_or_default(),
            }),
        }
    }

    /// Shows progress until `ended` is readable; cancels the migration on a signal.
    fn watch(
        &self,
        ended: BorrowedFd<'_>,
        control: &Control,
        latest: &dyn Fn() -> RelayProgress,
        attend: Attend<'_>,
    ) {
        let display = Display::new("migration", self.quiet, control);
        let mut watch = match self.outgoing {
            Outgoing::File { .. } => Watch::of_save(),
            Outgoing::Address(_) => Watch::default(),
        };
        let mut look_at = Instant::now() + LOOK;
        let mut given_up_at: Option<Instant> = None;
        let mut wakes = vec![ended, self.interrupt.bell()];
        while !is_readable(ended) {
            if self.interrupt.is_raised() && wakes.len() > 1 {
                wakes.truncate(1);
                display.finish();
                complain!("cancelling");
                // QEMU decides whether it is too late; its sockets notify the relay.
                if self.source.cancel().is_err() {
                    control.cancel();
                }
            }
            attend(&wakes, look_at, control);
            let now = Instant::now();
            if now < look_at {
                continue;
            }
            look_at = now + LOOK;
            if let Ok(info) = self.source.look() {
                let mut line = match control.connecting() {
                    Some((address, time)) if time >= UNCONNECTED => not_connected(&address, time),
                    _ => watch.look(&info, latest(), control.stall()),
                };
                line.text.push_str(&jobs(&control.jobs()));
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
}
