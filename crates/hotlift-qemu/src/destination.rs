//! The QEMU that is to get a guest: given by its QMP socket, or started here for the purpose.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotlift::relay::Taken;
use hotlift_console::error::error_line;
use hotlift_console::output::complain;
use hotlift_console::signals::{Interrupt, OwnFolder, TICK};
use hotlift_qmp::{ANSWER_TIMEOUT, Qemu, QmpAddress, QmpError, RunState, Uuid};
use serde_json::{Map, Value};

use crate::connect::connect;
use crate::error::{QemuError, Side, at_destination};
use crate::process::{Custody, Started, waits_for_cont};
use crate::run_state::{Judgement, judge};
use crate::settings::{self, Changed};
use crate::vm::Vm;

/// How long the QMP socket of a waiting QEMU is tried.
const CONNECT: Duration = Duration::from_secs(10);

/// How long an answer is waited for where somebody waits for the statement: a main loop that hangs on storage answers
/// later, and is asked again.
const ASK: Duration = Duration::from_secs(1);

/// Between two questions to a QEMU that has not answered the first: they wait in its socket.
const ASK_AGAIN: Duration = Duration::from_secs(3);

/// How long a QEMU whose stream has broken before its end may take to say why.
const REASON: Duration = Duration::from_secs(5);

/// How often a QEMU that has loaded the devices of a guest must be seen not to have begun with it, one look after the other's
/// answer. It begins in its main loop behind the devices; so does its answer to QMP, and the one may overtake the other.
const LOOKS: u32 = 20;

/// Between two of these looks.
const LOOK: Duration = Duration::from_millis(5);

/// The event that each start of the vCPUs brings.
const RESUME: &str = "RESUME";

/// What the name of a socket begins with that pages come by as they are asked for.
const LAZY: &str = "lazy-";

/// A QEMU that waits with `-incoming defer`.
pub struct Destination {
    qemu: Mutex<Qemu>,
    process: Option<Mutex<Started>>,
    custody: Custody,
    changed: Option<Changed>,
    /// For the socket that its stream comes by.
    folder: OwnFolder,
    /// It has not answered, and is not asked before.
    ask_again_at: Mutex<Option<Instant>>,
    /// Whether it was started with `-S`; `None`: it is not known.
    waits: Option<bool>,
    /// What the guest did before.
    was: Mutex<RunState>,
    /// Its guest ran before this connection to it.
    had_run: bool,
    /// A statement that nothing changes any more.
    settled: Mutex<Option<Statement>>,
}

/// What a QEMU that was given a guest has said of it.
#[derive(Debug, Clone)]
pub enum Statement {
    /// It has the guest, which does what it is to do.
    Here {
        /// What that is.
        state: RunState,
    },
    /// It has the guest and does not run it, though the guest ran before; others have started this QEMU.
    Stopped {
        /// Both states, in one line.
        reason: String,
        /// A `cont` may run the guest.
        can_run: bool,
    },
    /// It had the guest, never ran it, though the guest ran before, and was ended here.
    Ended {
        /// Both states, and what QEMU has said of it, in one line.
        reason: String,
    },
    /// It has no guest, and never will: its migration has failed, or its process has ended.
    Never {
        /// Why, in one line.
        reason: String,
    },
    /// Nothing of the kind.
    Unknown {
        /// It answers: it is only not so far.
        answers: bool,
        /// What it says, or why it is not heard, in one line.
        reason: String,
    },
}

impl Destination {
    /// One that somebody else has started.
    ///
    /// # Errors
    /// If it does not answer, or does not wait for a migration.
    pub fn held(address: &QmpAddress) -> Result<Self, QemuError> {
        let qemu = connect(address, CONNECT).map_err(at_destination)?;
        Self::waiting(qemu, None, None, OwnFolder::private()?)
    }

    /// One that is started now.
    ///
    /// # Errors
    /// If it does not start, or does not answer.
    pub fn start(command: &[OsString], interrupt: &Interrupt) -> Result<Self, QemuError> {
        let folder = OwnFolder::private()?;
        let (process, qemu) = Started::start(command, folder.path(), interrupt)?;
        Self::waiting(qemu, Some(process), Some(command), folder)
    }

    /// One that runs its guest, and waits for pages of it (`postcopy-paused`) from the file `file`, on a new socket from
    /// now on. Its settings are put back when it has them.
    ///
    /// # Errors
    /// If it does not answer, does not wait for pages, or waits for those of another file.
    pub fn recovering(address: &QmpAddress, file: u64) -> Result<Self, QemuError> {
        let mut qemu = connect(address, CONNECT).map_err(at_destination)?;
        let state = qemu.query_status().map_err(at_destination)?;
        let migration = qemu.query_migrate().map_err(at_destination)?;
        if migration.status() != "postcopy-paused" {
            return Err(QemuError::NotPaused {
                status: state.status,
                migration: migration.status().to_owned(),
            });
        }
        let listened = qemu.client().execute("query-migrate", &Value::Null);
        let listened = &listened.map_err(at_destination)?["socket-address"];
        let name = Self::name_for(file);
        // Also one whose pages come from a running guest.
        if !listened.is_null() && !listened.to_string().contains(&name) {
            return Err(QemuError::OtherFile);
        }
        let folder = OwnFolder::private()?;
        let uri = format!("unix:{}", folder.path().join(name).display());
        let changed = Changed::left(&mut qemu).map_err(at_destination)?;
        qemu.migrate_recover(&uri).map_err(at_destination)?;
        let waits = waits_for_cont(&mut qemu, None);
        Ok(Self {
            waits,
            was: Mutex::new(state.run_state()),
            had_run: state.running,
            settled: Mutex::default(),
            qemu: Mutex::new(qemu),
            process: None,
            custody: Custody::default(),
            changed,
            folder,
            ask_again_at: Mutex::default(),
        })
    }

    /// A socket for pages of the file `file`, by which one that waits for more of them is known again.
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
            was: Mutex::new(RunState::Running),
            had_run: false,
            settled: Mutex::default(),
            qemu: Mutex::new(qemu),
            process: process.map(Mutex::new),
            custody: custody.unwrap_or_default(),
            changed: None,
            folder,
            ask_again_at: Mutex::default(),
        })
    }

    /// This QEMU, for one command.
    pub fn qemu(&self) -> MutexGuard<'_, Qemu> {
        self.qemu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be given up when it may run its guest.
    pub fn custody(&self) -> &Custody {
        &self.custody
    }

    fn process(&self) -> Option<MutexGuard<'_, Started>> {
        let process = self.process.as_ref()?;
        Some(process.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A socket for the stream, in a folder that goes with this.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("incoming")
    }

    /// What its VM must have alike with the guest's.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn vm(&self) -> Result<Vm, QemuError> {
        Ok(Vm::of(&mut self.qemu()).map_err(at_destination)?)
    }

    /// UUID of its machine.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn uuid(&self) -> Result<Uuid, QemuError> {
        Ok(self.qemu().query_uuid().map_err(at_destination)?)
    }

    /// Sets capabilities and parameters and listens on a UNIX socket.
    ///
    /// # Errors
    /// If it refuses.
    pub fn listen(
        &mut self,
        capabilities: &[(&str, bool)],
        parameters: &Map<String, Value>,
        socket: &Path,
    ) -> Result<(), QemuError> {
        let changed = Changed::apply(&mut self.qemu(), capabilities, parameters);
        self.changed = Some(changed.map_err(at_destination)?);
        // One that was started here is to end by itself if this process does; one that is held is to
        // stay and say what went wrong.
        let stay_on_error = self.process.is_none();
        let uri = format!("unix:{}", socket.display());
        let listening = self.qemu().migrate_incoming(&uri, stay_on_error);
        Ok(listening.map_err(at_destination)?)
    }

    /// The guest that it is to get was in the state `was` before. Of one that nobody knows the state of it is taken that it ran.
    pub fn expect(&self, was: RunState) {
        *self.was.lock().unwrap_or_else(PoisonError::into_inner) = was;
    }

    /// Whether it has taken the guest, whose state before was `was`, as far as it says so at once. One that was started here and
    /// does not run a guest that ran is ended.
    pub fn has_taken(&self, was: Option<&str>) -> Taken {
        if let Some(was) = was {
            self.expect(was.into());
        }
        match self.ask() {
            Statement::Here { .. } | Statement::Stopped { .. } => Taken::Yes,
            Statement::Ended { .. } => Taken::Ended,
            Statement::Never { .. } => Taken::Never,
            Statement::Unknown { .. } => Taken::Unknown,
        }
    }

    /// Waits for its statement on the guest, for `time` or until `is_over`.
    pub fn wait_for_statement(&self, time: Duration, is_over: impl Fn() -> bool) -> Statement {
        let deadline = Instant::now() + time;
        loop {
            let statement = self.ask();
            let is_statement = !matches!(statement, Statement::Unknown { .. });
            if is_statement || Instant::now() >= deadline || is_over() {
                return statement;
            }
            std::thread::sleep(TICK);
        }
    }

    /// Waits for `time` until it is known what it does with a guest whose devices it has loaded, and whose pages follow.
    pub fn wait_for_start(&self, time: Duration) -> Statement {
        let deadline = Instant::now() + time;
        let mut looks = 0;
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
                    let reason = reason.unwrap_or_else(|| "it has failed".to_owned());
                    return Statement::Never { reason };
                }
                Ok((info, RunState::InMigrate)) => {
                    looks += 1;
                    if looks >= LOOKS && info.status() != "postcopy-device" {
                        return self.judged(RunState::InMigrate);
                    }
                    "it has not begun with the guest".to_owned()
                }
                Ok((_, state)) => return self.judged(state),
                Err(error) => match self.how_it_ended() {
                    Some(reason) => return Statement::Never { reason },
                    None => error_line(&error),
                },
            };
            if Instant::now() >= deadline {
                let answers = looks > 0;
                return Statement::Unknown { answers, reason };
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Where one is that was started here.
    pub fn started(&self) -> Option<String> {
        Some(self.process()?.place())
    }

    /// Its QMP socket once this command has ended, as far as it is known here.
    pub fn later_qmp(&self) -> Option<QmpAddress> {
        match self.process() {
            Some(process) => process.kept_qmp(),
            None => Some(self.qemu().client().address().clone()),
        }
    }

    /// Whether it says that its guest waits for pages that nobody sends.
    pub fn waits_for_pages(&self) -> bool {
        let mut qemu = self.qemu();
        qemu.client().set_timeout(ASK);
        let status = qemu.query_migrate();
        qemu.client().set_timeout(ANSWER_TIMEOUT);
        status.is_ok_and(|info| info.status() == "postcopy-paused")
    }

    fn settled(&self) -> MutexGuard<'_, Option<Statement>> {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be said of a guest that is in this state here.
    fn judged(&self, state: RunState) -> Statement {
        let was = self.was.lock().unwrap_or_else(PoisonError::into_inner);
        let has_run = match self.qemu().client().has_come(RESUME) {
            Ok(has_run) => has_run || self.had_run,
            Err(error) => {
                let (answers, reason) = (false, error_line(&error));
                return Statement::Unknown { answers, reason };
            }
        };
        let judgement = judge(&was, &state, has_run, self.waits);
        let states = format!(
            "the guest was '{}' before, and is '{}' in this QEMU",
            was.name(),
            state.name()
        );
        drop(was);
        let reason = match judgement {
            Judgement::Right => return Statement::Here { state },
            Judgement::DoesNotRun => states,
            Judgement::MayNotRun => format!("{states}, and may have been started with -S"),
        };
        if let Some(process) = self.process() {
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

    /// Ends a QEMU that was started here, and does not run its guest.
    fn end(&self, mut process: MutexGuard<'_, Started>, reason: &str) -> Statement {
        let ended = process.end();
        // What it said before its end is still there to be read. A 'cont' may have come after the look.
        let has_run = self.qemu().client().has_come(RESUME);
        let words = process.last_errors();
        let words = words.map_or_else(String::new, |words| format!(": {words}"));
        match (ended, has_run) {
            (Ok(_), Ok(false)) => Statement::Ended {
                reason: format!("{reason}; this QEMU was ended{words}"),
            },
            (Ok(_), Ok(true)) => Statement::Unknown {
                answers: false,
                reason: format!(
                    "{reason}; somebody has continued it in the moment in which it was ended{words}"
                ),
            },
            (Err(error), _) => Statement::Unknown {
                answers: false,
                reason: format!("{reason}; its end is not seen: {error}"),
            },
            (_, Err(error)) => Statement::Unknown {
                answers: false,
                reason: format!(
                    "{reason}; it was ended, and its last words are lost: {}",
                    error_line(&error)
                ),
            },
        }
    }

    /// Asks once.
    fn ask(&self) -> Statement {
        if let Some(settled) = &*self.settled() {
            return settled.clone();
        }
        let mut ask_again_at = self
            .ask_again_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let answer = if ask_again_at.is_some_and(|until| Instant::now() < until) {
            Err("QEMU does not answer over QMP".to_owned())
        } else {
            let mut qemu = self.qemu();
            qemu.client().set_timeout(ASK);
            let answer = qemu.query_migrate().and_then(|info| {
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
        match answer {
            Ok((_, Some(state))) => self.judged(state),
            Ok((info, _)) if info.has_failed() => Statement::Never {
                reason: info
                    .error_desc
                    .unwrap_or_else(|| "it has failed".to_owned()),
            },
            answer => match self.how_it_ended() {
                Some(reason) => Statement::Never { reason },
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

    /// How a process that was started here has ended, if it has, and what it has said of it.
    fn how_it_ended(&self) -> Option<String> {
        let mut process = self.process()?;
        let status = process.has_ended()?;
        Some(match process.last_errors() {
            Some(errors) => format!("it has ended ({status}): {errors}"),
            None => format!("it has ended ({status})"),
        })
    }

    /// After a relay that failed: whether QEMU has the guest, and what it says of the failure. A relay that is
    /// `in_doubt`, or had begun to hand the guest over, may have told QEMU that the stream is at its end: only QEMU's
    /// own statement or the end of its process tells then, which is waited for as long as `settle_timeout`: in doubt, the
    /// relay has waited for it already. Any other has not, and what QEMU was given is no guest.
    pub fn after_failure(
        &self,
        in_doubt: bool,
        settle_timeout: Duration,
        is_over: impl Fn() -> bool,
    ) -> Statement {
        if in_doubt || self.custody.is_given_up() {
            self.custody.give_up();
            let statement = match in_doubt {
                true => self.ask(),
                false => self.wait_for_statement(settle_timeout, is_over),
            };
            let never = matches!(statement, Statement::Never { .. } | Statement::Ended { .. });
            if let (true, Some(process)) = (never, self.process()) {
                process.take_back();
            }
            return statement;
        }
        // One that answers has not noticed yet, or was never connected; one that does not is about to end, mostly.
        let statement = match self.ask() {
            Statement::Unknown { answers: false, .. } => self.wait_for_statement(REASON, is_over),
            statement => statement,
        };
        match statement {
            Statement::Unknown { reason, .. } => Statement::Never { reason },
            statement => statement,
        }
    }

    /// Puts the settings of a QEMU back that has no guest, and is somebody else's. One whose migration has failed
    /// may refuse, and is of no more use.
    pub fn give_back(mut self) {
        if let (Some(changed), None) = (self.changed.take(), &self.process) {
            let _ = changed.undo(&mut self.qemu());
        }
    }

    /// Nothing is known of the guest: leaves QEMU as it is. Says where it is.
    pub fn leave_alone(self) -> String {
        match self.process {
            Some(process) => process
                .into_inner()
                .unwrap_or_else(PoisonError::into_inner)
                .leave(),
            None => format!("QMP socket {}", self.qemu().client().address()),
        }
    }

    /// QEMU has the guest: its settings are put back, and it is left running. Says where it is.
    pub fn leave(mut self) -> String {
        if let Some(changed) = self.changed.take()
            && let Err(error) = changed.undo(&mut self.qemu())
            && !error.is_disconnected()
        {
            let error = error_line(&error);
            complain!("hotlift: the destination's migration settings were not put back: {error}");
        }
        self.leave_alone()
    }
}
