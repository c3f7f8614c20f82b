//! The record of the settings that a command has changed in QEMU, stored inside that QEMU.
//!
//! The record is an object in QEMU (QOM) that contains only text. The record exists as long as the changed settings do. Every
//! later command finds the record, on any host and for any user.

use std::fs;
use std::path::Path;

use hotlift_qmp::{Qemu, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Id of the QOM object that stores the record.
const ID: &str = "hotlift-changed-settings";

/// The settings that a command has changed in QEMU, and the process of that command.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    owner: Owner,
    pub capabilities: Vec<Change<bool>>,
    pub parameters: Vec<Change<Value>>,
}

/// A changed setting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Change<T> {
    pub name: String,
    pub before: T,
    pub set: T,
    /// Values that the command may set later.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub later: Vec<T>,
}

/// The process that changed the settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    /// Boot id of the kernel that runs the process.
    boot: String,
    /// Pid namespace of the process.
    namespace: String,
    pid: u32,
    /// Start time of the process in ticks since boot, to detect a reused process id; `None` if unknown.
    start: Option<u64>,
}

impl Owner {
    fn this() -> Self {
        let pid = std::process::id();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Self {
            boot: boot.trim().to_owned(),
            namespace: namespace.display().to_string(),
            pid,
            start: start_of(pid),
        }
    }

    /// Returns true if the owner is not the process `this`, and still runs. `start_of` returns the start time of a process.
    /// Returns false if this process cannot see the owner. Then only the state of QEMU's migration shows if the owner is
    /// active.
    fn is_at_work(&self, this: &Self, start_of: impl Fn(u32) -> Option<u64>) -> bool {
        let is_seen = self.boot == this.boot && self.namespace == this.namespace;
        is_seen && self != this && self.start.is_some() && start_of(self.pid) == self.start
    }
}

/// Returns the start time of a process in ticks since boot; `None` if the process has ended.
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    start_in(&stat)
}

/// Parses the start time in the text of `/proc/PID/stat` (proc(5)). The start time is field 22. Field 2 may contain spaces.
/// Returns `None` if field 3, the state, is that of an ended process.
fn start_in(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    let has_ended = matches!(state, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| !has_ended)
}

impl Record {
    /// Creates a record whose owner is this process.
    pub fn new(capabilities: Vec<Change<bool>>, parameters: Vec<Change<Value>>) -> Self {
        Self {
            owner: Owner::this(),
            capabilities,
            parameters,
        }
    }

    /// Stores the record in `qemu`.
    ///
    /// # Errors
    /// QMP errors, also if QEMU already has a record: another command is active.
    pub fn put(&self, qemu: &mut Qemu) -> Result<(), QmpError> {
        let text = serde_json::to_string(self).map_err(|source| QmpError::Answer {
            command: "object-add".to_owned(),
            source,
        })?;
        qemu.keep_text(ID, &text).map(|_| ())
    }

    /// Reads the record stored in `qemu`; `None` if there is none.
    ///
    /// # Errors
    /// QMP errors, also for a record in another format.
    pub fn of(qemu: &mut Qemu) -> Result<Option<Self>, QmpError> {
        let text: Option<String> = qemu.property(&format!("/objects/{ID}"), "data")?;
        let record = text.map(|text| serde_json::from_str(&text)).transpose();
        record.map_err(|source| QmpError::Answer {
            command: "qom-get".to_owned(),
            source,
        })
    }

    /// Removes the record from `qemu`.
    ///
    /// # Errors
    /// QMP errors.
    pub fn remove(qemu: &mut Qemu) -> Result<(), QmpError> {
        match qemu.delete_object(ID) {
            // QEMU has no record, or does not support objects.
            Err(QmpError::Command { .. }) if Self::of(qemu)?.is_none() => Ok(()),
            removed => removed,
        }
    }

    /// Returns the id of the process that created the record; `None` if it is this process, or has ended.
    pub fn owner_at_work(&self) -> Option<u32> {
        let is_at_work = self.owner.is_at_work(&Owner::this(), start_of);
        is_at_work.then_some(self.owner.pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_alive_while_the_same_process_exists() {
        let owner = |pid, start| Owner {
            boot: "boot".to_owned(),
            namespace: "pid:[1]".to_owned(),
            pid,
            start,
        };
        let this = owner(1, Some(10));
        let other = owner(2, Some(20));
        assert!(other.is_at_work(&this, |pid| (pid == 2).then_some(20)));
        assert!(!other.is_at_work(&this, |_| None), "it has ended");
        assert!(
            !other.is_at_work(&this, |_| Some(21)),
            "another process has its id"
        );
        assert!(!this.is_at_work(&this, |_| Some(10)), "this process");
        assert!(!owner(2, None).is_at_work(&this, |_| None));
        let elsewhere = Owner {
            boot: "another".to_owned(),
            ..other
        };
        assert!(
            !elsewhere.is_at_work(&this, |_| Some(20)),
            "not seen from here"
        );
    }

    #[test]
    fn a_record_without_newer_fields_is_read_and_written() {
        let text = r#"{"name":"a","before":1,"set":2}"#;
        let change: Change<Value> = serde_json::from_str(text).unwrap();
        assert_eq!(change.later, Vec::<Value>::new());
        assert_eq!(serde_json::to_string(&change).unwrap(), text);
    }

    #[test]
    fn the_start_time_of_a_process_is_read_after_any_name() {
        let stat = |name: &str, state: &str| {
            let fields: Vec<_> = (4..=52).map(|field| field.to_string()).collect();
            format!("7 ({name}) {state} {}", fields.join(" "))
        };
        assert_eq!(start_in(&stat("hotlift", "S")), Some(22));
        assert_eq!(start_in(&stat("a) b (", "R")), Some(22));
        assert_eq!(start_in(&stat("hotlift", "Z")), None);
        assert_eq!(start_in("7 (x"), None);
        assert!(Owner::this().start.is_some());
    }
}
