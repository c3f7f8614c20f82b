//! The source's QEMU: prepared, watched, and restored if the guest stays.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hotlift::MigrationError;
use hotlift::relay::Ownership;
use hotlift_qmp::{MigrationInfo, Qemu, QmpAddress, QmpError, RunState, one_line};
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::warn;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::capabilities::Purpose;
use crate::connect::{QUERY_INTERVAL, connect};
use crate::error::{QemuError, Side, at_source};
use crate::settings::{self, Changed};
use crate::vm::Vm;
use hotlift_mem::lock;

/// Timeout of the connection to the QMP socket of a running QEMU. It is short, since the socket of a running QEMU exists.
const CONNECT: Duration = Duration::from_secs(2);

/// Timeout for a cancelled migration to end: QEMU's threads stop at once, but a busy host may delay them.
const END: Duration = Duration::from_secs(60);

/// Reported for a migration that stays in state `cancelling`. QEMU up to 10.0 at least may wait forever for the thread of a
/// multifd channel that was lost at a sync point.
const NEVER_ENDS: &str = "QEMU at the source does not end its cancelled migration, and accepts no other until it is restarted";

/// Time for a migration's threads to end, if QEMU does not report them.
const CLEAN_UP: Duration = Duration::from_millis(500);

/// A running QEMU, shared by the threads of one command.
pub struct Source {
    address: QmpAddress,
    qemu: Mutex<Qemu>,
    changed: Mutex<Option<Changed>>,
    /// State of the guest when the command began.
    was: RunState,
}

/// Result of settling a migration that failed.
#[derive(Debug)]
pub struct Settled {
    location: GuestLocation,
    was: RunState,
    reasons: Vec<String>,
    /// Address of the source's QMP socket.
    qmp: String,
}

/// The guest's state at the destination after a failed migration, as far as the destination knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DestinationKnowledge {
    /// The guest never ran there, and never will.
    NotHere,
    /// The destination's QEMU has the guest.
    Here,
    /// The destination's QEMU has the guest and does not run it, though the guest ran at the source.
    Stopped,
    /// The destination does not know, or does not answer.
    Unknown,
}

/// Location of the guest after a failed migration.
#[derive(Debug, Clone, PartialEq, Eq)]
enum GuestLocation {
    /// At the source, running as before.
    Runs,
    /// At the source, paused as before.
    Paused,
    /// Nowhere: the source's QEMU has ended, or cannot be reached.
    Gone,
    /// Nowhere: the source's QEMU has reported how the guest ended, and has ended itself.
    Ended(String),
    /// At the source, whose QEMU does not answer; not at the destination.
    Stalled,
    /// At the destination, despite the error.
    Moved,
    /// At the destination, where it does not run; a copy is at the source, paused.
    Stopped,
    /// At the source, paused; its presence at the destination is unknown.
    InDoubt,
}

/// Rejects a VM that QEMU cannot migrate, whatever the destination.
fn check_blocked(migration: &MigrationInfo) -> Result<(), QemuError> {
    match migration.blocked_reasons.as_deref() {
        None | Some([]) => Ok(()),
        Some(reasons) => Err(QemuError::Blocked {
            reasons: one_line(&reasons.join("; ")),
        }),
    }
}

impl Source {
    /// Connects, and checks that a migration with this purpose can begin. Restores the settings that an earlier command left
    /// changed.
    ///
    /// # Errors
    /// If QEMU does not answer, cannot begin a migration, or has settings that the command refuses.
    pub fn connect(address: &QmpAddress, purpose: Purpose) -> Result<Self, QemuError> {
        let mut qemu = connect(address, CONNECT).map_err(at_source)?;
        let migration = qemu.query_migrate().map_err(at_source)?;
        if migration.is_running() {
            return Err(QemuError::Busy {
                status: migration.status().to_owned(),
            });
        }
        let state = qemu.query_status().map_err(at_source)?;
        if state.status == "inmigrate" {
            return Err(QemuError::Busy {
                status: state.status,
            });
        }
        settings::restore_left(&mut qemu, Side::Source, |qemu| {
            wait_cleaned_up(&mut |ask| ask(qemu))
        })?;
        // QEMU itself would refuse only after the migration is set up.
        if state.status == "postmigrate" {
            return Err(QemuError::LeftPaused {
                qmp: address.to_string(),
            });
        }
        settings::check(&mut qemu, Side::Source, purpose)?;
        check_blocked(&migration)?;
        Ok(Self {
            address: address.clone(),
            qemu: Mutex::new(qemu),
            changed: Mutex::new(None),
            was: state.run_state(),
        })
    }

    /// Connects to compare its VM with another before a migration with this purpose. Changes nothing, not even settings that an
    /// earlier command left changed.
    ///
    /// # Errors
    /// If it does not answer, does not migrate its VM, or has settings that the migration refuses.
    pub fn to_compare(address: &QmpAddress, purpose: Purpose) -> Result<Self, QemuError> {
        let mut qemu = connect(address, CONNECT).map_err(at_source)?;
        check_blocked(&qemu.query_migrate().map_err(at_source)?)?;
        settings::check(&mut qemu, Side::Source, purpose)?;
        let was = qemu.query_status().map_err(at_source)?.run_state();
        Ok(Self {
            address: address.clone(),
            qemu: Mutex::new(qemu),
            changed: Mutex::new(None),
            was,
        })
    }

    /// Returns true if the guest ran when the command began.
    pub fn was_running(&self) -> bool {
        self.was == RunState::Running
    }

    /// Returns the state of the guest when the command began.
    pub fn was(&self) -> &RunState {
        &self.was
    }

    /// Queries the current state of the guest.
    ///
    /// # Errors
    /// QMP errors.
    pub fn run_state(&self) -> Result<RunState, QmpError> {
        Ok(self.qemu().query_status()?.run_state())
    }

    /// Returns the address of its QMP socket.
    pub fn address(&self) -> &QmpAddress {
        &self.address
    }

    /// Locks this QEMU for one command.
    pub fn qemu(&self) -> MutexGuard<'_, Qemu> {
        lock(&self.qemu)
    }

    /// Reads its VM, for a comparison with the destination's.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn vm(&self) -> Result<Vm, QemuError> {
        Vm::of(&mut self.qemu(), None).map_err(at_source)
    }

    /// Sets capabilities and parameters; [`Source::restore_settings`] restores them. `limits` are the values that
    /// [`Source::set_downtime_limit`] may set.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn change_settings(
        &self,
        capabilities: &[(&str, bool)],
        parameters: &Map<String, Value>,
        limits: &[u64],
    ) -> Result<(), QemuError> {
        let changed = Changed::apply(&mut self.qemu(), capabilities, parameters, limits);
        let changed = changed.map_err(at_source)?;
        *self.changed() = Some(changed);
        Ok(())
    }

    /// Sets the downtime limit in milliseconds, or only checks it. Returns false if another client has changed it: its value
    /// stays.
    ///
    /// # Errors
    /// QMP errors.
    pub fn set_downtime_limit(&self, limit: Option<u64>) -> Result<bool, QmpError> {
        let mut changed = self.changed();
        let Some(changed) = changed.as_mut() else {
            return Ok(false);
        };
        match limit {
            Some(limit) => changed.set_limit(&mut self.qemu(), limit),
            None => changed.holds_limit(&mut self.qemu()),
        }
    }

    /// Restores changed capabilities and parameters. Errors are logged, unless QEMU has ended.
    pub fn restore_settings(&self) {
        let Some(changed) = self.changed().take() else {
            return;
        };
        let cleaned_up = wait_cleaned_up(&mut |ask| self.retrying(&mut *ask));
        let restored = cleaned_up.and_then(|()| self.retrying(|qemu| changed.undo(qemu)));
        if let Err(error) = restored
            && !error.is_disconnected()
        {
            let error = error_line(&error);
            warn!("hotlift: cannot restore the migration settings of the source's QEMU: {error}");
        }
    }

    /// Starts a migration to `uri`.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn migrate(&self, uri: &str) -> Result<(), QemuError> {
        self.qemu().migrate(uri).map_err(at_source)
    }

    /// Queries QEMU's migration.
    ///
    /// # Errors
    /// QMP errors.
    pub fn poll(&self) -> Result<MigrationInfo, QmpError> {
        self.qemu().query_migrate()
    }

    /// Asks QEMU to cancel its migration; no effect on a completed one.
    ///
    /// # Errors
    /// QMP errors.
    pub fn cancel(&self) -> Result<(), QmpError> {
        self.qemu().migrate_cancel()
    }

    /// Runs the guest again after a save.
    ///
    /// # Errors
    /// QMP errors.
    pub fn cont(&self) -> Result<(), QmpError> {
        self.retrying(Qemu::cont)
    }

    /// Returns how the guest has ended since this command connected, as a clause; `None` if it has not. QEMU sends the event
    /// before it closes the connections of its migration, and keeps running with `-no-shutdown`.
    pub fn guest_end(&self) -> Option<String> {
        self.qemu().client().guest_events().end()
    }

    /// Queries whether QEMU has released the guest.
    pub fn ownership(&self) -> Ownership {
        match self.poll() {
            Ok(info) if info.is_completed() => Ownership::Released,
            Ok(info) if info.has_failed() => Ownership::Kept,
            // A QEMU that does not answer may continue the guest later.
            Ok(_) | Err(_) => Ownership::Unknown,
        }
    }

    /// Repeats `ask` as long as QEMU does not answer, for [`END`] plus at most one answer's timeout: a main loop that hangs on
    /// storage answers later. Reconnects once if the connection is lost.
    fn retrying<T>(
        &self,
        mut ask: impl FnMut(&mut Qemu) -> Result<T, QmpError>,
    ) -> Result<T, QmpError> {
        let deadline = Instant::now() + END;
        let mut qemu = self.qemu();
        let mut has_reconnected = false;
        loop {
            match ask(&mut qemu) {
                Err(QmpError::Timeout { .. }) if Instant::now() < deadline => {}
                Err(error) if error.is_disconnected() && !has_reconnected => {
                    has_reconnected = true;
                    *qemu = Qemu::connect(&self.address, CONNECT).map_err(|_| error)?;
                }
                outcome => return outcome,
            }
        }
    }

    /// Settles a migration whose relay has ended with `error`: ensures that the migration has ended, and that the guest runs
    /// here again if it ran before. `at_destination` queries the destination. It is called only if QEMU has released the guest,
    /// and the guest `may_run_there`.
    pub fn settle(
        &self,
        error: &MigrationError,
        may_run_there: bool,
        at_destination: impl FnOnce() -> DestinationKnowledge,
    ) -> Settled {
        let may_run_there = may_run_there || matches!(error, MigrationError::InDoubt);
        let at_destination = || match may_run_there {
            true => at_destination(),
            false => DestinationKnowledge::NotHere,
        };
        let mut reasons = match error {
            // Its own statement replaces this, if the destination can be reached (`into_error`).
            MigrationError::Destination { reason } => vec![format!("the destination: {reason}")],
            error => vec![error.chain()],
        };
        let location = self.bring_back(at_destination).unwrap_or_else(|problem| {
            reasons.push(format!("QEMU at the source: {}", error_line(&problem)));
            match may_run_there {
                true => GuestLocation::InDoubt,
                false if problem.is_disconnected() => match self.guest_end() {
                    Some(how) => GuestLocation::Ended(how),
                    None => GuestLocation::Gone,
                },
                false => GuestLocation::Stalled,
            }
        });
        if let Ok(info) = self.poll() {
            if info.status() == "cancelling" {
                reasons.push(NEVER_ENDS.to_owned());
            }
            if let Some(reason) = info.error_desc {
                reasons.push(format!("QEMU at the source: {reason}"));
            }
        }
        Settled {
            location,
            was: self.was.clone(),
            reasons,
            qmp: self.address.to_string(),
        }
    }

    fn bring_back(
        &self,
        at_destination: impl FnOnce() -> DestinationKnowledge,
    ) -> Result<GuestLocation, QmpError> {
        // This includes a guest that was paused when the command began, and was continued since.
        let ran = self.was.is_live() || self.qemu().client().guest_events().has_run;
        let kept = if ran {
            GuestLocation::Runs
        } else {
            GuestLocation::Paused
        };
        let info = self.wait_end()?;
        // QEMU itself continues a guest that it has not released.
        if !ran || (!info.is_completed() && self.wait_running()?) {
            return Ok(match info.is_completed().then(at_destination) {
                None | Some(DestinationKnowledge::NotHere) => kept,
                Some(DestinationKnowledge::Here) => GuestLocation::Moved,
                Some(DestinationKnowledge::Stopped) => GuestLocation::Stopped,
                Some(DestinationKnowledge::Unknown) => GuestLocation::InDoubt,
            });
        }
        match at_destination() {
            DestinationKnowledge::NotHere => {}
            DestinationKnowledge::Here => return Ok(GuestLocation::Moved),
            DestinationKnowledge::Stopped => return Ok(GuestLocation::Stopped),
            DestinationKnowledge::Unknown => return Ok(GuestLocation::InDoubt),
        }
        if let Some(how) = self.end_of_kept_guest()? {
            return Ok(GuestLocation::Ended(how));
        }
        self.retrying(Qemu::cont)?;
        Ok(kept)
    }

    /// Returns how the guest has ended, if QEMU keeps it in a state that `cont` cannot leave (`-no-shutdown`).
    fn end_of_kept_guest(&self) -> Result<Option<String>, QmpError> {
        let state = self.retrying(Qemu::query_status)?.run_state();
        if !state.has_ended() {
            return Ok(None);
        }
        let how = self.guest_end();
        Ok(Some(how.unwrap_or_else(|| {
            format!("the guest is in state '{}'", state.name())
        })))
    }

    /// Cancels an active migration and waits for its end. A cancelled migration that does not end is also returned, provided
    /// that the guest runs.
    fn wait_end(&self) -> Result<MigrationInfo, QmpError> {
        let deadline = Instant::now() + END;
        self.retrying(Qemu::migrate_cancel)?;
        loop {
            let info = self.retrying(Qemu::query_migrate)?;
            if !info.is_running() {
                return Ok(info);
            }
            if Instant::now() >= deadline {
                // While it cancels, QEMU does not stop the guest any more, even if the migration never ends.
                if info.status() == "cancelling" && self.retrying(Qemu::query_status)?.running {
                    return Ok(info);
                }
                return Err(QmpError::Timeout {
                    command: "migrate_cancel (its migration has not ended)".to_owned(),
                    waited: END,
                });
            }
            self.wait_for_event();
        }
    }

    /// Waits until the guest runs: QEMU reports a failed migration some moments before it runs the guest again.
    fn wait_running(&self) -> Result<bool, QmpError> {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let status = self.retrying(Qemu::query_status)?;
            if status.running {
                return Ok(true);
            }
            if status.run_state().has_ended() || Instant::now() >= deadline {
                return Ok(false);
            }
            self.wait_for_event();
        }
    }

    /// Waits for an event, or until the next query is due.
    fn wait_for_event(&self) {
        let deadline = Instant::now() + QUERY_INTERVAL;
        self.qemu().client().wait_for_event(&[], deadline);
    }

    fn changed(&self) -> MutexGuard<'_, Option<Changed>> {
        lock(&self.changed)
    }
}

/// Runs a query on QEMU, for [`wait_cleaned_up`].
type QueryFn<'a> =
    dyn FnMut(&mut dyn FnMut(&mut Qemu) -> Result<(), QmpError>) -> Result<(), QmpError> + 'a;

/// Waits until QEMU has freed the migration's resources, so that the capabilities can be changed. QEMU reports the end some
/// moments before. If multifd is switched off in between, QEMU does not free its channels, and uses them after their end.
fn wait_cleaned_up(asks: &mut QueryFn<'_>) -> Result<(), QmpError> {
    let deadline = Instant::now() + END;
    loop {
        let mut threads = None;
        asks(&mut |qemu| {
            threads = qemu.query_migration_threads()?;
            Ok(())
        })?;
        match threads {
            None => std::thread::sleep(CLEAN_UP),
            Some(threads) if !threads.is_empty() && Instant::now() < deadline => {
                std::thread::sleep(QUERY_INTERVAL);
                continue;
            }
            Some(_) => {}
        }
        // The last thread leaves the rest to the main loop, which does it before it answers again.
        for _ in 0..2 {
            asks(&mut |qemu| qemu.query_migrate().map(|_| ()))?;
        }
        return Ok(());
    }
}

impl Settled {
    /// Reports where the guest is, and returns the error that ends the command; `theirs` is the other side's statement.
    pub fn into_error(mut self, theirs: Option<String>, interrupted: bool) -> QemuError {
        if let Some(theirs) = theirs {
            // A relay's final message may have been the beginning of it.
            self.reasons.retain(|reason| !theirs.starts_with(reason));
            self.reasons.push(theirs);
        }
        let reasons = self.reasons.join("; ");
        let state = match self.location {
            GuestLocation::InDoubt => {
                let qmp = self.qmp;
                return QemuError::InDoubt { reasons, qmp };
            }
            GuestLocation::Stalled => {
                let qmp = self.qmp;
                return QemuError::Stalled { reasons, qmp };
            }
            GuestLocation::Stopped => {
                let qmp = self.qmp;
                return QemuError::StoppedThere { reasons, qmp };
            }
            GuestLocation::Moved => return QemuError::MovedAnyway { reasons },
            GuestLocation::Gone => return QemuError::Gone { reasons },
            GuestLocation::Ended(how) => return QemuError::GuestEnded { how },
            GuestLocation::Runs => "keeps running".to_owned(),
            GuestLocation::Paused if self.was == RunState::Paused => "stays paused".to_owned(),
            GuestLocation::Paused => format!("stays in state '{}'", self.was.name()),
        };
        warn!("hotlift: the guest {state} at the source");
        if interrupted {
            return TerminalError::Interrupted.into();
        }
        QemuError::Failed { reasons }
    }
}
