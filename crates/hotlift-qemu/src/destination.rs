//! The QEMU that is to get a guest: given by its QMP socket, or started here for the purpose.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotlift::relay::Taken;
use hotlift_console::error::error_line;
use hotlift_console::output::complain;
use hotlift_console::signals::{Interrupt, OwnFolder, TICK};
use hotlift_qmp::{ANSWER_TIMEOUT, Qemu, QmpAddress, QmpError, Uuid};
use serde_json::{Map, Value};

use crate::connect::connect;
use crate::error::{QemuError, Side, at_destination};
use crate::process::{Custody, Started};
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
}

/// What a QEMU that was given a guest has said of it.
#[derive(Debug)]
pub enum Statement {
    /// It has the guest.
    Here {
        /// Whether it runs it, or keeps it paused; `None`: it has not said which.
        running: Option<bool>,
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
        Self::waiting(qemu, None, OwnFolder::private()?)
    }

    /// One that is started now.
    ///
    /// # Errors
    /// If it does not start, or does not answer.
    pub fn start(command: &[OsString], interrupt: &Interrupt) -> Result<Self, QemuError> {
        let folder = OwnFolder::private()?;
        let (process, qemu) = Started::start(command, folder.path(), interrupt)?;
        Self::waiting(qemu, Some(process), folder)
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
        Ok(Self {
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
        Ok(Self {
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

    /// Whether it has taken the guest, as far as it says so at once.
    pub fn has_taken(&self) -> Taken {
        match self.ask() {
            Statement::Here { .. } => Taken::Yes,
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

    /// Asks once.
    fn ask(&self) -> Statement {
        let mut ask_again_at = self
            .ask_again_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let answer = if ask_again_at.is_some_and(|until| Instant::now() < until) {
            Err("QEMU does not answer over QMP".to_owned())
        } else {
            let mut qemu = self.qemu();
            qemu.client().set_timeout(ASK);
            let answer = qemu.query_migrate().map(|info| {
                let running = info.is_completed().then(|| qemu.query_status().ok());
                (info, running.flatten().map(|state| state.running))
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
            Ok((info, running)) if info.is_completed() => Statement::Here { running },
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
            if let (Statement::Never { .. }, Some(process)) = (&statement, self.process()) {
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
