//! The source's QEMU: its settings are changed for the migration, and restored if the guest stays.

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

/// Timeout of the connection to the QMP socket of a running QEMU. Short, because a running QEMU has already created its socket.
const CONNECT: Duration = Duration::from_secs(2);

/// Timeout for the end of a cancelled migration. QEMU's threads stop at once, but a busy host may delay them.
const END: Duration = Duration::from_secs(60);

/// Error for a migration that stays in state `cancelling`. QEMU 10.0 and earlier may wait forever for the thread of a multifd
/// channel whose connection was lost at a sync point.
const NEVER_ENDS: &str = "QEMU at the source does not end its cancelled migration, and accepts no other until it is restarted";

/// Time in which the threads of a migration end, if QEMU does not report them.
const CLEAN_UP: Duration = Duration::from_millis(500);

/// The source's QEMU, shared by the threads of one command.
pub struct Source {
    address: QmpAddress,
    qemu: Mutex<Qemu>,
    changed: Mutex<Option<Changed>>,
    /// State of the guest when the command began.
    was: RunState,
}

/// Location of the guest, and errors, after a migration that failed.
#[derive(Debug)]
pub struct Settled {
    location: GuestLocation,
    was: RunState,
    reasons: Vec<String>,
    /// Address of the source's QMP socket.
    qmp: String,
}

/// The destination's knowledge about the guest after a failed migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DestinationKnowledge {
    /// The guest never ran at the destination, and never will.
    NotHere,
    /// The destination's QEMU has the guest.
    Here,
    /// The destination's QEMU has the guest and does not run it, though the guest ran at the source.
    Stopped,
    /// The destination does not know the guest's state, or does not answer.
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
    /// At the source, whose QEMU does not answer. The guest is not at the destination.
    Stalled,
    /// At the destination, although an error occurred.
    Moved,
    /// At the destination, where QEMU does not run it. The source has a paused copy.
    Stopped,
    /// Paused at the source; possibly also at the destination.
    InDoubt,
}

/// Checks that QEMU can migrate its VM: QEMU reports the devices and settings that prevent every migration.
fn check_blocked(migration: &MigrationInfo) -> Result<(), QemuError> {
    match migration.blocked_reasons.as_deref() {
        None | Some([]) => Ok(()),
        Some(reasons) => Err(QemuError::Blocked {
            reasons: one_line(&reasons.join("; ")),
        }),
    }
}

impl Source {
    /// Connects to QEMU, and checks that a migration with this purpose can begin. Restores the settings that an earlier command
    /// has changed and not restored.
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
        // QEMU itself would report this state only after the migration is set up.
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

    /// Connects to QEMU only to compare its VM with another VM before a migration with this purpose. Changes nothing, not even
    /// settings that an earlier command has not restored.
    ///
    /// # Errors
    /// If QEMU does not answer, does not migrate its VM, or has settings that the migration refuses.
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

    /// Returns the address of QEMU's QMP socket.
    pub fn address(&self) -> &QmpAddress {
        &self.address
    }

    /// Locks the QMP connection of QEMU for one command.
    pub fn qemu(&self) -> MutexGuard<'_, Qemu> {
        lock(&self.qemu)
    }

    /// Reads QEMU's VM, to compare it with the destination's VM.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub fn vm(&self) -> Result<Vm, QemuError> {
        Vm::of(&mut self.qemu(), None).map_err(at_source)
    }

    /// Changes capabilities and parameters; [`Source::restore_settings`] restores them. `limits` are the values of
    /// `downtime-limit` that [`Source::set_downtime_limit`] may set, in milliseconds.
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

    /// Sets the downtime limit in milliseconds; with `None` only checks it. Returns false if another client has changed the
    /// limit: then the client's value stays.
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
            None => changed.has_own_limit(&mut self.qemu()),
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

    /// Asks QEMU to cancel its migration. Has no effect on a completed migration.
    ///
    /// # Errors
    /// QMP errors.
    pub fn cancel(&self) -> Result<(), QmpError> {
        self.qemu().migrate_cancel()
    }

    /// Continues the guest after a save.
    ///
    /// # Errors
    /// QMP errors.
    pub fn cont(&self) -> Result<(), QmpError> {
        self.retrying(Qemu::cont)
    }

    /// Describes how the guest has ended since this command connected, as a clause; `None` if it has not ended. QEMU sends the
    /// event before it closes the connections of its migration. With `-no-shutdown` QEMU keeps running after that.
    pub fn guest_end(&self) -> Option<String> {
        self.qemu().client().guest_events().end()
    }

    /// Queries if QEMU has released the guest.
    pub fn ownership(&self) -> Ownership {
        match self.poll() {
            Ok(info) if info.is_completed() => Ownership::Released,
            Ok(info) if info.has_failed() => Ownership::Kept,
            // QEMU may continue the guest later, even if it does not answer now.
            Ok(_) | Err(_) => Ownership::Unknown,
        }
    }

    /// Repeats `ask` until QEMU answers, for at most [`END`] plus the timeout of one answer. QEMU's main loop may hang on
    /// storage, and answer later. Reconnects once if the connection is lost.
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

    /// Ends a failed migration, whose relay has ended with `error`. If the guest ran before, makes sure that it runs at the
    /// source again. If QEMU has released the guest, and `may_run_there` is true, the guest may run at the destination. Then
    /// this function first calls `at_destination`, which queries the destination.
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
            // If the destination can be reached, its own statement replaces this reason (`into_error`).
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
        // This includes a guest that was paused when the command began, and was continued later.
        let ran = self.was.is_live() || self.qemu().client().guest_events().has_run;
        let kept = if ran {
            GuestLocation::Runs
        } else {
            GuestLocation::Paused
        };
        let info = self.wait_end()?;
        // QEMU itself continues a guest that QEMU has not released.
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

    /// Describes how the guest has ended, if QEMU (with `-no-shutdown`) keeps it in a state that `cont` cannot leave; `None`
    /// otherwise.
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

    /// Cancels an active migration and waits for its end. Also returns a migration that stays in state `cancelling`, but only
    /// if the guest runs.
    fn wait_end(&self) -> Result<MigrationInfo, QmpError> {
        let deadline = Instant::now() + END;
        self.retrying(Qemu::migrate_cancel)?;
        loop {
            let info = self.retrying(Qemu::query_migrate)?;
            if !info.is_running() {
                return Ok(info);
            }
            if Instant::now() >= deadline {
                // In state `cancelling` QEMU does not stop the guest any more, even if the migration never ends.
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

    /// Waits until the guest runs; returns false on a timeout. QEMU reports a failed migration some moments before it continues
    /// the guest.
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

    /// Waits for an event of QEMU, or until the next query is due.
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

/// Waits until QEMU has freed the migration's resources, so that the capabilities can be changed. QEMU reports the end of the
/// migration some moments earlier. If multifd is switched off before the resources are free, QEMU does not free its channels,
/// and uses them after their end.
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
        // After its threads have ended, QEMU's main loop frees the rest before it answers again.
        for _ in 0..2 {
            asks(&mut |qemu| qemu.query_migrate().map(|_| ()))?;
        }
        return Ok(());
    }
}

impl Settled {
    /// Logs where the guest is, and returns the error that ends the command. `theirs` is the destination's own statement.
    pub fn into_error(mut self, theirs: Option<String>, interrupted: bool) -> QemuError {
        if let Some(theirs) = theirs {
            // An earlier reason may be a shorter form of the same statement, from the relay's final message.
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
