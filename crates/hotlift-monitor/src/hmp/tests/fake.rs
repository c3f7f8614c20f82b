//! A fake implementation of [`Commands`] for tests.

use std::collections::VecDeque;
use std::sync::Mutex;

use hotlift::Options;
use hotlift::options::{Kind, OPTIONS};
use hotlift_qmp::server::{Commands, Refusal};
use serde_json::{Map, Value as Json, json};

/// Stores options, records the executed commands, and answers `query-migrate` as configured.
#[derive(Default)]
pub struct Fake {
    pub options: Mutex<Options>,
    /// All executed commands, except queries.
    pub executed: Mutex<Vec<(String, Json)>>,
    /// Answers to the next `query-migrate` commands. The last answer is repeated.
    pub migration: Mutex<VecDeque<Json>>,
}

impl Fake {
    pub fn migrating(looks: &[Json]) -> Self {
        let fake = Self::default();
        fake.migration.lock().unwrap().extend(looks.iter().cloned());
        fake
    }

    pub fn executed(&self) -> Vec<(String, Json)> {
        self.executed.lock().unwrap().clone()
    }
}

impl Commands for Fake {
    fn execute(&self, command: &str, arguments: &Json) -> Result<Json, Refusal> {
        let refused = |error: &dyn std::fmt::Display| Refusal::generic(error.to_string());
        let mut options = self.options.lock().unwrap();
        match command {
            "query-migrate" => {
                let mut looks = self.migration.lock().unwrap();
                let look = if looks.len() > 1 {
                    looks.pop_front()
                } else {
                    looks.front().cloned()
                };
                return Ok(look.unwrap_or_else(|| json!({})));
            }
            "query-status" => return Ok(json!({"status": "running", "running": true})),
            "query-version" => {
                return Ok(
                    json!({"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": " (x)"}),
                );
            }
            "query-migrate-capabilities" => {
                let rows = OPTIONS.iter().filter(|row| row.kind == Kind::Capability);
                let ours = rows
                    .map(|row| json!({"capability": row.name, "state": row.read_json(&options)}));
                let theirs = json!({"capability": "mapped-ram", "state": false});
                return Ok(ours.chain([theirs]).collect());
            }
            "query-migrate-parameters" => {
                let rows = OPTIONS.iter().filter(|row| row.kind != Kind::Capability);
                let all: Map<String, Json> = rows
                    .map(|row| (row.qmp_name().into_owned(), row.read_json(&options)))
                    .collect();
                return Ok(Json::Object(all));
            }
            "migrate-set-capabilities" => {
                for one in arguments["capabilities"].as_array().unwrap() {
                    let (name, state) = (one["capability"].as_str(), one["state"].as_bool());
                    options
                        .set_capability(name.unwrap(), state.unwrap())
                        .map_err(|error| refused(&error))?;
                }
            }
            "migrate-set-parameters" => options
                .set_parameters(arguments.as_object().unwrap())
                .map_err(|error| refused(&error))?,
            "migrate-continue" => {
                return Err(Refusal::generic("Migration not in expected state: none"));
            }
            _ => {}
        }
        let executed = (command.to_owned(), arguments.clone());
        self.executed.lock().unwrap().push(executed);
        Ok(json!({}))
    }
}
