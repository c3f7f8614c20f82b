//! Objects and devices of a QEMU, read and created over QMP.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::error::QmpError;
use crate::qemu::{Qemu, optional_answer};

/// A memory backend of QEMU that other processes can also map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedBackend {
    /// Object id.
    pub id: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Mapped file; `None` for anonymous shared memory.
    pub file: Option<String>,
}

/// A virtio-mem device.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VirtioMem {
    /// QOM path of the memory backend.
    pub memdev: String,
    /// Plugged memory in bytes.
    pub size: u64,
    /// Size of the backend in bytes.
    pub max_size: u64,
}

/// QOM paths under which devices of the command line and of `device_add` are listed.
pub(crate) const PERIPHERALS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// An entry in the answer of `qom-list`.
#[derive(Deserialize)]
pub(crate) struct Entry {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
}

/// An element in the answer of `query-memory-devices`.
#[derive(Deserialize)]
pub(crate) struct Plugged {
    /// Kind of the device: `dimm`, `virtio-mem` and others.
    #[serde(rename = "type")]
    pub kind: String,
    pub data: Value,
}

impl Qemu {
    /// Reads a property of an object (`qom-get`); `None` if the object or the property does not exist.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn property<T: DeserializeOwned>(
        &mut self,
        path: &str,
        property: &str,
    ) -> Result<Option<T>, QmpError> {
        let arguments = json!({ "path": path, "property": property });
        optional_answer(self.ask("qom-get", &arguments))
    }

    /// Lists the children and properties of an object (`qom-list`); empty if QEMU refuses.
    pub(crate) fn entries(&mut self, path: &str) -> Result<Vec<Entry>, QmpError> {
        let entries = self.ask("qom-list", &json!({ "path": path }));
        Ok(optional_answer(entries)?.unwrap_or_default())
    }

    /// Reads all properties of an object with their values (`qom-list-get`, QEMU 10.1 and newer); `None` if QEMU does not
    /// support this.
    pub(crate) fn values(&mut self, path: &str) -> Result<Option<Vec<(String, Value)>>, QmpError> {
        #[derive(Deserialize)]
        struct Object {
            properties: Vec<Property>,
        }
        #[derive(Deserialize)]
        struct Property {
            name: String,
            #[serde(default)]
            value: Value,
        }
        let objects = self.ask::<Vec<Object>>("qom-list-get", &json!({ "paths": [path] }));
        let object = optional_answer(objects)?.and_then(|objects| objects.into_iter().next());
        let properties = object.map(|object| object.properties.into_iter());
        Ok(properties.map(|all| all.map(|it| (it.name, it.value)).collect()))
    }

    /// Creates an object with id `id` that stores `text`. The text is readable as the property `data` of `/objects/ID`. Returns
    /// false if this QEMU cannot create objects.
    ///
    /// # Errors
    /// As [`crate::Client::execute`]; [`QmpError::Command`] also if an object with this id exists.
    pub fn keep_text(&mut self, id: &str, text: &str) -> Result<bool, QmpError> {
        let arguments = json!({ "qom-type": "secret", "id": id, "data": text });
        match self.command("object-add", &arguments) {
            Ok(()) => Ok(true),
            Err(QmpError::Command { class, .. }) if class == "CommandNotFound" => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes an object (`object-del`).
    ///
    /// # Errors
    /// As [`crate::Client::execute`].
    pub fn delete_object(&mut self, id: &str) -> Result<(), QmpError> {
        self.command("object-del", &json!({ "id": id }))
    }

    /// Lists the memory backends that other processes can map, sorted by id.
    ///
    /// # Errors
    /// As [`crate::Client::execute`].
    pub fn shared_backends(&mut self) -> Result<Vec<SharedBackend>, QmpError> {
        #[derive(Deserialize)]
        struct Backend {
            id: Option<String>,
            size: u64,
            #[serde(default)]
            share: bool,
        }
        let all: Vec<Backend> = self.ask("query-memdev", &Value::Null)?;
        let mut shared = Vec::new();
        for backend in all.into_iter().filter(|backend| backend.share) {
            let id = backend.id.unwrap_or_default();
            let file = self.property(&format!("/objects/{id}"), "mem-path")?;
            let bytes = backend.size;
            shared.push(SharedBackend { id, bytes, file });
        }
        shared.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(shared)
    }

    /// Lists all memory devices in QEMU's order; `None` if QEMU does not report them.
    pub(crate) fn plugged(&mut self) -> Result<Option<Vec<Plugged>>, QmpError> {
        optional_answer(self.ask("query-memory-devices", &Value::Null))
    }

    /// Lists the virtio-mem devices; empty if QEMU does not report them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn virtio_mem(&mut self) -> Result<Vec<VirtioMem>, QmpError> {
        let devices = self.plugged()?.unwrap_or_default();
        let devices = devices.into_iter().filter(|it| it.kind == "virtio-mem");
        Ok(devices
            .filter_map(|device| serde_json::from_value(device.data).ok())
            .collect())
    }

    /// Returns true if a virtio-balloon device may report free pages to QEMU, which then does not migrate them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn hints_free_pages(&mut self) -> Result<bool, QmpError> {
        for path in PERIPHERALS {
            let entries = self.entries(path)?;
            for Entry { name, .. } in entries
                .iter()
                .filter(|entry| entry.kind.starts_with("child<virtio-balloon"))
            {
                let hints = self.property(&format!("{path}/{name}"), "free-page-hint")?;
                if hints.unwrap_or(false) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Returns the default values of migration properties by name (`device-list-properties`); empty if QEMU does not report
    /// them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn migration_defaults(&mut self) -> Result<Map<String, Value>, QmpError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Property {
            name: String,
            default_value: Option<Value>,
        }
        let arguments = json!({ "typename": "migration" });
        let properties = self.ask::<Vec<Property>>("device-list-properties", &arguments);
        let properties = optional_answer(properties)?.unwrap_or_default();
        Ok(properties
            .into_iter()
            .filter_map(|property| Some((property.name, property.default_value?)))
            .collect())
    }
}
