//! The answer of `query-qmp-schema`. The schema consists of the commands, the options, and the objects in both, which are the
//! types of hotlift-qmp. All names are those of QEMU's documentation.

use std::collections::BTreeSet;

use hotlift::Status;
use hotlift::options::{Kind, OPTIONS, QmpType};
use hotlift_qmp::all_objects;
use hotlift_qmp::qapi::{Member, Object, Type, needed, optional};
use serde_json::{Value, json};

use crate::command_table::{COMMANDS, CommandInfo};
use crate::run_control::RunState;

/// Objects in arguments of commands and in data of events. Objects in answers come from hotlift-qmp's types. Objects of options
/// come from the table of options.
static OBJECTS: &[Object] = &[
    object("Empty", &[]),
    object(
        "MigrationChannel",
        &[
            needed("channel-type", Type::Enum("MigrationChannelType")),
            needed("addr", Type::Object("MigrationAddress")),
        ],
    ),
    object(
        "MigrationAddress",
        &[
            needed("transport", Type::Enum("MigrationAddressType")),
            needed("type", Type::Enum("SocketAddressType")),
            optional("host", Type::Str),
            optional("port", Type::Str),
            optional("path", Type::Str),
        ],
    ),
    object(
        "SchemaInfo",
        &[needed("name", Type::Str), needed("meta-type", Type::Str)],
    ),
    object(
        "MIGRATION",
        &[needed("status", Type::Enum("MigrationStatus"))],
    ),
    object("MIGRATION_PASS", &[needed("pass", Type::Int)]),
    object(
        "SHUTDOWN",
        &[
            needed("guest", Type::Bool),
            needed("reason", Type::Enum("ShutdownCause")),
        ],
    ),
];

const fn object(name: &'static str, members: &'static [Member]) -> Object {
    Object { name, members }
}

/// Enumerations, except those that are the values of an option.
static ENUMS: &[(&str, &[&str])] = &[
    ("MigrationChannelType", &["main"]),
    ("MigrationAddressType", &["socket"]),
    ("SocketAddressType", &["inet", "unix"]),
    ("ShutdownCause", &["host-qmp-quit", "host-signal"]),
];

/// Events, each with the name of the object that is its data.
pub static EVENTS: &[(&str, &str)] = &[
    ("MIGRATION", "MIGRATION"),
    ("MIGRATION_PASS", "MIGRATION_PASS"),
    ("STOP", "Empty"),
    ("RESUME", "Empty"),
    ("SHUTDOWN", "SHUTDOWN"),
];

/// Returns the schema of a monitor. `has` returns true for the names of this monitor's commands.
pub fn schema(has: &dyn Fn(&str) -> bool) -> Value {
    let mut schema = Schema::default();
    for name in ["str", "int", "number", "boolean"] {
        schema.add(
            name,
            json!({ "meta-type": "builtin", "json-type": builtin(name) }),
        );
    }
    for object in OBJECTS.iter().chain(all_objects()) {
        schema.object(object.name, object.members);
    }
    schema.options();
    for (name, values) in ENUMS {
        schema.enumeration(name, values);
    }
    schema.enumeration("RunState", &RunState::ALL.map(RunState::name));
    schema.enumeration("MigrationStatus", &Status::ALL.map(Status::name));
    for command in COMMANDS.iter().filter(|command| has(command.name)) {
        schema.command(command);
    }
    for (name, data) in EVENTS {
        schema.add(name, json!({ "meta-type": "event", "arg-type": data }));
    }
    schema.arrays();
    Value::Array(schema.entries)
}

/// Returns the name of a JSON type: only `str` has another name in QEMU's schema.
fn builtin(name: &str) -> &str {
    if name == "str" { "string" } else { name }
}

#[derive(Default)]
struct Schema {
    entries: Vec<Value>,
    /// Types that occur as elements of lists.
    elements: BTreeSet<String>,
}

impl Schema {
    fn add(&mut self, name: &str, mut entry: Value) {
        entry["name"] = json!(name);
        self.entries.push(entry);
    }

    fn object(&mut self, name: &str, members: &[Member]) {
        let members: Vec<_> = members
            .iter()
            .map(|member| {
                let kind = self.name_of(member.kind);
                self.member(member.name, &kind, member.optional)
            })
            .collect();
        self.add(name, json!({ "meta-type": "object", "members": members }));
    }

    fn member(&self, name: &str, kind: &str, optional: bool) -> Value {
        let mut member = json!({ "name": name, "type": kind });
        if optional {
            member["default"] = Value::Null;
        }
        member
    }

    fn enumeration(&mut self, name: &str, values: &[&str]) {
        let members: Vec<_> = values.iter().map(|name| json!({ "name": name })).collect();
        self.add(
            name,
            json!({ "meta-type": "enum", "members": members, "values": values }),
        );
    }

    /// Adds the capabilities and parameters in the table of options.
    fn options(&mut self) {
        let mut parameters = Vec::new();
        let mut capabilities = Vec::new();
        for option in OPTIONS {
            if option.kind == Kind::Capability {
                capabilities.push(option.name);
                continue;
            }
            let kind = match option.qmp_type() {
                QmpType::Uint8 | QmpType::Uint64 | QmpType::Size => "int".to_owned(),
                QmpType::Bool => "boolean".to_owned(),
                QmpType::Strings => self.name_of(Type::List("str")),
                QmpType::String => "str".to_owned(),
                QmpType::Enum(names) => {
                    self.enumeration(option.name, &names);
                    option.name.to_owned()
                }
            };
            parameters.push(self.member(&option.qmp_name(), &kind, true));
        }
        self.enumeration("MigrationCapability", &capabilities);
        self.add(
            "MigrationParameters",
            json!({ "meta-type": "object", "members": parameters }),
        );
    }

    fn command(&mut self, command: &CommandInfo) {
        let arguments = match command.arguments {
            None => "MigrationParameters".to_owned(),
            Some([]) => "Empty".to_owned(),
            Some(members) => {
                let name = format!("{}-arg", command.name);
                self.object(&name, members);
                name
            }
        };
        let returns = match command.returns {
            None => "Empty".to_owned(),
            Some(kind) => self.name_of(kind),
        };
        self.add(
            command.name,
            json!({ "meta-type": "command", "arg-type": arguments, "ret-type": returns }),
        );
    }

    fn name_of(&mut self, kind: Type) -> String {
        let name = kind.name();
        if !matches!(kind, Type::List(_)) {
            return name.to_owned();
        }
        self.elements.insert(name.to_owned());
        format!("[{name}]")
    }

    fn arrays(&mut self) {
        for element in std::mem::take(&mut self.elements) {
            let name = format!("[{element}]");
            self.add(
                &name,
                json!({ "meta-type": "array", "element-type": element }),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_that_the_schema_refers_to_is_defined_once() {
        let schema = schema(&|_| true);
        let entries = schema.as_array().unwrap();
        let names: Vec<_> = entries
            .iter()
            .map(|entry| entry["name"].as_str().unwrap())
            .collect();
        let mut types = BTreeSet::new();
        for entry in entries {
            if !["command", "event"].contains(&entry["meta-type"].as_str().unwrap()) {
                assert!(types.insert(entry["name"].as_str().unwrap()), "{entry}");
            }
        }
        for entry in entries {
            let members = entry["members"].as_array().cloned().unwrap_or_default();
            let used = ["arg-type", "ret-type", "element-type"]
                .iter()
                .map(|key| entry[key].clone())
                .chain(members.iter().map(|member| member["type"].clone()));
            for name in used.filter(Value::is_string) {
                assert!(types.contains(name.as_str().unwrap()), "{name} in {entry}");
            }
        }
        for command in COMMANDS {
            assert!(names.contains(&command.name));
        }
    }
}
