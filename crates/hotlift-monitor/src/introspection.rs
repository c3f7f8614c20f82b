//! Commands whose answers come only from the tables of commands and options. All monitors give the same answers.

use hotlift_qmp::qapi::to_value;
use hotlift_qmp::server::{Commands, Refusal};
use hotlift_qmp::{CommandInfo, NameInfo, Version, VersionInfo};
use serde_json::{Map, Value, json};

use crate::command_table::COMMANDS;
use crate::{hmp, schema};

/// Returns the answer of `query-version`: the QEMU version that the monitor emulates, and Hotlift's version as the package.
pub fn version() -> Value {
    to_value(&VersionInfo {
        qemu: Version {
            major: 10,
            minor: 0,
            micro: 2,
        },
        package: concat!("hotlift ", env!("CARGO_PKG_VERSION")).to_owned(),
    })
}

/// Executes `command`, which the monitor `commands` itself does not handle. `has` returns true for the names of this monitor's
/// commands.
pub fn execute(
    commands: &dyn Commands,
    command: &str,
    arguments: &Map<String, Value>,
    has: &dyn Fn(&str) -> bool,
) -> Result<Value, Refusal> {
    match command {
        "query-version" => Ok(version()),
        "query-name" => Ok(to_value(&NameInfo { name: None })),
        "query-commands" => {
            let rows = COMMANDS.iter().filter(|row| has(row.name));
            let commands = rows.map(|row| CommandInfo {
                name: row.name.to_owned(),
            });
            Ok(to_value(&commands.collect::<Vec<_>>()))
        }
        "query-qmp-schema" => Ok(schema::schema(has)),
        "human-monitor-command" => {
            let line = arguments["command-line"].as_str().unwrap_or_default();
            Ok(json!(hmp::run_line(commands, line)))
        }
        _ => Err(Refusal::no_command(command)),
    }
}
