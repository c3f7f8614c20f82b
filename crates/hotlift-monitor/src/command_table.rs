//! All QMP commands of a monitor with their arguments and answers, and QEMU's checks of arguments.

use hotlift_qmp::qapi::{Member, Type, needed, optional};
use hotlift_qmp::server::Refusal;
use serde_json::{Map, Value};

/// Name and signature of a command.
#[derive(Debug)]
pub struct CommandInfo {
    /// Name.
    pub name: &'static str,
    /// Arguments; `None` if the arguments are options, which are checked against the table of options.
    pub arguments: Option<&'static [Member]>,
    /// Type of the answer; `None` for an empty object.
    pub returns: Option<Type>,
}

const fn command(
    name: &'static str,
    arguments: &'static [Member],
    returns: Option<Type>,
) -> CommandInfo {
    CommandInfo {
        name,
        arguments: Some(arguments),
        returns,
    }
}

const URI: Member = optional("uri", Type::Str);
const CHANNELS: Member = optional("channels", Type::List("MigrationChannel"));

/// All commands.
pub static COMMANDS: &[CommandInfo] = &[
    command(
        "migrate",
        &[
            URI,
            CHANNELS,
            optional("detach", Type::Bool),
            optional("resume", Type::Bool),
        ],
        None,
    ),
    command(
        "migrate-incoming",
        &[URI, CHANNELS, optional("exit-on-error", Type::Bool)],
        None,
    ),
    command("migrate_cancel", &[], None),
    command(
        "migrate-continue",
        &[needed("state", Type::Enum("MigrationStatus"))],
        None,
    ),
    command("migrate-start-postcopy", &[], None),
    command("migrate-pause", &[], None),
    command("migrate-recover", &[needed("uri", Type::Str)], None),
    command(
        "migrate-set-capabilities",
        &[needed(
            "capabilities",
            Type::List("MigrationCapabilityStatus"),
        )],
        None,
    ),
    command(
        "query-migrate-capabilities",
        &[],
        Some(Type::List("MigrationCapabilityStatus")),
    ),
    CommandInfo {
        name: "migrate-set-parameters",
        arguments: None,
        returns: None,
    },
    command(
        "query-migrate-parameters",
        &[],
        Some(Type::Object("MigrationParameters")),
    ),
    command("query-migrate", &[], Some(Type::Object("MigrationInfo"))),
    command(
        "query-migrationthreads",
        &[],
        Some(Type::List("MigrationThreadInfo")),
    ),
    command("stop", &[], None),
    command("cont", &[], None),
    command("query-status", &[], Some(Type::Object("StatusInfo"))),
    command("query-name", &[], Some(Type::Object("NameInfo"))),
    command("query-uuid", &[], Some(Type::Object("UuidInfo"))),
    command("query-version", &[], Some(Type::Object("VersionInfo"))),
    command("query-commands", &[], Some(Type::List("CommandInfo"))),
    command("query-qmp-schema", &[], Some(Type::List("SchemaInfo"))),
    command(
        "human-monitor-command",
        &[
            needed("command-line", Type::Str),
            optional("cpu-index", Type::Int),
        ],
        Some(Type::Str),
    ),
    command("quit", &[], None),
];

/// Checks the arguments of a command against its row in the table, and returns them. `none` is returned for absent arguments.
pub fn check<'a>(
    command: &str,
    arguments: &'a Value,
    none: &'a Map<String, Value>,
) -> Result<&'a Map<String, Value>, Refusal> {
    let row = COMMANDS
        .iter()
        .find(|row| row.name == command)
        .ok_or_else(|| Refusal::no_command(command))?;
    let given = arguments.as_object().unwrap_or(none);
    if let Some(members) = row.arguments {
        check_members(members, given, "")?;
    }
    Ok(given)
}

/// Checks the members of an object in QEMU's order: first missing members and wrong types, then unexpected members. `prefix`
/// precedes the names of members in errors.
pub fn check_members(
    members: &[Member],
    given: &Map<String, Value>,
    prefix: &str,
) -> Result<(), Refusal> {
    for member in members {
        let name = format!("{prefix}{}", member.name);
        match given.get(member.name) {
            Some(value) => check_type(member.kind, value, &name)?,
            None if member.optional => {}
            None => {
                return Err(Refusal::generic(format!("Parameter '{name}' is missing")));
            }
        }
    }
    let known = |name: &str| members.iter().any(|member| member.name == name);
    match given.keys().find(|name| !known(name)) {
        None => Ok(()),
        Some(name) => Err(Refusal::generic(format!(
            "Parameter '{prefix}{name}' is unexpected"
        ))),
    }
}

fn check_type(kind: Type, value: &Value, name: &str) -> Result<(), Refusal> {
    let (fits, expected) = match kind {
        Type::Str | Type::Enum(_) => (value.is_string(), "string"),
        Type::Bool => (value.is_boolean(), "boolean"),
        Type::Int => (value.is_i64(), "integer"),
        Type::Number => (value.is_number(), "number"),
        Type::Object(_) => (value.is_object(), "object"),
        Type::List(_) => (value.is_array(), "array"),
    };
    if fits {
        return Ok(());
    }
    Err(Refusal::generic(format!(
        "Invalid parameter type for '{name}', expected: {expected}"
    )))
}

/// Names of all migration states of QEMU. Hotlift uses only some of them.
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

/// Returns the argument of `migrate-continue`.
pub fn migration_status(arguments: &Map<String, Value>) -> Result<&str, Refusal> {
    let state = arguments["state"].as_str().unwrap_or_default();
    if MIGRATION_STATUS.contains(&state) {
        return Ok(state);
    }
    Err(Refusal::generic(format!(
        "Parameter 'state' does not accept value '{state}'"
    )))
}
