//! Commands of a monitor for a guest of this process: one machine, which has one migration at a time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use hotlift::figures::{DestinationReport, SourceReport};
use hotlift::guest::Guest;
use hotlift::progress::Progress;
use hotlift::transport::TransportError;
use hotlift::{Address, Control, Listener, MigrationError, MigrationEvent, Options, Status};
use hotlift_mem::lock;
use hotlift_qmp::qapi::to_value;
use hotlift_qmp::server::{Commands, Events, Refusal};
use hotlift_qmp::{MigrationInfo, StatusInfo, Uuid, UuidInfo};
use hotlift_terminal::error::error_line;
use hotlift_terminal::output::warn;
use serde_json::{Map, Value, json};

use crate::error::MonitorError;
use crate::run_control::{RunControl, RunState};
use crate::settings::{IN_PROGRESS, Settings};
use crate::shutdown::ShutdownRequest;
use crate::{address, command_table, events, introspection, query_migrate, refusal};

/// Monitor of a machine with a guest of this process. All clones share one machine.
#[derive(Clone)]
pub struct GuestMonitor(Arc<Machine>);

struct Machine {
    guest: RunControl,
    settings: Settings,
    events: Events,
    shutdown: ShutdownRequest,
    state: Mutex<State>,
}

struct State {
    run: RunState,
    /// True if the process was started to wait for a guest, and its incoming migration has not begun yet.
    may_come_in: bool,
    was_incoming: bool,
    /// True if it is unknown whether the destination runs the guest.
    in_doubt: bool,
    migration: Option<Migration>,
    thread: Option<JoinHandle<()>>,
}

/// The latest migration: active, or ended.
struct Migration {
    control: Control,
    /// Status shown to clients. The status of `control` may be newer: a new status is shown only when its figures are known.
    shown: Status,
    started: Instant,
    /// Latest progress. Before the first report it is that of [`query_migrate::not_begun`].
    progress: Progress,
    outcome: Option<Outcome>,
    /// Address at which this side listens for the source; the requested address until then. `None` for an outgoing migration.
    listens_at: Option<Address>,
    /// State of the statistics of `compress`; `None` unless this is a source with that capability.
    compression: Option<query_migrate::Compression>,
}

enum Outcome {
    Sent(Box<SourceReport>),
    Received(Box<DestinationReport>),
    Failed(String),
    Cancelled,
}

impl Migration {
    fn is_running(&self) -> bool {
        self.outcome.is_none()
    }
}

impl State {
    fn running(&self) -> Option<&Migration> {
        self.migration.as_ref().filter(|one| one.is_running())
    }

    /// Returns true if the guest has arrived on this host, or was started here.
    fn has_arrived(&self) -> bool {
        self.run != RunState::InMigrate
    }

    /// Refuses a command while it is unknown if the destination runs the guest: the command could create a second copy of the
    /// guest.
    fn refuse_in_doubt(&self) -> Result<(), Refusal> {
        match self.in_doubt {
            false => Ok(()),
            true => Err(Refusal::generic(format!(
                "{}; if it does not run there, 'stop' and then 'cont' run it here",
                MigrationError::InDoubt
            ))),
        }
    }
}

/// States of a postcopy in which the destination owns the guest, and still needs pages from this side.
const IN_POSTCOPY: [Status; 3] = [
    Status::PostcopyActive,
    Status::PostcopyPaused,
    Status::PostcopyRecover,
];

/// Resumes an interrupted postcopy over a new connection: `migrate` with `resume`.
fn resume(state: &State, arguments: &Map<String, Value>) -> Result<Value, Refusal> {
    let nothing = "Cannot resume if there is no paused migration";
    let paused = state
        .running()
        .filter(|one| one.listens_at.is_none() && one.control.status() == Status::PostcopyPaused);
    let migration = paused.ok_or_else(|| Refusal::generic(nothing))?;
    let to = address::of_arguments(arguments)?;
    match migration.control.resume(&to) {
        true => Ok(json!({})),
        false => Err(Refusal::generic(nothing)),
    }
}

impl GuestMonitor {
    /// Creates a machine. Its guest runs; with `incoming`, the machine waits for its guest.
    pub fn new(
        guest: Arc<dyn Guest>,
        options: Options,
        events: Events,
        shutdown: ShutdownRequest,
        incoming: bool,
    ) -> Self {
        Self(Arc::new(Machine {
            guest: RunControl::new(guest),
            settings: Settings::new(options),
            events,
            shutdown,
            state: Mutex::new(State {
                run: if incoming {
                    RunState::InMigrate
                } else {
                    RunState::Running
                },
                may_come_in: incoming,
                was_incoming: incoming,
                in_doubt: false,
                migration: None,
                thread: None,
            }),
        }))
    }

    /// Creates a machine whose guest is paused after a migration. It is unknown if the destination runs the guest.
    pub fn in_doubt(
        guest: Arc<dyn Guest>,
        options: Options,
        events: Events,
        shutdown: ShutdownRequest,
    ) -> Self {
        let monitor = Self::new(guest, options, events, shutdown, false);
        let mut state = monitor.0.lock();
        let _ = monitor.begin(&mut state, None);
        state.in_doubt = true;
        state.run = RunState::FinishMigrate;
        let why = refusal::error_desc(&MigrationError::InDoubt);
        monitor
            .0
            .finish(&mut state, Outcome::Failed(why), Status::Failed);
        drop(state);
        monitor
    }

    /// Returns true if the guest runs.
    pub fn is_running(&self) -> bool {
        self.0.lock().run == RunState::Running
    }

    /// Returns true if a guest is present, whose memory can be checked.
    pub fn has_arrived(&self) -> bool {
        self.0.lock().has_arrived()
    }

    /// Waits for the guest at `address`. If the guest does not arrive, ends the process. Returns the address with the chosen
    /// port.
    ///
    /// # Errors
    /// If the address cannot be used.
    pub fn wait_for_guest(&self, address: &Address) -> Result<Address, MonitorError> {
        Ok(self.receive(address, true)?)
    }

    /// Ends the monitor: cancels an active migration and waits for its end. `by_client` is true after a client's `quit`.
    pub fn end(&self, by_client: bool) {
        events::shutdown(&self.0.events, by_client);
        let thread = {
            let mut state = self.0.lock();
            if let Some(migration) = state.running() {
                migration.control.cancel();
            }
            state.thread.take()
        };
        if let Some(thread) = thread {
            // Fails only if the thread has panicked, which was already reported.
            let _ = thread.join();
        }
    }

    /// Creates a new migration in `state`, and returns its control.
    fn begin(&self, state: &mut State, listens_at: Option<Address>) -> Control {
        let machine = Arc::downgrade(&self.0);
        let control = Control::watched(Box::new(move |event| {
            if let Some(machine) = Weak::upgrade(&machine) {
                machine.happened(event);
            }
        }));
        state.migration = Some(Migration {
            control: control.clone(),
            shown: Status::None,
            started: Instant::now(),
            progress: query_migrate::not_begun(self.0.ram_bytes()),
            outcome: None,
            listens_at,
            compression: None,
        });
        control
    }

    /// Runs the `work` of a migration in a new thread.
    fn run(
        &self,
        state: &mut State,
        control: Control,
        work: impl FnOnce(&Machine, &Control) -> Result<Outcome, MigrationError> + Send + 'static,
    ) -> Result<(), Refusal> {
        let machine = Arc::clone(&self.0);
        let thread = thread::Builder::new()
            .name("migration".to_owned())
            .spawn(move || {
                // The panic itself was already reported. The migration must also be marked as ended.
                match catch_unwind(AssertUnwindSafe(|| work(&machine, &control))) {
                    Ok(outcome) => machine.ended(outcome),
                    Err(_) => machine.panicked(),
                }
            });
        match thread {
            Ok(thread) => {
                state.thread = Some(thread);
                self.0.show(state, Status::Setup);
                Ok(())
            }
            Err(error) => {
                state.migration = None;
                Err(Refusal::generic(format!("cannot start a thread: {error}")))
            }
        }
    }

    fn migrate(&self, arguments: &Map<String, Value>) -> Result<Value, Refusal> {
        let mut state = self.0.lock();
        if arguments.get("resume") == Some(&Value::Bool(true)) {
            return resume(&state, arguments);
        }
        let to = address::of_arguments(arguments)?;
        if state.running().is_some() {
            return Err(Refusal::generic(IN_PROGRESS));
        }
        state.refuse_in_doubt()?;
        match state.run {
            RunState::InMigrate => {
                return Err(Refusal::generic(
                    "Guest is waiting for an incoming migration",
                ));
            }
            RunState::PostMigrate => {
                return Err(Refusal::generic(
                    "The guest has been migrated: it runs at its destination",
                ));
            }
            RunState::Running | RunState::Paused | RunState::FinishMigrate => {}
        }
        let options = self.0.settings.for_migration();
        options
            .check()
            .map_err(|error| Refusal::generic(error.to_string()))?;
        let control = self.begin(&mut state, None);
        if let Some(migration) = &mut state.migration {
            migration.compression = query_migrate::Compression::of(&options);
        }
        self.run(&mut state, control, move |machine, control| {
            let note = |progress: &Progress| {
                if let Some(migration) = &mut machine.lock().migration {
                    migration.progress = progress.clone();
                }
            };
            hotlift::migrate(&machine.guest, &to, &options, control, &note)
                .map(|report| Outcome::Sent(Box::new(report)))
        })?;
        Ok(json!({}))
    }

    fn receive(&self, address: &Address, exit_on_error: bool) -> Result<Address, Refusal> {
        self.receive_as(address, exit_on_error, |guest, options| {
            hotlift::prepare(guest, options)?;
            let listener = address.listen()?;
            let at = listener
                .address()
                .map_err(|source| TransportError::Listen {
                    uri: address.to_string(),
                    source,
                })?;
            Ok((listener, at))
        })
    }

    /// Runs `listen`, which prepares the guest and listens for the source at `address`. The lock of the state is released in
    /// the meantime: preparing many GiB of RAM and resolving names take time.
    fn receive_as(
        &self,
        address: &Address,
        exit_on_error: bool,
        listen: impl FnOnce(&RunControl, &Options) -> Result<(Listener, Address), MigrationError>,
    ) -> Result<Address, Refusal> {
        let mut state = self.0.lock();
        if !state.was_incoming {
            return Err(Refusal::generic(
                "'-incoming' was not specified on the command line",
            ));
        }
        if !state.may_come_in {
            return Err(Refusal::generic(
                "The incoming migration has already been started",
            ));
        }
        let options = self.0.settings.for_migration();
        state.may_come_in = false;
        let control = self.begin(&mut state, Some(address.clone()));
        drop(state);

        let listening = options
            .check()
            .map_err(MigrationError::from)
            .and_then(|()| listen(&self.0.guest, &options));

        let mut state = self.0.lock();
        let (listener, at) = match listening {
            Ok(listening) => listening,
            Err(error) => {
                state.migration = None;
                state.may_come_in = true;
                return Err(Refusal::generic(error.chain()));
            }
        };
        if let Some(migration) = &mut state.migration {
            migration.listens_at = Some(at.clone());
        }
        let running = self.run(&mut state, control, move |machine, control| {
            let received = hotlift::receive(&machine.guest, listener, &options, control);
            if let Err(error) = &received
                && exit_on_error
            {
                let reason = error.chain();
                machine
                    .shutdown
                    .make(Err(MonitorError::Incoming { reason }));
            }
            received.map(|report| Outcome::Received(Box::new(report)))
        });
        state.may_come_in = running.is_err();
        running.map(|()| at)
    }

    /// Listens again for the source of an interrupted postcopy, which has the missing pages: `migrate-recover`.
    fn recover(&self, arguments: &Map<String, Value>) -> Result<Value, Refusal> {
        let control = {
            let state = self.0.lock();
            let incoming = state.running().filter(|one| one.listens_at.is_some());
            let waits = [Status::PostcopyPaused, Status::PostcopyRecover];
            let paused = incoming.filter(|one| waits.contains(&one.control.status()));
            let migration = paused.ok_or_else(refusal::not_paused)?;
            migration.control.clone()
        };
        let address = address::of_arguments(arguments)?;
        // The lock of the state is released, because name resolution may take time.
        let listening = address.listen().map_err(MigrationError::from);
        let listener = listening.map_err(|error| Refusal::generic(error.chain()))?;
        let at = listener.address().ok();
        control
            .recover(listener)
            .map_err(|_| refusal::not_paused())?;
        if let Some(migration) = &mut self.0.lock().migration {
            migration.listens_at = at.or(migration.listens_at.take());
        }
        Ok(json!({}))
    }

    /// Enables postcopy: after the next switchover the guest runs at the destination, even if pages are missing there.
    fn start_postcopy(&self) -> Result<Value, Refusal> {
        let state = self.0.lock();
        if !self.0.settings.for_migration().postcopy.ram {
            return Err(Refusal::generic(
                "Enable postcopy with migrate_set_capability before the start of migration",
            ));
        }
        let outgoing = state.migration.as_ref();
        match outgoing.filter(|one| one.listens_at.is_none()) {
            Some(migration) => {
                // A migration that has just ended ignores this, as in QEMU: a client cannot avoid this case.
                migration.control.start_postcopy();
                Ok(json!({}))
            }
            None => Err(Refusal::generic(
                "Postcopy must be started after migration has been started",
            )),
        }
    }

    fn pause(&self) -> Result<Value, Refusal> {
        let state = self.0.lock();
        match state.running() {
            Some(migration) if migration.control.pause_postcopy() => Ok(json!({})),
            _ => Err(refusal::no_postcopy()),
        }
    }

    fn cancel(&self) -> Value {
        let mut state = self.0.lock();
        let outgoing = state.running().filter(|one| one.listens_at.is_none());
        // The guest may run at the destination and need the remaining pages. Then a cancel takes effect only after
        // 'migrate-pause'.
        let is_needed = |one: &&Migration| {
            let status = one.control.status();
            IN_POSTCOPY.contains(&status) && status != Status::PostcopyPaused
        };
        let outgoing = outgoing.filter(|one| !is_needed(one));
        if let Some(migration) = outgoing {
            migration.control.cancel();
            // If the guest has already left this host, the engine does not cancel.
            let status = migration.control.status();
            if matches!(status, Status::Cancelling | Status::None) {
                self.0.show(&mut state, Status::Cancelling);
            }
        }
        json!({})
    }

    fn proceed(&self, arguments: &Map<String, Value>) -> Result<Value, Refusal> {
        let wanted = command_table::migration_status(arguments)?;
        let state = self.0.lock();
        let shown = state
            .migration
            .as_ref()
            .map_or(Status::None, |migration| migration.shown);
        match &state.migration {
            Some(migration) if shown == Status::PreSwitchover && wanted == shown.name() => {
                migration.control.proceed();
                Ok(json!({}))
            }
            _ => Err(Refusal::generic(format!(
                "Migration not in expected state: {}",
                shown.name()
            ))),
        }
    }

    fn stop(&self) -> Result<Value, Refusal> {
        let mut state = self.0.lock();
        let stopped = self.0.guest.stop(state.has_arrived());
        stopped.map_err(|error| refusal::of(&error))?;
        state.in_doubt = false;
        if state.run == RunState::Running {
            state.run = RunState::Paused;
            events::stop(&self.0.events);
        }
        Ok(json!({}))
    }

    fn cont(&self) -> Result<Value, Refusal> {
        let mut state = self.0.lock();
        state.refuse_in_doubt()?;
        match state.run {
            RunState::FinishMigrate => {
                return Err(Refusal::generic("Migration is not finalized yet"));
            }
            RunState::PostMigrate => {
                return Err(Refusal::generic(
                    "The guest has been migrated: it runs at its destination",
                ));
            }
            RunState::InMigrate | RunState::Running | RunState::Paused => {}
        }
        let continued = self.0.guest.cont(state.has_arrived());
        continued.map_err(|error| refusal::of(&error))?;
        if state.run == RunState::Paused {
            state.run = RunState::Running;
            events::resume(&self.0.events);
        }
        Ok(json!({}))
    }

    fn query_status(&self) -> StatusInfo {
        let run = self.0.lock().run;
        StatusInfo {
            status: run.name().to_owned(),
            running: run == RunState::Running,
        }
    }

    fn query_uuid(&self) -> Value {
        let uuid = Uuid(self.0.guest.uuid()).to_string();
        to_value(&UuidInfo { uuid })
    }

    fn query_migrate(&self) -> MigrationInfo {
        let state = self.0.lock();
        let begun = |one: &&Migration| one.shown != Status::None;
        let Some(migration) = state.migration.as_ref().filter(begun) else {
            return MigrationInfo::default();
        };
        let status = migration.shown;
        let progress = &migration.progress;
        let is_outgoing = migration.listens_at.is_none() && migration.is_running();
        let has_figures = [Status::Active, Status::PreSwitchover, Status::Device];
        if is_outgoing && (has_figures.contains(&status) || IN_POSTCOPY.contains(&status)) {
            let (progress, elapsed) = (progress.clone(), migration.started.elapsed());
            let (jobs, compression) = (migration.control.jobs(), migration.compression);
            let stall = migration.control.stall();
            // Reading /proc is slow, and the engine waits for this lock while the guest is paused.
            drop(state);
            let info =
                query_migrate::source_under_way(status, elapsed, &progress, &jobs, compression);
            return query_migrate::with_stall(info, stall);
        }
        let listens_at = migration.listens_at.as_ref();
        match &migration.outcome {
            Some(Outcome::Sent(report)) => {
                let dirty = progress.dirty_pages_per_second;
                let total = self.0.ram_bytes();
                query_migrate::source_completed(report, total, dirty, migration.compression)
            }
            Some(Outcome::Received(report)) => query_migrate::destination_completed(report),
            Some(Outcome::Failed(why)) => query_migrate::failed(status, why),
            Some(Outcome::Cancelled) => query_migrate::only_status(status),
            None => MigrationInfo {
                socket_address: listens_at.map(|at| vec![address::to_qapi(at)]),
                ..query_migrate::only_status(status)
            },
        }
    }

    fn set_parameters(&self, parameters: &Map<String, Value>) -> Result<Value, Refusal> {
        let state = self.0.lock();
        let running = state.running().map(|migration| &migration.control);
        let is_live = |name: &str| hotlift::options::option(name).is_ok_and(|option| option.live);
        self.0
            .settings
            .set_parameters(parameters, running, &is_live)?;
        Ok(json!({}))
    }
}

impl Commands for GuestMonitor {
    fn execute(&self, command: &str, arguments: &Value) -> Result<Value, Refusal> {
        let none = Map::new();
        let given = command_table::check(command, arguments, &none)?;
        match command {
            "migrate" => self.migrate(given),
            "migrate-incoming" => {
                let address = address::of_arguments(given)?;
                let exit = given.get("exit-on-error") != Some(&Value::Bool(false));
                self.receive(&address, exit).map(|_| json!({}))
            }
            "migrate-recover" => self.recover(given),
            "migrate_cancel" => Ok(self.cancel()),
            "migrate-continue" => self.proceed(given),
            "migrate-start-postcopy" => self.start_postcopy(),
            "migrate-pause" => self.pause(),
            "migrate-set-capabilities" => {
                let state = self.0.lock();
                let is_running = state.running().is_some();
                self.0
                    .settings
                    .set_capabilities(&given["capabilities"], is_running)?;
                Ok(json!({}))
            }
            "query-migrate-capabilities" => Ok(self.0.settings.capabilities()),
            "migrate-set-parameters" => self.set_parameters(given),
            "query-migrate-parameters" => Ok(self.0.settings.parameters()),
            "query-migrate" => Ok(to_value(&self.query_migrate())),
            "query-migrationthreads" => Ok(to_value(&query_migrate::threads())),
            "stop" => self.stop(),
            "cont" => self.cont(),
            "query-status" => Ok(to_value(&self.query_status())),
            "query-uuid" => Ok(self.query_uuid()),
            "quit" => {
                self.0.shutdown.make(Ok(()));
                Ok(json!({}))
            }
            _ => introspection::execute(self, command, given, &|_| true),
        }
    }
}

impl Machine {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn ram_bytes(&self) -> u64 {
        let blocks = self.guest.ram().iter();
        blocks.map(|block| block.len() as u64).sum()
    }

    /// Sets the status that clients see. If it is new, sends the event MIGRATION.
    fn show(&self, state: &mut State, status: Status) {
        let Some(migration) = &mut state.migration else {
            return;
        };
        // Between a cancel and the end of the migration, clients do not see the states of the engine.
        let hidden = migration.shown == Status::Cancelling
            && migration.outcome.is_none()
            && status != Status::Cancelling;
        if migration.shown == status || hidden {
            return;
        }
        migration.shown = status;
        if self.settings.has_events() {
            events::status(&self.events, status);
        }
    }

    /// Handles an event of the engine. The engine sends events in the order in which they occur.
    fn happened(&self, event: MigrationEvent) {
        let mut state = self.lock();
        match event {
            // `ended` shows these states, because the final figures are known only then.
            MigrationEvent::Status(
                Status::None | Status::Completed | Status::Failed | Status::Cancelled,
            ) => {}
            MigrationEvent::Status(status) => self.show(&mut state, status),
            MigrationEvent::Pass(pass) => {
                if self.settings.has_events() {
                    events::pass(&self.events, pass);
                }
            }
            MigrationEvent::Stopped => {
                if state.run == RunState::Running {
                    events::stop(&self.events);
                }
                state.run = RunState::FinishMigrate;
            }
            MigrationEvent::Resumed => self.resumed(&mut state),
        }
    }

    /// Runs the guest after the migration no longer stops it, unless the operator has stopped it.
    fn resumed(&self, state: &mut State) {
        // A `stop` or `cont` before the guest arrived was only recorded, and takes effect now.
        let by_operator = self.guest.is_stopped_by_operator();
        let done = match by_operator {
            true => self.guest.stop(true),
            false => self.guest.cont(true),
        };
        if let Err(error) = done {
            warn!("hotlift: {}", error_line(&error));
        }
        if by_operator {
            state.run = RunState::Paused;
        } else if state.run != RunState::Running {
            state.run = RunState::Running;
            events::resume(&self.events);
        }
    }

    /// Handles a panic of the engine. If the migration had stopped the guest, its state is now unknown.
    fn panicked(&self) {
        let why = "internal error: the thread of the migration panicked".to_owned();
        let mut state = self.lock();
        state.in_doubt = state.run == RunState::FinishMigrate;
        self.finish(&mut state, Outcome::Failed(why), Status::Failed);
    }

    fn ended(&self, outcome: Result<Outcome, MigrationError>) {
        let mut state = self.lock();
        let (outcome, status) = match outcome {
            Ok(outcome) => {
                if let Outcome::Sent(_) = outcome {
                    state.run = RunState::PostMigrate;
                }
                (outcome, Status::Completed)
            }
            Err(MigrationError::Cancelled) => {
                self.show(&mut state, Status::Cancelling);
                (Outcome::Cancelled, Status::Cancelled)
            }
            Err(error) => {
                state.in_doubt = matches!(error, MigrationError::InDoubt);
                let is_outgoing = state
                    .migration
                    .as_ref()
                    .is_some_and(|one| one.listens_at.is_none());
                if is_outgoing && let MigrationError::PagesMissing { .. } = error {
                    state.run = RunState::PostMigrate;
                }
                (Outcome::Failed(refusal::error_desc(&error)), Status::Failed)
            }
        };
        self.finish(&mut state, outcome, status);
    }

    fn finish(&self, state: &mut State, outcome: Outcome, status: Status) {
        // The migration has left the guest stopped: either it is unknown if the destination runs the guest, or the guest could
        // not be continued.
        if state.run == RunState::FinishMigrate {
            self.guest.leave_to_operator();
            state.run = RunState::Paused;
        }
        if let Some(migration) = &mut state.migration {
            migration.outcome = Some(outcome);
        }
        self.show(state, status);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use hotlift_mem::Backing;
    use hotlift_vmm::workload::Workload;
    use hotlift_vmm::{BuiltinGuest, GuestKind, GuestSettings};

    use super::*;

    fn waiting() -> GuestMonitor {
        let settings = GuestSettings {
            ram_bytes: 8 << 20,
            backing: Backing::Private,
            vcpus: 1,
            workload: Workload::Idle,
            rate: 1,
            working_set: None,
            seed: 1,
            uuid: [0; 16],
        };
        let guest = hotlift_vmm::create(GuestKind::Threads, &settings).unwrap();
        GuestMonitor::new(
            Arc::<dyn BuiltinGuest>::from(guest),
            Options::default(),
            Events::new(),
            ShutdownRequest::default(),
            true,
        )
    }

    /// A client's slow `migrate-incoming` does not delay the answers to other clients.
    #[test]
    fn clients_get_replies_while_an_incoming_guest_is_prepared() {
        let monitor = waiting();
        let anywhere: Address = "tcp:127.0.0.1:0".parse().unwrap();
        let ask = |command: &'static str, arguments: Value| {
            let (answer, answered) = channel();
            let other = monitor.clone();
            thread::spawn(move || answer.send(other.execute(command, &arguments)));
            answered
                .recv_timeout(Duration::from_secs(60))
                .expect("an answer during the preparation")
        };
        let at = monitor.receive_as(&anywhere, false, |_, _| {
            let status = ask("query-status", Value::Null).unwrap();
            assert_eq!(status["status"], "inmigrate");
            let info = ask("query-migrate", Value::Null).unwrap();
            assert_eq!(info, json!({}), "it does not listen yet");
            let again = json!({ "uri": "tcp:127.0.0.1:0" });
            let refused = ask("migrate-incoming", again).unwrap_err().desc;
            assert!(refused.contains("already been started"), "{refused}");
            let events = json!([{ "capability": "events", "state": true }]);
            let refused = ask(
                "migrate-set-capabilities",
                json!({ "capabilities": events }),
            );
            assert_eq!(refused.unwrap_err().desc, IN_PROGRESS);
            let error = TransportError::Listen {
                uri: "there".to_owned(),
                source: std::io::ErrorKind::AddrInUse.into(),
            };
            Err(error.into())
        });
        assert!(at.unwrap_err().desc.contains("there"));
        assert_eq!(ask("query-migrate", Value::Null).unwrap(), json!({}));

        // The failed command does not affect the next one.
        let at = monitor.receive(&anywhere, false).unwrap();
        let info = ask("query-migrate", Value::Null).unwrap();
        assert_eq!(info["status"], "setup");
        assert_eq!(info["socket-address"], json!([address::to_qapi(&at)]));
        let refused = ask("migrate-recover", json!({ "uri": "tcp:127.0.0.1:0" }));
        let why = "Migrate recover can only be run when postcopy is paused.";
        assert_eq!(refused.unwrap_err().desc, why);
        monitor.end(false);
    }
}
