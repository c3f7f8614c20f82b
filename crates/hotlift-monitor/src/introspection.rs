//! The commands that need no more than the tables, and that every monitor answers alike.

use hotlift_qmp::server::{Commands, Refusal};
use serde_json::{Map, Value, json};

use crate::command_table::COMMANDS;
use crate::{hmp, schema};

/// The version of a monitor: that of the QEMU whose interface it is, and ours as the package.
pub fn version() -> Value {
    json!({
        "qemu": { "major": 10, "minor": 0, "micro": 2 },
        "package": concat!("hotlift ", env!("CARGO_PKG_VERSION")),
    })
}

/// Runs `command` for the monitor `commands`. `has` says which commands this monitor has.
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
