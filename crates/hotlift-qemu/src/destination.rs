//! The destination's QEMU, started by this process or by another one.

use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotlift::lazy::Loading;
use hotlift::relay::{GuestActivity, QemuGuestState};
use hotlift_qmp::{
    ANSWER_TIMEOUT, MigrationInfo, Qemu, QmpAddress, QmpError, RunState, StatusInfo, Uuid,
};
use hotlift_terminal::error::error_line;
use hotlift_terminal::output::warn;
use hotlift_terminal::signals::{Interrupt, OwnFolder};
use serde_json::{Map, Value};

use crate::connect::{QUERY_INTERVAL, connect};
use crate::error::{QemuError, Side, at_destination};
use crate::process::{self, Custody, Started, waits_for_cont};
use crate::run_state::{PreviousState, RunStateCheck, check};
use crate::settings::{self, Changed};
use crate::vm::Vm;
use hotlift_mem::lock;

/// Timeout of the connection to the QMP socket of a QEMU that waits for a guest.
const CONNECT: Duration = Duration::from_secs(10);

/// Timeout of one answer while the caller waits for QEMU's statement on the guest. QEMU's main loop may hang on storage: then
/// the query is repeated.
const ASK: Duration = Duration::from_secs(1);

/// Interval between queries to a QEMU that does not answer. Unanswered queries stay in the socket's buffer, so they must be
/// rare.
const ASK_AGAIN: Duration = Duration::from_secs(3);

/// Timeout of one answer while QEMU may be loading devices. The restore waits during the query. A main loop that does not load
/// answers within milliseconds.
const ASK_WHETHER_LOADING: Duration = Duration::from_millis(250);

/// Time in which QEMU may report why its stream broke early.
const REASON: Duration = Duration::from_secs(5);

/// Number of polls in a row after which a guest that is loaded and not started counts as not started by QEMU. QEMU's main loop
/// starts the guest and answers QMP, in either order.
const START_POLLS: u32 = 20;

/// Interval between the polls counted by [`START_POLLS`].
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Prefix of the names of sockets for a lazy restore, which loads pages when the guest touches them.
const LAZY: &str = "lazy-";

/// The destination's QEMU, started with `-incoming defer`.
pub struct Destination {
    qemu: Mutex<Qemu>,
    process: Option<Mutex<Started>>,
    custody: Custody,
    changed: Option<Changed>,
    /// Folder of the socket that receives the stream.
    folder: OwnFolder,
    /// Earliest time of the next query; `None` unless the last query timed out.
    ask_again_at: Mutex<Option<Instant>>,
    /// True if QEMU was started with `-S`; `None` if unknown.
    waits: Option<bool>,
    /// State of the guest before the migration.
    before: Mutex<PreviousState>,
    /// True if the guest had run in this QEMU before this process connected.
    had_guest: bool,
    /// The final statement of QEMU; `None` while QEMU has reported none.
    settled: Mutex<Option<Statement>>,
}

/// Statement on the location and the state of the guest, from the answers of the destination's QEMU.
#[derive(Debug, Clone)]
pub enum Statement {
    /// QEMU has the guest, in the expected run state.
    Here {
        /// Run state of the guest.
        state: RunState,
    },
    /// QEMU has the guest and does not run it, though the guest ran at the source. QEMU is not ended: another process started
    /// it, or the state may be intended. The operator must decide what to do.
    Stopped {
        /// The guest's states at the source and in this QEMU, in one line.
        reason: String,
        /// True if a `cont` may run the guest.
        can_run: bool,
    },
    /// QEMU had the guest and never ran it, though the guest ran at the source. This process has ended QEMU.
    Ended {
        /// The guest's states at the source and in this QEMU, and QEMU's errors, in one line.
        reason: String,
    },
    /// QEMU had the guest. The guest and QEMU have ended since.
    GuestEnded {
        /// How the guest ended, as a clause.
        how: String,
        /// True if the guest has ended by itself; false if another program has ended its machine.
        by_itself: bool,
    },
    /// QEMU has no guest and never will: its migration has failed, or its process has ended.
    Never {
        /// Reason, in one line.
        reason: String,
    },
    /// The state of the guest in QEMU is not known with certainty.
    Unknown {
        /// True if QEMU answers, but has not reached a final state yet.
        answers: bool,
        /// QEMU's report, or the reason why QEMU cannot be reached, in one line.
        reason: String,
    },
}

/// Converts QEMU's refusal of the postcopy capability. QEMU writes the details only to its log, so the error explains possible
/// causes.
fn without_postcopy(error: QmpError) -> QemuError {
    match error {
        QmpError::Command { desc, .. } if desc.contains("Postcopy is not supported") => {
            QemuError::NoPostcopy { message: desc }
        }
        error => at_destination(error),
    }
}

/// Returns the progress of loading the devices in a lazy restore, from QEMU's answers.
///
/// # Errors
/// QEMU's reason for refusing the devices.
fn loading(info: &MigrationInfo, state: &StatusInfo) -> Result<Loading, String> {
    if state.status != "inmigrate" {
        return Ok(Loading::Unknown);
    }
    match (info.status(), &info.error_desc) {
        ("failed" | "postcopy-active" | "postcopy-device", Some(reason)) => Err(reason.clone()),
        // QEMU 11.1 reports no failure reason while the connection is open.
        ("postcopy-active" | "postcopy-device", None) => Ok(Loading::Idle),
        _ => Ok(Loading::Unknown),
    }
}

impl Destination {
    /// Connects to a QEMU that another process has started for an incoming guest.
    ///
    /// # Errors
    /// If QEMU does not answer, or does not wait for a migration.
    pub fn held(address: &QmpAddress) -> Result<Self, QemuError> {
        let qemu = connect(address, CONNECT).map_err(at_destination)?;
        Self::waiting(qemu, None, None, OwnFolder::private()?)
    }

    /// Starts a QEMU with this command line for an incoming guest.
    ///
    /// # Errors
    /// If QEMU does not start, or does not answer.
    pub fn start(command: &[OsString], interrupt: &Interrupt) -> Result<Self, QemuError> {
        let folder = OwnFolder::private()?;
        let (process, qemu) = Started::start(command, folder.path(), interrupt)?;
        Self::waiting(qemu, Some(process), Some(command), folder)
    }

    /// Connects to a QEMU whose lazy restore from the file `file` was interrupted (state `postcopy-paused`). Makes QEMU listen
    /// on a new socket for the missing pages. QEMU's settings are restored after QEMU has received all pages.
    ///
    /// # Errors
    /// If QEMU does not answer, does not wait for pages, or waits for pages of another file.
    pub fn recovering(address: &QmpAddress, file: u64) -> Result<Self, QemuError> {
        let mut qemu = connect(address, CONNECT).map_err(at_destination)?;
        let state = qemu.query_status().map_err(at_destination)?;
        let migration = qemu.query_migrate().map_err(at_destination)?;
        let not_paused = |refusal: Option<&QmpError>| QemuError::NotPaused {
            status: state.status.clone(),
            migration: migration.status().to_owned(),
            refusal: refusal.map_or_else(String::new, |error| format!(": {error}")),
        };
        let listened = qemu.client().execute("query-migrate", &Value::Null);
        let listened = &listened.map_err(at_destination)?["socket-address"];
        let name = Self::name_for(file);
        let is_of_file = listened.to_string().contains(&name);
        let is_paused = migration.status() == "postcopy-paused";
        // After another client's 'migrate', even a refused one, QEMU reports that migration instead of the restore. The
        // reported socket is still the restore's, and QEMU accepts 'migrate-recover' only if the restore is paused.
        if !is_paused && !is_of_file {
            return Err(not_paused(None));
        }
        // This also refuses a QEMU whose missing pages come from a running QEMU.
        if !listened.is_null() && !is_of_file {
            return Err(QemuError::OtherFile);
        }
        let folder = OwnFolder::private()?;
        let uri = format!("unix:{}", folder.path().join(name).display());
        let changed = Changed::unrestored(&mut qemu).map_err(at_destination)?;
        match qemu.migrate_recover(&uri) {
            Err(error @ QmpError::Command { .. }) if !is_paused => {
                return Err(not_paused(Some(&error)));
            }
            recovering => recovering.map_err(at_destination)?,
        }
        let waits = waits_for_cont(&mut qemu, None);
        Ok(Self {
            waits,
            // In state `inmigrate` QEMU may have loaded the devices, but not run the guest: for example, it could not lock a
            // disk.
            had_guest: state.run_state() != RunState::InMigrate,
            before: Mutex::new(PreviousState {
                state: state.run_state(),
                is_last: true,
            }),
            settled: Mutex::default(),
            qemu: Mutex::new(qemu),
            process: None,
            custody: Custody::default(),
            changed,
            folder,
            ask_again_at: Mutex::default(),
        })
    }

    /// Returns the path of the socket for pages of the file `file`. [`Self::recovering`] compares the name of this socket with
    /// the one that QEMU reports.
    pub fn socket_for(&self, file: u64) -> PathBuf {
        self.folder.path().join(Self::name_for(file))
    }

    fn name_for(file: u64) -> String {
        format!("{LAZY}{file:016x}")
    }

    fn waiting(
        mut qemu: Qemu,
        process: Option<Started>,
        command: Option<&[OsString]>,
        folder: OwnFolder,
    ) -> Result<Self, QemuError> {
        let state = qemu.query_status().map_err(at_destination)?;
        let migration = qemu.query_migrate().map_err(at_destination)?;
        if state.status != "inmigrate" || migration.status() != "none" {
            return Err(QemuError::NotWaiting {
                status: state.status,
                migration: migration.status().to_owned(),
            });
        }
        settings::restore_left(&mut qemu, Side::Destination, |_| Ok(()))?;
        let custody = process.as_ref().map(Started::custody);
        let waits = waits_for_cont(&mut qemu, command);
        Ok(Self {
            waits,
            before: Mutex::new(PreviousState {
                state: RunState::Running,
                is_last: true,
            }),
            had_guest: false,
            settled: Mutex::default(),
            qemu: Mutex::new(qemu),
            process: process.map(Mutex::new),
            custody: custody.unwrap_or_default(),
            changed: None,
            folder,
            ask_again_at: Mutex::default(),
        })
    }

    /// Locks the QMP connection of QEMU for one command.
    pub fn qemu(&self) -> MutexGuard<'_, Qemu> {
        lock(&self.qemu)
    }

    /// Returns the custody (the right to end QEMU), which must be released before QEMU may run its guest.
    pub fn custody(&self) -> &Custody {
        &self.custody
    }

    fn process(&self) -> Option<MutexGuard<'_, Started>> {
        let process = self.process.as_ref()?;
        Some(lock(process))
    }

    /// Returns the path of the socket for the stream. Its folder is removed when this value is dropped.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("incoming")
    }

    /// Reads QEMU's VM, to compare it with the guest's VM. `other` is the guest's VM, if known: values that are slow to read
    /// are copied from `other`.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub fn vm(&self, other: Option<&Vm>) -> Result<Vm, QemuError> {
        Vm::of(&mut self.qemu(), other).map_err(at_destination)
    }

    /// Returns the UUID of QEMU's machine.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub fn uuid(&self) -> Result<Uuid, QemuError> {
        self.qemu().query_uuid().map_err(at_destination)
    }

    /// Sets capabilities and parameters, and makes QEMU listen on a UNIX socket.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn listen(
        &mut self,
        capabilities: &[(&str, bool)],
        parameters: &Map<String, Value>,
        socket: &Path,
    ) -> Result<(), QemuError> {
        let changed = Changed::apply(&mut self.qemu(), capabilities, parameters, &[]);
        self.changed = Some(changed.map_err(without_postcopy)?);
        // If this process has started QEMU, QEMU must end with it. A QEMU of another process must keep running and report the
        // error.
        let stay_on_error = self.process.is_none();
        let uri = format!("unix:{}", socket.display());
        let listening = self.qemu().migrate_incoming(&uri, stay_on_error);
        listening.map_err(at_destination)
    }

    /// Sets the guest's state at the start of its migration. If the stream contains a later state, the later state counts.
    /// Without a call the guest counts as running.
    pub fn expect(&self, was: RunState) {
        *self.before() = PreviousState {
            state: was,
            is_last: false,
        };
    }

    fn before(&self) -> MutexGuard<'_, PreviousState> {
        lock(&self.before)
    }

    /// Queries once if QEMU has the guest. `was` is the guest's state at the switchover; `None` if unknown. If this process has
    /// started QEMU, and QEMU does not run a guest that ran at the source, this function ends QEMU.
    pub fn query_guest_state(&self, was: Option<&str>) -> QemuGuestState {
        if let Some(was) = was {
            *self.before() = PreviousState {
                state: was.into(),
                is_last: true,
            };
        }
        match self.ask() {
            Statement::Here {
                state: RunState::Running,
            } => QemuGuestState::HasGuest(GuestActivity::Runs),
            Statement::Here { .. }
            | Statement::GuestEnded {
                by_itself: true, ..
            } => QemuGuestState::HasGuest(GuestActivity::Rests),
            Statement::GuestEnded { .. } => QemuGuestState::HasGuest(GuestActivity::Unknown),
            Statement::Stopped { .. } => QemuGuestState::HasGuest(GuestActivity::Stopped),
            Statement::Ended { .. } => QemuGuestState::Ended,
            Statement::Never { .. } => QemuGuestState::Never,
            Statement::Unknown { .. } => QemuGuestState::Unknown,
        }
    }

    /// Queries once if QEMU loads the devices of a lazy restore. QEMU loads devices in its main loop, which answers no query in
    /// the meantime. So an answer means that no device is being loaded.
    pub fn loading(&self) -> Loading {
        let mut qemu = self.qemu();
        qemu.client().set_timeout(ASK_WHETHER_LOADING);
        let answer = qemu.query_migrate().and_then(|info| {
            let state = qemu.query_status()?;
            Ok((info, state))
        });
        qemu.client().set_timeout(ANSWER_TIMEOUT);
        let Ok((info, state)) = answer else {
            return Loading::Unknown;
        };
        match loading(&info, &state) {
            Err(reason) => {
                *self.settled() = Some(Statement::Never { reason });
                Loading::Refused
            }
            Ok(loading) => loading,
        }
    }

    /// Returns true if the QMP connection was closed before QEMU ran the guest. A proxy may have closed this connection, so
    /// QEMU has ended only if the stream's connection is closed, too.
    pub fn is_gone_before_a_run(&self) -> bool {
        let mut qemu = self.qemu();
        let client = qemu.client();
        let has_run = client.guest_events().has_run || self.had_guest;
        client.is_closed() && !has_run
    }

    /// Waits for QEMU's statement on the guest, up to `time` or until a signal arrives.
    pub fn statement_in_time(&self, time: Duration, interrupt: &Interrupt) -> Statement {
        self.wait_for_statement(time, &[interrupt.wake_fd()], || interrupt.is_raised())
    }

    /// Waits up to `time` for QEMU's statement on the guest, or until `is_over` returns true. A readable descriptor in `others`
    /// shortens the wait until the next query.
    pub fn wait_for_statement(
        &self,
        time: Duration,
        others: &[BorrowedFd<'_>],
        is_over: impl Fn() -> bool,
    ) -> Statement {
        let deadline = Instant::now() + time;
        loop {
            let statement = self.ask();
            let is_settled = self.settled().is_some();
            let is_statement = is_settled || !matches!(statement, Statement::Unknown { .. });
            if is_statement || Instant::now() >= deadline || is_over() {
                return statement;
            }
            let until = deadline.min(Instant::now() + QUERY_INTERVAL);
            self.qemu().client().wait_for_event(others, until);
        }
    }

    /// Waits up to `time` until QEMU reports that it runs the guest. Used for a QEMU that has loaded the guest's devices, and
    /// receives the pages later.
    pub fn wait_for_start(&self, time: Duration) -> Statement {
        let deadline = Instant::now() + time;
        let mut polls = 0;
        loop {
            let answer = {
                let mut qemu = self.qemu();
                qemu.client().set_timeout(ASK);
                let answer = qemu
                    .query_migrate()
                    .and_then(|info| Ok((info, qemu.query_status()?.run_state())));
                qemu.client().set_timeout(ANSWER_TIMEOUT);
                answer
            };
            let reason = match answer {
                Ok((info, _)) if info.has_failed() => {
                    let reason = info.error_desc;
                    let reason = reason.unwrap_or_else(|| "it failed".to_owned());
                    return Statement::Never { reason };
                }
                Ok((info, RunState::InMigrate)) => {
                    polls += 1;
                    if polls >= START_POLLS && info.status() != "postcopy-device" {
                        return self.statement_on(RunState::InMigrate);
                    }
                    "it has not started to load the guest".to_owned()
                }
                Ok((_, state)) => return self.statement_on(state),
                Err(error) => {
                    if let Some(ended) = self.guest_end() {
                        return ended;
                    }
                    if let Some(reason) = self.how_it_ended() {
                        return Statement::Never { reason };
                    }
                    let reason = error_line(&error);
                    let is_closed = self.qemu().client().is_closed();
                    if is_closed {
                        let answers = false;
                        return Statement::Unknown { answers, reason };
                    }
                    reason
                }
            };
            if Instant::now() >= deadline {
                let answers = polls > 0;
                return Statement::Unknown { answers, reason };
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the location of QEMU for the operator; `None` unless this process has started QEMU.
    pub fn started(&self) -> Option<String> {
        Some(self.process()?.place())
    }

    /// Returns the QMP socket that QEMU has after the end of this command; `None` if unknown.
    pub fn later_qmp(&self) -> Option<QmpAddress> {
        match self.process() {
            Some(process) => process.kept_qmp(),
            None => Some(self.qemu().client().address().clone()),
        }
    }

    /// Returns true if QEMU reports that its guest waits for pages and no process sends them.
    pub fn waits_for_pages(&self) -> bool {
        let mut qemu = self.qemu();
        qemu.client().set_timeout(ASK);
        let status = qemu.query_migrate();
        qemu.client().set_timeout(ANSWER_TIMEOUT);
        status.is_ok_and(|info| info.status() == "postcopy-paused")
    }

    fn settled(&self) -> MutexGuard<'_, Option<Statement>> {
        lock(&self.settled)
    }

    /// Returns the statement on a guest that is in state `state` in QEMU.
    fn statement_on(&self, state: RunState) -> Statement {
        let before = self.before();
        let has_run = match self.qemu().client().has_run() {
            Ok(has_run) => has_run || self.had_guest,
            Err(error) => {
                let (answers, reason) = (false, error_line(&error));
                return Statement::Unknown { answers, reason };
            }
        };
        let check_result = check(&before, &state, has_run, self.waits);
        let states = format!(
            "the guest was '{}' before, and is '{}' in this QEMU",
            before.state.name(),
            state.name()
        );
        let is_last = before.is_last;
        drop(before);
        let reason = match check_result {
            RunStateCheck::Right => return Statement::Here { state },
            RunStateCheck::DoesNotRun => states,
            RunStateCheck::MayNotRun if is_last => {
                format!("{states}; it may have been started with -S")
            }
            RunStateCheck::MayNotRun => format!(
                "{states}; a 'stop' during the migration may be the cause, and its stream was passed through unread"
            ),
        };
        // A state that may be intended is left to the operator's decision.
        if check_result == RunStateCheck::DoesNotRun
            && let Some(process) = self.process()
        {
            let ended = self.end(process, &reason);
            *self.settled() = Some(ended.clone());
            return ended;
        }
        let can_run = state != RunState::InMigrate;
        let stopped = Statement::Stopped { reason, can_run };
        if !can_run {
            *self.settled() = Some(stopped.clone());
        }
        stopped
    }

    /// Ends `process`, a QEMU that does not run its guest. Returns the resulting statement.
    fn end(&self, mut process: MutexGuard<'_, Started>, reason: &str) -> Statement {
        let since = Instant::now();
        let ended = process.end();
        // The last events can still be read: another client's 'cont' may have run the guest after the query. If the process was
        // a wrapper script, QEMU was killed, too, but may end later.
        let left = process::END.saturating_sub(since.elapsed()).max(ASK);
        let (has_run, is_closed) = self.events_to_the_end(left);
        let words = process.last_errors();
        let words = words.map_or_else(String::new, |words| format!(": {words}"));
        match (ended, has_run) {
            // QEMU closes its monitor when it ends. The monitor is open, so the process was a wrapper script, and its QEMU
            // still runs.
            (Ok(_), Ok(_)) if !is_closed => Statement::Unknown {
                answers: true,
                reason: format!(
                    "{reason}; the started process ended, but its QEMU still has its QMP socket open{words}"
                ),
            },
            (Ok(_), Ok(false)) => {
                process.take_back();
                Statement::Ended {
                    reason: format!("{reason}; this QEMU was ended{words}"),
                }
            }
            (Ok(_), Ok(true)) => Statement::Unknown {
                answers: false,
                reason: format!(
                    "{reason}; another client continued it just before it was ended{words}"
                ),
            },
            (Err(error), _) => Statement::Unknown {
                answers: false,
                reason: format!("{reason}; cannot confirm its end: {error}"),
            },
            (_, Err(error)) => Statement::Unknown {
                answers: false,
                reason: format!(
                    "{reason}; it was ended, and its last messages are lost: {}",
                    error_line(&error)
                ),
            },
        }
    }

    /// Reads all events up to the end of the QMP connection. Returns two values: true if the guest has run, and true if
    /// the connection ended within `wait`.
    fn events_to_the_end(&self, wait: Duration) -> (Result<bool, QmpError>, bool) {
        let deadline = Instant::now() + wait;
        loop {
            let mut qemu = self.qemu();
            let client = qemu.client();
            let has_run = client.has_run();
            let is_closed = client.is_closed();
            if has_run.is_err() || is_closed || Instant::now() >= deadline {
                return (has_run, is_closed);
            }
            client.wait_for_event(&[], deadline);
        }
    }

    /// Returns the final statement of QEMU on the guest if there is one; otherwise queries QEMU once.
    fn ask(&self) -> Statement {
        if let Some(settled) = &*self.settled() {
            return settled.clone();
        }
        let mut ask_again_at = lock(&self.ask_again_at);
        let answer = if ask_again_at.is_some_and(|until| Instant::now() < until) {
            Err("QEMU does not answer over QMP".to_owned())
        } else {
            // QEMU 11.1 may hang after a failure, so the timeout is short. The query is useful nevertheless: an answer contains
            // the reason, the event does not.
            let timeout = match self.is_refused() {
                true => ASK_WHETHER_LOADING,
                false => ASK,
            };
            let mut qemu = self.qemu();
            qemu.client().set_timeout(timeout);
            let answer = qemu.query_migrate().and_then(|mut info| {
                // After another client's 'migrate', even a refused one, QEMU reports that migration instead of the incoming
                // one.
                if qemu.client().guest_events().has_migrated {
                    info.status = Some("completed".to_owned());
                }
                let state = match info.is_completed() {
                    true => Some(qemu.query_status()?.run_state()),
                    false => None,
                };
                Ok((info, state))
            });
            qemu.client().set_timeout(ANSWER_TIMEOUT);
            *ask_again_at = match &answer {
                Err(QmpError::Timeout { .. }) => Some(Instant::now() + ASK_AGAIN),
                _ => None,
            };
            answer.map_err(|error| error_line(&error))
        };
        drop(ask_again_at);
        if answer.is_err()
            && let Some(ended) = self.guest_end()
        {
            return ended;
        }
        // After the guest has run, `Statement::Never` would be false, whatever QEMU reports.
        let has_run = self.had_guest || self.qemu().client().guest_events().has_run;
        match answer {
            Ok((_, Some(state))) => self.statement_on(state),
            Ok((info, _)) if info.has_failed() && !has_run => Statement::Never {
                reason: info.error_desc.unwrap_or_else(|| "it failed".to_owned()),
            },
            answer => match self.how_it_ended() {
                Some(how) if has_run => Statement::Unknown {
                    answers: false,
                    reason: format!("it ran the guest, and {how}"),
                },
                Some(reason) => Statement::Never { reason },
                // The main loop of QEMU 11.1 may hang after this event, so a missing answer is expected.
                None if answer.is_err() && self.is_refused() => Statement::Never {
                    reason: "it failed before it ran the guest; its log has the reason".to_owned(),
                },
                None => Statement::Unknown {
                    answers: answer.is_ok(),
                    reason: answer.map_or_else(
                        |error| error,
                        |(info, _)| format!("its migration is in state '{}'", info.status()),
                    ),
                },
            },
        }
    }

    /// Returns true if another process started this QEMU, and its events report that the migration failed before the guest ran.
    /// Returns false for a QEMU of this process, which ends after such a failure, with its errors on stderr.
    fn is_refused(&self) -> bool {
        let mut qemu = self.qemu();
        let events = qemu.client().guest_events();
        let had_guest = self.had_guest || events.has_run || events.has_migrated;
        self.process.is_none() && events.has_failed && !had_guest
    }

    /// Returns a statement that the guest has ended; `None` if QEMU never had the guest, the guest has not ended, or the QMP
    /// connection is open.
    fn guest_end(&self) -> Option<Statement> {
        let was_live = self.before().state.is_live();
        let mut qemu = self.qemu();
        let client = qemu.client();
        let guest = client.guest_events();
        // A guest that ran at the source counts as received only after it has run here.
        let had_guest = self.had_guest || guest.has_run || (guest.has_migrated && !was_live);
        let how = guest.end().filter(|_| had_guest)?;
        let by_itself = guest.has_ended_itself();
        let ended = Statement::GuestEnded { how, by_itself };
        client.is_closed().then_some(ended)
    }

    /// Describes how QEMU has ended, with its last errors; `None` if it has not ended, or another process has started it.
    fn how_it_ended(&self) -> Option<String> {
        let mut process = self.process()?;
        let status = process.has_ended()?;
        // A wrapper script may end before its QEMU, which keeps its monitor open.
        let (_, is_closed) = self.events_to_the_end(ASK);
        if !is_closed {
            return None;
        }
        Some(match process.last_errors() {
            Some(errors) => format!("it has ended ({status}): {errors}"),
            None => format!("it has ended ({status})"),
        })
    }

    /// Returns QEMU's statement after the relay failed. If the relay is `in_doubt`, or the custody was released, QEMU may have
    /// received the end of the stream and may run the guest. Then only QEMU's own statement, or the end of its process, is
    /// proof.
    ///
    /// - In the usual case this function waits for the statement, up to `settle_timeout`.
    /// - With `in_doubt` it queries only once, because the relay has already waited.
    /// - If the custody was not released, the end of the stream was not sent, so QEMU has no complete guest.
    pub fn after_failure(
        &self,
        in_doubt: bool,
        settle_timeout: Duration,
        interrupt: &Interrupt,
    ) -> Statement {
        if in_doubt || self.custody.is_released() {
            self.custody.release();
            let statement = match in_doubt {
                true => self.ask(),
                false => self.statement_in_time(settle_timeout, interrupt),
            };
            let never = matches!(statement, Statement::Never { .. } | Statement::Ended { .. });
            if let (true, Some(process)) = (never, self.process()) {
                process.take_back();
            }
            return statement;
        }
        // If QEMU answers without a final state, it has not noticed the failure, or was never connected. If QEMU does not
        // answer, it is usually about to end, and may still report the reason.
        let statement = match self.ask() {
            Statement::Unknown { answers: false, .. } => self.statement_in_time(REASON, interrupt),
            statement => statement,
        };
        match statement {
            Statement::Unknown { reason, .. } => Statement::Never { reason },
            statement => statement,
        }
    }

    /// Restores the settings of a QEMU that has no guest, if another process started it. Errors are ignored: after a failed
    /// incoming migration QEMU is no longer usable.
    pub fn restore_settings(mut self) {
        if let (Some(changed), None) = (self.changed.take(), &self.process) {
            let _ = changed.undo(&mut self.qemu());
        }
    }

    /// Leaves QEMU running with its settings unchanged, since the guest's state is unknown. Returns QEMU's location for the
    /// operator.
    pub fn keep_running_unchanged(self) -> String {
        match self.process {
            Some(process) => process
                .into_inner()
                .unwrap_or_else(PoisonError::into_inner)
                .keep_running(),
            None => format!("QMP socket {}", self.qemu().client().address()),
        }
    }

    /// Restores the settings of a QEMU that has the guest, and leaves QEMU running. Returns QEMU's location for the operator.
    pub fn keep_running(mut self) -> String {
        if let Some(changed) = self.changed.take()
            && let Err(error) = changed.undo(&mut self.qemu())
            && !error.is_disconnected()
        {
            let error = error_line(&error);
            warn!(
                "hotlift: cannot restore the migration settings of the destination's QEMU: {error}"
            );
        }
        self.keep_running_unchanged()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// Builds the answers of `query-migrate` and `query-status`.
    fn answers(migration: &str, error: Option<&str>, status: &str) -> (MigrationInfo, StatusInfo) {
        let info = MigrationInfo {
            status: Some(migration.to_owned()),
            error_desc: error.map(str::to_owned),
            ..MigrationInfo::default()
        };
        let state = StatusInfo {
            running: status == "running",
            status: status.to_owned(),
        };
        (info, state)
    }

    #[test]
    fn refused_devices_are_recognised_by_qemus_text_only_before_the_guest_runs() {
        let why = Some("load of migration failed");
        for (migration, error, status, expected) in [
            ("active", None, "inmigrate", Ok(Loading::Unknown)),
            ("postcopy-active", None, "inmigrate", Ok(Loading::Idle)),
            ("postcopy-device", None, "inmigrate", Ok(Loading::Idle)),
            ("postcopy-active", why, "inmigrate", Err(())),
            ("postcopy-device", why, "inmigrate", Err(())),
            ("failed", why, "inmigrate", Err(())),
            ("failed", None, "inmigrate", Ok(Loading::Unknown)),
            // The devices may still be loading, or the guest may already run.
            ("postcopy-paused", why, "inmigrate", Ok(Loading::Unknown)),
            ("postcopy-active", why, "running", Ok(Loading::Unknown)),
            ("postcopy-active", None, "paused", Ok(Loading::Unknown)),
            // QEMU reports another client's 'migrate' instead of the incoming migration.
            ("setup", None, "inmigrate", Ok(Loading::Unknown)),
        ] {
            let (info, state) = answers(migration, error, status);
            let found = loading(&info, &state);
            assert_eq!(
                found.map_err(drop),
                expected,
                "{migration} {error:?} {status}"
            );
        }
    }

    #[test]
    fn a_refusal_of_postcopy_is_distinguished_from_others() {
        let refused = |desc: &str| {
            without_postcopy(QmpError::Command {
                command: "migrate-set-capabilities".to_owned(),
                class: "GenericError".to_owned(),
                desc: desc.to_owned(),
            })
        };
        let error = refused("Postcopy is not supported: Userfaultfd not available");
        assert_eq!(
            error.to_string(),
            "QEMU at the destination cannot use postcopy: Postcopy is not supported: Userfaultfd not available"
        );
        assert!(matches!(refused("no"), QemuError::Qmp { .. }));
    }

    /// Creates a QEMU that waits for a guest. It sends `events`, and closes its connection at the second query of its
    /// migration.
    fn ends_with(events: &'static [&'static str]) -> Destination {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let version = r#"{"qemu":{"major":10,"minor":0,"micro":2},"package":""}"#;
            writeln!(
                stream,
                r#"{{"QMP":{{"version":{version},"capabilities":[]}}}}"#
            )
            .unwrap();
            let mut questions = 0;
            for line in lines.map_while(Result::ok) {
                let request: Value = serde_json::from_str(&line).unwrap();
                let answer = match request["execute"].as_str().unwrap() {
                    "query-version" => version,
                    "query-status" => r#"{"running":false,"status":"inmigrate"}"#,
                    "query-migrate" if questions > 0 => break,
                    command => {
                        questions += u32::from(command == "query-migrate");
                        "{}"
                    }
                };
                let id = &request["id"];
                writeln!(stream, r#"{{"return":{answer},"id":{id}}}"#).unwrap();
            }
            for event in events {
                writeln!(stream, "{event}").unwrap();
            }
        });
        let destination = Destination::held(&QmpAddress::Unix(path)).unwrap();
        let statement = destination.ask();
        assert!(
            !matches!(statement, Statement::Here { .. }),
            "{statement:?}"
        );
        qemu.join().unwrap();
        destination
    }

    const RESUME: &str = r#"{"event":"RESUME"}"#;
    const POWER_OFF: &str =
        r#"{"event":"SHUTDOWN","data":{"guest":true,"reason":"guest-shutdown"}}"#;

    const QUIT: &str = r#"{"event":"SHUTDOWN","data":{"guest":false,"reason":"host-qmp-quit"}}"#;

    #[test]
    fn a_guest_that_ran_and_powered_off_is_accepted_and_ended() {
        let destination = ends_with(&[RESUME, POWER_OFF]);
        let statement = destination.ask();
        let Statement::GuestEnded { how, by_itself } = statement else {
            panic!("{statement:?}")
        };
        assert!(by_itself);
        assert_eq!(how, "the guest powered off");
        assert_eq!(
            destination.query_guest_state(None),
            QemuGuestState::HasGuest(GuestActivity::Rests)
        );
        assert!(!destination.is_gone_before_a_run());
    }

    #[test]
    fn a_qemu_that_is_killed_is_not_a_guest_that_powered_off() {
        let statement = ends_with(&[RESUME, QUIT]).ask();
        let Statement::GuestEnded { by_itself, .. } = statement else {
            panic!("{statement:?}")
        };
        assert!(!by_itself);
    }

    #[test]
    fn a_closed_qmp_connection_without_a_guest_that_ran_decides_nothing() {
        for events in [&[][..], &[QUIT]] {
            let destination = ends_with(events);
            assert_eq!(
                destination.query_guest_state(None),
                QemuGuestState::Unknown,
                "{events:?}"
            );
            assert!(destination.is_gone_before_a_run());
        }
        assert!(!ends_with(&[RESUME]).is_gone_before_a_run());
    }

    #[test]
    fn a_failure_that_an_event_reports_is_final_if_the_guest_has_not_run() {
        const FAILED: &str = r#"{"event":"MIGRATION","data":{"status":"failed"}}"#;
        assert_eq!(
            ends_with(&[FAILED]).query_guest_state(None),
            QemuGuestState::Never
        );
        assert_eq!(
            ends_with(&[RESUME, FAILED]).query_guest_state(None),
            QemuGuestState::Unknown
        );
    }
}
