//! Commands of a relay's monitor. A relay has no guest: clients can query the relay, limit its bandwidth, and cancel its
//! migration.

use std::sync::{Arc, Mutex, MutexGuard};

use hotlift::relay::{RelayProgress, RelayReport};
use hotlift::{Control, MigrationError, MigrationEvent, Options, Status};
use hotlift_qmp::MigrationInfo;
use hotlift_qmp::qapi::to_value;
use hotlift_qmp::server::{Commands, Events, Refusal};
use hotlift_terminal::signals::Interrupt;
use serde_json::{Map, Value, json};

use crate::settings::Settings;
use crate::{command_table, events, introspection, query_migrate, refusal};
use hotlift_mem::lock;

/// Commands that a relay does not have, each with an explanation for the client.
const OF_OTHERS: &[(&str, &str)] = &[
    (
        "migrate",
        "the QEMU that connects here starts the migration",
    ),
    ("migrate-incoming", "a relay listens from its start"),
    (
        "migrate-continue",
        "the source's QEMU waits for 'migrate-continue'",
    ),
    ("migrate-start-postcopy", "the source's QEMU has postcopy"),
    ("migrate-pause", "the source's QEMU has postcopy"),
    ("migrate-recover", "the destination's QEMU has postcopy"),
    (
        "migrate-set-capabilities",
        "they are flags of the command, and both QEMUs' own",
    ),
    ("stop", "the guest is a QEMU's"),
    ("cont", "the guest is a QEMU's"),
    ("query-status", "the guest is a QEMU's"),
    ("query-uuid", "the guest is a QEMU's"),
];

/// Monitor of a relay. All clones share one relay.
#[derive(Clone)]
pub struct RelayMonitor(Arc<Relay>);

struct Relay {
    settings: Settings,
    events: Events,
    interrupt: Interrupt,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// True if a client has changed parameters. The changed parameters also apply to later migrations.
    was_changed: bool,
    asked_to_quit: bool,
    migration: Option<Migration>,
}

/// The latest migration: active, or ended.
struct Migration {
    control: Control,
    shown: Status,
    progress: RelayProgress,
    outcome: Option<Result<RelayReport, String>>,
}

impl RelayMonitor {
    /// Creates the monitor of a relay whose sending side has `options`. A client's `quit` raises `interrupt`.
    pub fn new(options: Options, events: Events, interrupt: &Interrupt) -> Self {
        Self(Arc::new(Relay {
            settings: Settings::as_given(options),
            events,
            interrupt: interrupt.clone(),
            state: Mutex::default(),
        }))
    }

    /// Prepares for the next migration, and returns its control.
    pub fn waits(&self) -> Control {
        let weak = Arc::downgrade(&self.0);
        let control = Control::watched(Box::new(move |event| {
            if let (Some(relay), MigrationEvent::Status(status)) = (weak.upgrade(), event) {
                relay.happened(status);
            }
        }));
        let mut state = self.0.lock();
        if state.was_changed {
            control.change(&self.0.settings.for_migration());
        }
        state.migration = Some(Migration {
            control: control.clone(),
            shown: Status::None,
            progress: RelayProgress::default(),
            outcome: None,
        });
        control
    }

    /// Records the latest progress, for `query-migrate`.
    pub fn note(&self, progress: &RelayProgress) {
        if let Some(migration) = &mut self.0.lock().migration {
            migration.progress = *progress;
        }
    }

    /// Records the outcome of the migration, and sends its event.
    pub fn ended(&self, outcome: &Result<RelayReport, MigrationError>) {
        let mut state = self.0.lock();
        let status = match outcome {
            Ok(_) => Status::Completed,
            Err(MigrationError::Cancelled) => Status::Cancelled,
            Err(_) => Status::Failed,
        };
        if let Some(migration) = &mut state.migration {
            migration.outcome = Some(match outcome {
                Ok(report) => Ok(report.clone()),
                Err(error) => Err(refusal::error_desc(error)),
            });
        }
        self.0.show(&mut state, status);
    }

    /// Sends the event that the process ends. Returns true if a client has requested the end.
    pub fn end(&self) -> bool {
        let asked = self.0.lock().asked_to_quit;
        events::shutdown(&self.0.events, asked);
        asked
    }

    fn cancel(&self) -> Value {
        let mut state = self.0.lock();
        if let Some(migration) = &state.migration
            && matches!(migration.shown, Status::Active | Status::Device)
        {
            migration.control.cancel();
            if migration.control.status() == Status::Cancelling {
                self.0.show(&mut state, Status::Cancelling);
            }
        }
        json!({})
    }

    fn query_migrate(&self) -> MigrationInfo {
        let state = self.0.lock();
        let Some(migration) = &state.migration else {
            return MigrationInfo::default();
        };
        let status = migration.shown;
        let compression = query_migrate::Compression::of(&self.0.settings.for_migration());
        let progress = &migration.progress;
        match &migration.outcome {
            Some(Ok(report)) => {
                query_migrate::relay_completed(report, progress.total_bytes, compression)
            }
            Some(Err(_)) if status == Status::Cancelled => query_migrate::only_status(status),
            Some(Err(why)) => query_migrate::failed(status, why),
            None if matches!(
                status,
                Status::Active | Status::Device | Status::PostcopyActive
            ) =>
            {
                let jobs = migration.control.jobs();
                let info = query_migrate::relay_under_way(status, progress, &jobs, compression);
                query_migrate::with_stall(info, migration.control.stall())
            }
            None => query_migrate::only_status(status),
        }
    }

    fn set_parameters(&self, parameters: &Map<String, Value>) -> Result<Value, Refusal> {
        let mut state = self.0.lock();
        // Without a migration, only the settings of the next migration change.
        let idle = Control::new();
        let control = state.migration.as_ref().map_or(&idle, |one| &one.control);
        let is_live = |name: &str| name == "max-bandwidth";
        self.0
            .settings
            .set_parameters(parameters, Some(control), &is_live)?;
        state.was_changed = true;
        Ok(json!({}))
    }
}

impl Commands for RelayMonitor {
    fn execute(&self, command: &str, arguments: &Value) -> Result<Value, Refusal> {
        let none = Map::new();
        let given = command_table::check(command, arguments, &none)?;
        let has = |name: &str| OF_OTHERS.iter().all(|(one, _)| *one != name);
        if let Some((name, why)) = OF_OTHERS.iter().find(|(name, _)| *name == command) {
            return Err(Refusal::generic(format!("A relay has no {name}: {why}")));
        }
        match command {
            "migrate_cancel" => Ok(self.cancel()),
            "query-migrate-capabilities" => Ok(self.0.settings.capabilities()),
            "migrate-set-parameters" => self.set_parameters(given),
            "query-migrate-parameters" => Ok(self.0.settings.parameters()),
            "query-migrate" => Ok(to_value(&self.query_migrate())),
            "query-migrationthreads" => Ok(to_value(&query_migrate::threads())),
            "quit" => {
                self.0.lock().asked_to_quit = true;
                self.0.interrupt.raise();
                Ok(json!({}))
            }
            _ => introspection::execute(self, command, given, &has),
        }
    }
}

impl Relay {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Records a new status of the engine. The final status is recorded by [`RelayMonitor::ended`], with the final figures.
    fn happened(&self, status: Status) {
        let ends = matches!(
            status,
            Status::None | Status::Completed | Status::Failed | Status::Cancelled
        );
        if !ends {
            self.show(&mut self.lock(), status);
        }
    }

    fn show(&self, state: &mut State, status: Status) {
        let Some(migration) = &mut state.migration else {
            return;
        };
        if migration.shown == status {
            return;
        }
        migration.shown = status;
        if self.settings.has_events() {
            events::status(&self.events, status);
        }
    }
}
