//! The QEMU whose guest is to leave: prepared, watched, and put back if the guest stays.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hotlift::MigrationError;
use hotlift::relay::Ownership;
use hotlift_qmp::{MigrationInfo, Qemu, QmpAddress, QmpError, RunState, one_line};
use hotlift_terminal::error::{TerminalError, error_line};
use hotlift_terminal::output::complain;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::capabilities::Purpose;
use crate::connect::{QUERY_INTERVAL, connect};
use crate::error::{QemuError, Side, at_source};
use crate::settings::{self, Changed};
use crate::vm::Vm;
use hotlift_mem::lock;

/// How long the QMP socket of a running QEMU is tried. It is there, unless its name is wrong.
const CONNECT: Duration = Duration::from_secs(2);

/// How long a cancelled migration may take to end: QEMU's threads leave their sockets at once, but a
/// busy host may keep them from running.
const END: Duration = Duration::from_secs(60);

/// How long a QEMU that does not tell of its migration's threads has for their end.
const CLEAN_UP: Duration = Duration::from_millis(500);

/// A running QEMU, spoken to by the threads of one command.
pub struct Source {
    address: QmpAddress,
    qemu: Mutex<Qemu>,
    changed: Mutex<Option<Changed>>,
    /// What the guest did when the command began.
    was: RunState,
}

/// How a migration that did not succeed was settled.
#[derive(Debug)]
pub struct Settled {
    whereabouts: Whereabouts,
    was: RunState,
    reasons: Vec<String>,
    /// Where the source's QEMU is spoken to.
    qmp: String,
}

/// What the destination knows of the guest after a migration that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestThere {
    /// It was never run there, and never will be.
    NotHere,
    /// The destination's QEMU has it.
    Here,
    /// The destination's QEMU has it, and does not run it, though it ran before.
    Stopped,
    /// It cannot be told.
    Unknown,
}

/// Where the guest is after a migration that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Whereabouts {
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
    /// At the destination, after all.
    Moved,
    /// At the destination, where it does not run; a copy is at the source, paused.
    Stopped,
    /// At the source, paused; nobody knows whether it is at the destination, too.
    InDoubt,
}

/// Refuses a VM that QEMU does not migrate to any destination.
fn check_blocked(migration: &MigrationInfo) -> Result<(), QemuError> {
    match migration.blocked_reasons.as_deref() {
        None | Some([]) => Ok(()),
        Some(reasons) => Err(QemuError::Blocked {
            reasons: one_line(&reasons.join("; ")),
        }),
    }
}

impl Source {
    /// Connects, and sees whether a migration with this purpose can be begun. Restores the settings that an earlier command has
    /// left changed.
    ///
    /// # Errors
    /// If it does not answer, cannot begin one, or has settings that the command refuses.
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
        // QEMU refuses only once the migration is set up.
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

    /// Connects to compare its VM with another before a migration with this purpose: changes nothing, also not what an earlier
    /// command has left changed.
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

    /// Whether the guest ran when the command began.
    pub fn was_running(&self) -> bool {
        self.was == RunState::Running
    }

    /// What the guest did when the command began.
    pub fn was(&self) -> &RunState {
        &self.was
    }

    /// What the guest does now.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn run_state(&self) -> Result<RunState, QmpError> {
        Ok(self.qemu().query_status()?.run_state())
    }

    /// Where it is spoken to.
    pub fn address(&self) -> &QmpAddress {
        &self.address
    }

    /// This QEMU, for one command.
    pub fn qemu(&self) -> MutexGuard<'_, Qemu> {
        lock(&self.qemu)
    }

    /// Its VM, to be compared with the destination's.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn vm(&self) -> Result<Vm, QemuError> {
        Vm::of(&mut self.qemu(), None).map_err(at_source)
    }

    /// Sets capabilities and parameters, to be put back by [`Source::restore_settings`].
    ///
    /// # Errors
    /// If it refuses.
    pub fn change_settings(
        &self,
        capabilities: &[(&str, bool)],
        parameters: &Map<String, Value>,
    ) -> Result<(), QemuError> {
        let changed = Changed::apply(&mut self.qemu(), capabilities, parameters);
        let changed = changed.map_err(at_source)?;
        *self.changed() = Some(changed);
        Ok(())
    }

    /// Puts capabilities and parameters back, if they were changed. A QEMU that refuses is worth a
    /// word, but fails nothing; one that has gone needs none.
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
            complain!("hotlift: the source's migration settings were not put back: {error}");
        }
    }

    /// Begins to migrate to `uri`.
    ///
    /// # Errors
    /// If it refuses.
    pub fn migrate(&self, uri: &str) -> Result<(), QemuError> {
        self.qemu().migrate(uri).map_err(at_source)
    }

    /// What QEMU says of its migration.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn look(&self) -> Result<MigrationInfo, QmpError> {
        self.qemu().query_migrate()
    }

    /// Asks QEMU to cancel its migration; too late if it has completed.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn cancel(&self) -> Result<(), QmpError> {
        self.qemu().migrate_cancel()
    }

    /// Lets the guest run, which has been saved.
    ///
    /// # Errors
    /// Those of QMP.
    pub fn cont(&self) -> Result<(), QmpError> {
        self.retrying(Qemu::cont)
    }

    /// How the guest has ended since this command connected, as a clause; `None` if it has not. QEMU reports it before it closes
    /// a connection of its migration, and may keep a guest that has ended (`-no-shutdown`).
    pub fn guest_end(&self) -> Option<String> {
        self.qemu().client().guest_events().end()
    }

    /// Whether QEMU has given the guest up for good.
    pub fn ownership(&self) -> Ownership {
        match self.look() {
            Ok(info) if info.is_completed() => Ownership::Released,
            Ok(info) if info.has_failed() => Ownership::Kept,
            // A QEMU that does not answer may still take the guest back.
            Ok(_) | Err(_) => Ownership::Unknown,
        }
    }

    /// Runs `ask` again as long as QEMU does not answer, for [`END`] or one answer's time more: a main loop that
    /// hangs on storage answers later. A connection that is gone is made once more.
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

    /// After a migration whose relay has ended with `error`: sees that it has ended, and that the
    /// guest runs here again if it did before. `at_destination` is asked where the guest is, if QEMU
    /// has given it up and the relay says that the destination `is_told` to run it.
    pub fn settle(
        &self,
        error: &MigrationError,
        is_told: bool,
        at_destination: impl FnOnce() -> GuestThere,
    ) -> Settled {
        let is_told = is_told || matches!(error, MigrationError::InDoubt);
        let at_destination = || match is_told {
            true => at_destination(),
            false => GuestThere::NotHere,
        };
        let mut reasons = match error {
            // It says so itself, if it can be heard.
            MigrationError::Destination { reason } => vec![format!("the destination: {reason}")],
            error => vec![error.chain()],
        };
        let whereabouts = self.bring_back(at_destination).unwrap_or_else(|problem| {
            reasons.push(format!("QEMU at the source: {}", error_line(&problem)));
            match is_told {
                true => Whereabouts::InDoubt,
                false if problem.is_disconnected() => match self.guest_end() {
                    Some(how) => Whereabouts::Ended(how),
                    None => Whereabouts::Gone,
                },
                false => Whereabouts::Stalled,
            }
        });
        if let Ok(info) = self.look()
            && let Some(reason) = info.error_desc
        {
            reasons.push(format!("QEMU at the source: {reason}"));
        }
        Settled {
            whereabouts,
            was: self.was.clone(),
            reasons,
            qmp: self.address.to_string(),
        }
    }

    fn bring_back(
        &self,
        at_destination: impl FnOnce() -> GuestThere,
    ) -> Result<Whereabouts, QmpError> {
        // Also one that was paused when the command began, and was continued since.
        let ran = self.was.is_live() || self.qemu().client().guest_events().has_run;
        let kept = if ran {
            Whereabouts::Runs
        } else {
            Whereabouts::Paused
        };
        let info = self.wait_end()?;
        // QEMU itself starts a guest again that it has not given up.
        if !ran || (!info.is_completed() && self.wait_running()?) {
            return Ok(match info.is_completed().then(at_destination) {
                None | Some(GuestThere::NotHere) => kept,
                Some(GuestThere::Here) => Whereabouts::Moved,
                Some(GuestThere::Stopped) => Whereabouts::Stopped,
                Some(GuestThere::Unknown) => Whereabouts::InDoubt,
            });
        }
        match at_destination() {
            GuestThere::NotHere => {}
            GuestThere::Here => return Ok(Whereabouts::Moved),
            GuestThere::Stopped => return Ok(Whereabouts::Stopped),
            GuestThere::Unknown => return Ok(Whereabouts::InDoubt),
        }
        if let Some(how) = self.end_of_kept_guest()? {
            return Ok(Whereabouts::Ended(how));
        }
        self.retrying(Qemu::cont)?;
        Ok(kept)
    }

    /// How the guest has ended, if its QEMU keeps it in a state that `cont` cannot leave (`-no-shutdown`).
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

    /// Cancels what is under way and waits for its end.
    fn wait_end(&self) -> Result<MigrationInfo, QmpError> {
        let deadline = Instant::now() + END;
        self.retrying(Qemu::migrate_cancel)?;
        loop {
            let info = self.retrying(Qemu::query_migrate)?;
            if !info.is_running() {
                return Ok(info);
            }
            if Instant::now() >= deadline {
                return Err(QmpError::Timeout {
                    command: "migrate_cancel".to_owned(),
                    waited: END,
                });
            }
            self.wait_for_event();
        }
    }

    /// QEMU says that a migration has failed some moments before it runs the guest again.
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

    /// Waits until the next question is worth it.
    fn wait_for_event(&self) {
        let deadline = Instant::now() + QUERY_INTERVAL;
        self.qemu().client().wait_for_event(&[], deadline);
    }

    fn changed(&self) -> MutexGuard<'_, Option<Changed>> {
        lock(&self.changed)
    }
}

/// Runs the question on QEMU.
type Asks<'a> =
    dyn FnMut(&mut dyn FnMut(&mut Qemu) -> Result<(), QmpError>) -> Result<(), QmpError> + 'a;

/// QEMU calls a migration completed or failed some moments before it frees what that had, and goes
/// by the capabilities of the moment then: one whose multifd was switched off in between keeps
/// channels that it uses after their end.
fn wait_cleaned_up(asks: &mut Asks<'_>) -> Result<(), QmpError> {
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
    /// Says where the guest is, and makes the error that ends the command; `theirs` is what the other
    /// side has said.
    pub fn into_error(mut self, theirs: Option<String>, interrupted: bool) -> QemuError {
        if let Some(theirs) = theirs {
            // The final messages of the relays have a part of it.
            self.reasons.retain(|reason| !theirs.starts_with(reason));
            self.reasons.push(theirs);
        }
        let reasons = self.reasons.join("; ");
        let state = match self.whereabouts {
            Whereabouts::InDoubt => {
                let qmp = self.qmp;
                return QemuError::InDoubt { reasons, qmp };
            }
            Whereabouts::Stalled => {
                let qmp = self.qmp;
                return QemuError::Stalled { reasons, qmp };
            }
            Whereabouts::Stopped => {
                let qmp = self.qmp;
                return QemuError::StoppedThere { reasons, qmp };
            }
            Whereabouts::Moved => return QemuError::MovedAnyway { reasons },
            Whereabouts::Gone => return QemuError::Gone { reasons },
            Whereabouts::Ended(how) => return QemuError::GuestEnded { how },
            Whereabouts::Runs => "runs on".to_owned(),
            Whereabouts::Paused if self.was == RunState::Paused => "stays paused".to_owned(),
            Whereabouts::Paused => format!("was in state '{}', and stays", self.was.name()),
        };
        complain!("hotlift: the guest {state} at the source");
        if interrupted {
            return TerminalError::Interrupted.into();
        }
        QemuError::Failed { reasons }
    }
}
