//! Typed QMP commands for migrations.

use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::address::QmpAddress;
use crate::client::{Client, Event};
use crate::error::QmpError;
use crate::machine::{StatusInfo, UuidInfo, Version, VersionInfo};
use crate::machine_type::{LAST_FLUSHED_BY_SECTION, upstream_version};
use crate::migration::{MigrationCapabilityStatus, MigrationInfo, MigrationThreadInfo};
use crate::ram_blocks::{self, RamBlock};
use crate::uuid::Uuid;

/// A connection to a QEMU, whose version is known.
#[derive(Debug)]
pub struct Qemu {
    client: Client,
    version: Version,
}

impl Qemu {
    /// Connects, and queries the version.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect(address: &QmpAddress, timeout: Duration) -> Result<Self, QmpError> {
        Self::over(Client::connect(address, timeout)?)
    }

    /// Wraps an existing connection, and queries QEMU's version over it.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn over(client: Client) -> Result<Self, QmpError> {
        let mut qemu = Self {
            client,
            version: Version {
                major: 0,
                minor: 0,
                micro: 0,
            },
        };
        qemu.version = qemu.query_version()?;
        Ok(qemu)
    }

    /// Returns the client that implements the protocol.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Returns QEMU's version, which was queried when the connection was made.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Executes `query-version`.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn query_version(&mut self) -> Result<Version, QmpError> {
        Ok(self.ask::<VersionInfo>("query-version", &Value::Null)?.qemu)
    }

    /// Executes `query-status`.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn query_status(&mut self) -> Result<StatusInfo, QmpError> {
        self.ask("query-status", &Value::Null)
    }

    /// Executes `query-uuid`; all digits are zero if the machine has no UUID.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn query_uuid(&mut self) -> Result<Uuid, QmpError> {
        let answer: UuidInfo = self.ask("query-uuid", &Value::Null)?;
        answer.uuid.parse().map_err(|_| QmpError::Protocol {
            command: "query-uuid".to_owned(),
            problem: "an invalid UUID".to_owned(),
        })
    }

    /// Returns the machine type, such as `pc-i440fx-7.2`; `None` if this QEMU does not report it.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn machine_type(&mut self) -> Result<Option<String>, QmpError> {
        let arguments = json!({ "path": "/machine", "property": "type" });
        let name = optional_answer(self.ask::<String>("qom-get", &arguments))?;
        Ok(name.map(|name| name.strip_suffix("-machine").unwrap_or(&name).to_owned()))
    }

    /// Returns the property `multifd-flush-after-each-section` of the running machine's type (`query-machines`, QEMU 9.1 and
    /// newer).
    ///
    /// - `Some(true)` before QEMU 8.1, which always flushes after each section.
    /// - `None` if this QEMU does not report it.
    /// - A value from `-global` is not visible.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn flushes_after_each_section(&mut self) -> Result<Option<bool>, QmpError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Machine {
            name: String,
            #[serde(default)]
            compat_props: Vec<Property>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Property {
            qom_type: String,
            property: String,
            value: String,
        }
        match (self.version.major, self.version.minor) {
            (..8, _) | (8, 0) => return Ok(Some(true)),
            (8, _) | (9, 0) => return Ok(None),
            _ => {}
        }
        let running = self.machine_type()?;
        if let Some(version) = running.as_deref().and_then(upstream_version) {
            return Ok(Some(version <= LAST_FLUSHED_BY_SECTION));
        }
        // The query takes 60 ms and returns 500 KB in QEMU 10.0. The query is skipped if the name of the machine type
        // determines the answer.
        let arguments = json!({ "compat-props": true });
        let machines = optional_answer(self.ask::<Vec<Machine>>("query-machines", &arguments))?;
        let (Some(machines), Some(running)) = (machines, running) else {
            return Ok(None);
        };
        let machine = machines.into_iter().find(|machine| machine.name == running);
        Ok(machine.map(|machine| {
            let is_it = |property: &&Property| {
                property.qom_type == "migration"
                    && property.property == "multifd-flush-after-each-section"
            };
            // If a property has several values, QEMU uses the last value.
            let value = machine.compat_props.iter().rfind(is_it);
            value.is_some_and(|property| ["on", "true", "yes"].contains(&property.value.as_str()))
        }))
    }

    /// Returns the machine's RAM at start in bytes, without plugged-in memory (`query-memory-size-summary`); `None` if this
    /// QEMU does not report it.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn base_memory(&mut self) -> Result<Option<u64>, QmpError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Answer {
            base_memory: u64,
        }
        let answer = self.ask::<Answer>("query-memory-size-summary", &Value::Null);
        optional_answer(answer.map(|answer| answer.base_memory))
    }

    /// Returns the number of vCPUs (`query-cpus-fast`); `None` if this QEMU does not report it.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn vcpus(&mut self) -> Result<Option<usize>, QmpError> {
        let answer = self.ask::<Vec<Value>>("query-cpus-fast", &Value::Null);
        optional_answer(answer.map(|vcpus| vcpus.len()))
    }

    /// Returns the RAM blocks that a migration transfers (`info ramblock` of the human monitor); `None` if this QEMU does not
    /// report them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn ram_blocks(&mut self) -> Result<Option<Vec<RamBlock>>, QmpError> {
        Ok(self
            .monitor("info ramblock")?
            .as_deref()
            .map(ram_blocks::parse))
    }

    /// Returns the names of the RAM blocks, each with the page size of its host memory in bytes; `None` if this QEMU does not
    /// report them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn page_sizes(&mut self) -> Result<Option<Vec<(String, u64)>>, QmpError> {
        let blocks = self.ram_blocks()?;
        let size = |block: RamBlock| (block.name, block.page_size);
        Ok(blocks.map(|blocks| blocks.into_iter().map(size).collect()))
    }

    /// Executes a line of the human monitor, and returns its output; `None` if this QEMU does not support this.
    pub(crate) fn monitor(&mut self, line: &str) -> Result<Option<String>, QmpError> {
        optional_answer(self.ask("human-monitor-command", &json!({ "command-line": line })))
    }

    /// Executes `query-migrate-capabilities`. Returns names and values in QEMU's order.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn query_capabilities(&mut self) -> Result<Vec<(String, bool)>, QmpError> {
        let list: Vec<MigrationCapabilityStatus> =
            self.ask("query-migrate-capabilities", &Value::Null)?;
        Ok(list
            .into_iter()
            .map(|one| (one.capability, one.state))
            .collect())
    }

    /// Executes `migrate-set-capabilities`. A capability that this QEMU does not know is skipped if it should be off.
    ///
    /// # Errors
    /// [`QmpError::NoCapability`] if a capability that this QEMU does not know should be on; otherwise as [`Client::execute`].
    pub fn set_capabilities(&mut self, wanted: &[(&str, bool)]) -> Result<(), QmpError> {
        let known = self.query_capabilities()?;
        let mut list = Vec::new();
        for (name, state) in wanted {
            if known.iter().any(|(known, _)| known == name) {
                list.push(json!({ "capability": name, "state": state }));
            } else if *state {
                return Err(QmpError::NoCapability {
                    name: (*name).to_owned(),
                    version: self.version.to_string(),
                });
            }
        }
        self.command("migrate-set-capabilities", &json!({ "capabilities": list }))
    }

    /// Executes `query-migrate-parameters`.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn query_parameters(&mut self) -> Result<Map<String, Value>, QmpError> {
        self.ask("query-migrate-parameters", &Value::Null)
    }

    /// Executes `migrate-set-parameters`. `parameters` must be a JSON object.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn set_parameters(&mut self, parameters: &Value) -> Result<(), QmpError> {
        self.command("migrate-set-parameters", parameters)
    }

    /// Executes `migrate`: starts an outgoing migration to `uri`. [`Qemu::query_migrate`] returns its progress and result.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn migrate(&mut self, uri: &str) -> Result<(), QmpError> {
        self.command("migrate", &json!({ "uri": uri }))
    }

    /// Executes `migrate-incoming`: a QEMU that was started with `-incoming defer` listens on `uri`. With `stay_on_error` (QEMU
    /// 9.1 and newer) QEMU does not exit if the migration fails, and can report the reason.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn migrate_incoming(&mut self, uri: &str, stay_on_error: bool) -> Result<(), QmpError> {
        let mut arguments = json!({ "uri": uri });
        if stay_on_error && (self.version.major, self.version.minor) >= (9, 1) {
            arguments["exit-on-error"] = false.into();
        }
        self.command("migrate-incoming", &arguments)
    }

    /// Executes `migrate-recover`: a QEMU whose postcopy was interrupted listens on `uri` for the missing pages.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn migrate_recover(&mut self, uri: &str) -> Result<(), QmpError> {
        self.command("migrate-recover", &json!({ "uri": uri }))
    }

    /// Executes `migrate_cancel`. Succeeds even if no migration is active.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn migrate_cancel(&mut self) -> Result<(), QmpError> {
        self.command("migrate_cancel", &Value::Null)
    }

    /// Executes `query-migrate`: returns state, progress and result of the migration.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn query_migrate(&mut self) -> Result<MigrationInfo, QmpError> {
        self.ask("query-migrate", &Value::Null)
    }

    /// Executes `query-migrationthreads`: returns the names of the threads that an outgoing migration still has. Returns `None`
    /// if this QEMU does not know the command (versions before 8.0, and 11.1).
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn query_migration_threads(&mut self) -> Result<Option<Vec<String>>, QmpError> {
        match self.ask::<Vec<MigrationThreadInfo>>("query-migrationthreads", &Value::Null) {
            Ok(threads) => Ok(Some(threads.into_iter().map(|one| one.name).collect())),
            Err(QmpError::Command { class, .. }) if class == "CommandNotFound" => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Executes `stop`: pauses the vCPUs.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn stop(&mut self) -> Result<(), QmpError> {
        self.command("stop", &Value::Null)
    }

    /// Executes `cont`: runs the vCPUs.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn cont(&mut self) -> Result<(), QmpError> {
        self.command("cont", &Value::Null)
    }

    /// Executes `quit`: QEMU ends. If QEMU closes the connection before it has answered, this is not an error.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn quit(&mut self) -> Result<(), QmpError> {
        match self.command("quit", &Value::Null) {
            Err(QmpError::Closed { .. }) => Ok(()),
            outcome => outcome,
        }
    }

    /// Returns the next event, see [`Client::wait_event`].
    ///
    /// # Errors
    /// As [`Client::wait_event`].
    pub fn wait_event(&mut self, timeout: Duration) -> Result<Option<Event>, QmpError> {
        self.client.wait_event(timeout)
    }

    pub(crate) fn ask<T: DeserializeOwned>(
        &mut self,
        command: &str,
        arguments: &Value,
    ) -> Result<T, QmpError> {
        let answer = self.client.execute(command, arguments)?;
        serde_json::from_value(answer).map_err(|source| QmpError::Answer {
            command: command.to_owned(),
            source,
        })
    }

    pub(crate) fn command(&mut self, command: &str, arguments: &Value) -> Result<(), QmpError> {
        self.client.execute(command, arguments).map(|_| ())
    }
}

/// Converts a refused command, or an answer in another format, to `None`. Other errors are returned.
pub(crate) fn optional_answer<T>(answer: Result<T, QmpError>) -> Result<Option<T>, QmpError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(QmpError::Command { .. } | QmpError::Answer { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
