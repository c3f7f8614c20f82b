//! Commands that every monitor answers alike, and words that they share.

use std::error::Error;

use hotlift::transport::TransportError;
use hotlift::{MigrationError, Status};
use hotlift_console::error::error_line;
use hotlift_qmp::server::Events;
use serde_json::{Map, Value, json};

use super::commands::{Commands, Refusal};
use super::table::COMMANDS;
use super::{hmp, schema};

/// All states that QEMU's migrations have; ours are some of them.
const MIGRATION_STATUS: &[&str] = &[
    "none",
    "setup",
    "cancelling",
    "cancelled",
    "active",
    "postcopy-active",
    "postcopy-paused",
    "postcopy-recover-setup",
    "postcopy-recover",
    "completed",
    "failed",
    "colo",
    "pre-switchover",
    "device",
    "wait-unplug",
];

/// The version of a monitor: that of the QEMU whose interface it is, and ours as the package.
pub fn version() -> Value {
    json!({
        "qemu": { "major": 10, "minor": 0, "micro": 2 },
        "package": concat!("hotlift ", env!("CARGO_PKG_VERSION")),
    })
}

/// Runs what needs no more than the tables. `has` says which commands this monitor has.
pub fn execute(
    commands: &dyn Commands,
    command: &str,
    arguments: &Map<String, Value>,
    has: &dyn Fn(&str) -> bool,
) -> Result<Value, Refusal> {
    match command {
        "query-version" => Ok(version()),
        "query-name" => Ok(json!({})),
        "query-commands" => Ok(COMMANDS
            .iter()
            .filter(|row| has(row.name))
            .map(|row| json!({ "name": row.name }))
            .collect()),
        "query-qmp-schema" => Ok(schema::schema(has)),
        "human-monitor-command" => {
            let line = arguments["command-line"].as_str().unwrap_or_default();
            Ok(json!(hmp::run_line(commands, line)))
        }
        _ => Err(Refusal::no_command(command)),
    }
}

/// The event MIGRATION.
pub fn tell_status(events: &Events, status: Status) {
    let data = json!({ "status": status.name() });
    events.send("MIGRATION", Some(&data));
}

/// The event SHUTDOWN: a client has asked for it, or a signal.
pub fn tell_shutdown(events: &Events, by_client: bool) {
    let reason = if by_client {
        "host-qmp-quit"
    } else {
        "host-signal"
    };
    let data = json!({ "guest": false, "reason": reason });
    events.send("SHUTDOWN", Some(&data));
}

/// `query-uuid`.
pub fn uuid(uuid: [u8; 16]) -> Value {
    json!({ "UUID": crate::qemu::uuid::Uuid(uuid).to_string() })
}

/// The argument of `migrate-continue`.
pub fn status_of(arguments: &Map<String, Value>) -> Result<&str, Refusal> {
    let state = arguments["state"].as_str().unwrap_or_default();
    if MIGRATION_STATUS.contains(&state) {
        return Ok(state);
    }
    Err(Refusal::generic(format!(
        "Parameter 'state' does not accept value '{state}'"
    )))
}

/// `migrate-pause`.
pub fn no_postcopy() -> Refusal {
    Refusal::generic(
        "migrate-pause is currently only supported during postcopy-active or postcopy-recover state",
    )
}

/// An error of ours.
pub fn refused(error: &dyn Error) -> Refusal {
    Refusal::generic(error_line(error))
}

/// Why a migration failed: as QEMU says it, where tools look for its words.
pub fn in_qemus_words(error: &MigrationError) -> String {
    let MigrationError::Transport(TransportError::Connect { uri, source }) = error else {
        return error.chain();
    };
    let address = uri.split_once(':').map_or(uri.as_str(), |(_, rest)| rest);
    let reason = source.to_string();
    // The number of the error is std's addition.
    let reason = reason.split(" (os error").next().unwrap_or_default();
    format!("Failed to connect to '{address}': {reason}")
}
