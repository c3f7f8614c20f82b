//! Tables of QEMU's migration capabilities and parameters, and how each command treats them.
//!
//! The tables list every name of QEMU 7.2, 10.0 and 11.1. A capability or parameter without a row may change the stream, so a
//! QEMU that uses it is refused.

use hotlift::options::qmp_option;
use serde_json::{Map, Value};

use crate::error::QemuError;

/// Purpose of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Migrates a guest to or from another QEMU.
    Migrate {
        /// True if RAM is not sent, but stays in files that both QEMUs map (`--ignore-shared`).
        ignore_shared: bool,
    },
    /// Saves a guest to a file.
    Save,
    /// Restores a guest from a file.
    Restore,
}

/// Treatment of a capability by a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Treatment {
    /// Switched off for the migration, and restored afterwards.
    Off,
    /// Set to the value that the relay needs, and restored afterwards.
    Set,
    /// Must be equal on both sides: the destination's value is set to the source's, and restored afterwards.
    Alike,
    /// Unchanged: the capability does not affect a stream that a relay forwards.
    Kept,
    /// The command refuses a QEMU that has it enabled.
    Refused,
}

/// A migration capability of QEMU.
#[derive(Debug)]
pub struct Capability {
    /// Name in QEMU.
    pub name: &'static str,
    migrate: Treatment,
    save: Treatment,
    restore: Treatment,
    /// Reason for the treatment, for the operator.
    pub reason: &'static str,
}

impl Capability {
    const fn new(name: &'static str, treatment: Treatment, reason: &'static str) -> Self {
        Self {
            name,
            migrate: treatment,
            save: treatment,
            restore: treatment,
            reason,
        }
    }

    /// Sets the treatment by a save and by a restore, which use a file instead of a second QEMU.
    const fn with_file(mut self, save: Treatment, restore: Treatment) -> Self {
        (self.save, self.restore) = (save, restore);
        self
    }

    /// Returns how a command with this purpose treats the capability.
    #[must_use]
    pub fn treatment(&self, purpose: Purpose) -> Treatment {
        match purpose {
            Purpose::Migrate {
                ignore_shared: true,
            } if self.name == IGNORE_SHARED => Treatment::Set,
            Purpose::Migrate { .. } => self.migrate,
            Purpose::Save => self.save,
            Purpose::Restore => self.restore,
        }
    }
}

/// Capability that keeps RAM in the shared files that back it.
pub const IGNORE_SHARED: &str = "x-ignore-shared";

/// Capability to send requested pages over a separate connection (postcopy).
pub const PREEMPT: &str = "postcopy-preempt";

/// Every capability of QEMU 7.2 to 11.1.
pub const CAPABILITIES: &[Capability] = {
    use Treatment::{Alike, Kept, Off, Refused, Set};
    &[
        Capability::new(
            "auto-converge",
            Kept,
            "it slows the guest down and changes no page",
        ),
        Capability::new(
            "background-snapshot",
            Off,
            "its stream needs neither a pause nor a relay",
        ),
        Capability::new(
            "block",
            Refused,
            "a relay cannot carry the contents of disks, which the stream would contain",
        ),
        Capability::new("compress", Off, "the relay compresses pages itself"),
        Capability::new(
            "dirty-bitmaps",
            Alike,
            "a save file has no place for the block bitmaps",
        )
        .with_file(Refused, Off),
        Capability::new(
            "dirty-limit",
            Kept,
            "it slows the guest down and changes no page",
        ),
        Capability::new("events", Set, "progress is read from events"),
        Capability::new(
            "late-block-activate",
            Kept,
            "it only delays the locks of the disks of a paused guest",
        ),
        Capability::new("mapped-ram", Off, "it needs a file instead of a stream"),
        Capability::new("multifd", Set, "the relay has channels"),
        Capability::new("pause-before-switchover", Off, "no client ends the pause"),
        Capability::new("postcopy-blocktime", Kept, "it only measures"),
        Capability::new(PREEMPT, Off, "no postcopy follows; a lazy restore sets it"),
        Capability::new(
            "postcopy-ram",
            Off,
            "no postcopy follows; a lazy restore sets it",
        ),
        Capability::new("rdma-pin-all", Kept, "it affects only RDMA"),
        Capability::new("release-ram", Kept, "it affects only a postcopy source"),
        Capability::new(
            "return-path",
            Set,
            "the relay learns from it that a guest is loaded",
        ),
        Capability::new(
            "switchover-ack",
            Alike,
            "the source waits for a message that only a destination of the same setting sends",
        )
        .with_file(Off, Off),
        Capability::new(
            "validate-uuid",
            Kept,
            "QEMU compares the UUID in the stream anyway",
        ),
        Capability::new(
            "x-colo",
            Off,
            "the source would keep running after the migration",
        ),
        Capability::new(
            IGNORE_SHARED,
            Refused,
            "RAM in shared files would be neither moved nor saved; 'migrate' and 'serve' accept it with --ignore-shared if \
             both QEMUs map the same files",
        ),
        Capability::new("xbzrle", Off, "a relay has no old pages to apply deltas to"),
        Capability::new("zero-blocks", Kept, "it affects only capability block"),
        Capability::new(
            "zero-copy-send",
            Off,
            "QEMU reaches the relay by a UNIX socket",
        ),
    ]
};

/// A migration parameter of QEMU.
#[derive(Debug)]
pub struct Parameter {
    /// Name in QEMU.
    pub name: &'static str,
    /// The only accepted value; `None` if every value is accepted.
    pub only: Option<&'static str>,
    /// Reason for the treatment.
    pub reason: &'static str,
}

const fn kept(name: &'static str, reason: &'static str) -> Parameter {
    let only = None;
    Parameter { name, only, reason }
}

const ANNOUNCE: &str =
    "the operator of the destination sets how it announces the guest's addresses";
const OFF: &str = "it belongs to a capability or method that is off or refused";
const SET: &str = "the command sets and restores it";
const THROTTLE: &str = "it slows the guest down and changes no page";
const TLS: &str = "it belongs to tls-creds, which the command clears";

/// Every parameter of QEMU 7.2 to 11.1.
pub const PARAMETERS: &[Parameter] = &[
    kept("announce-initial", ANNOUNCE),
    kept("announce-max", ANNOUNCE),
    kept("announce-rounds", ANNOUNCE),
    kept("announce-step", ANNOUNCE),
    kept(
        "avail-switchover-bandwidth",
        "it decides when QEMU switches over",
    ),
    kept(
        "block-bitmap-mapping",
        "the operators of both hosts map the bitmaps",
    ),
    kept("block-incremental", OFF),
    kept("compress-level", OFF),
    kept("compress-threads", OFF),
    kept("compress-wait-thread", OFF),
    kept("cpr-exec-command", "it belongs to a mode that is refused"),
    kept("cpu-throttle-increment", THROTTLE),
    kept("cpu-throttle-initial", THROTTLE),
    kept("cpu-throttle-tailslow", THROTTLE),
    kept("decompress-threads", OFF),
    kept("direct-io", "it belongs to migrations to files"),
    kept("downtime-limit", SET),
    kept("max-bandwidth", SET),
    kept("max-cpu-throttle", THROTTLE),
    kept("max-postcopy-bandwidth", OFF),
    Parameter {
        name: "mode",
        only: Some("normal"),
        reason: "a cpr mode keeps RAM and devices in the host, and a relay carries neither",
    },
    kept("multifd-channels", SET),
    kept("multifd-compression", SET),
    kept("multifd-qatzip-level", OFF),
    kept("multifd-zlib-level", OFF),
    kept("multifd-zstd-level", OFF),
    kept("throttle-trigger-threshold", THROTTLE),
    kept("tls-authz", TLS),
    kept("tls-creds", SET),
    kept("tls-hostname", TLS),
    kept("vcpu-dirty-limit", THROTTLE),
    kept("x-checkpoint-delay", OFF),
    kept("x-rdma-chunk-size", "it affects only RDMA"),
    kept("x-vcpu-dirty-limit-period", THROTTLE),
    kept("xbzrle-cache-size", OFF),
    kept(
        "zero-page-detection",
        "the relay reads every form of zero pages",
    ),
];

/// Returns the row of a capability.
#[must_use]
pub fn capability(name: &str) -> Option<&'static Capability> {
    CAPABILITIES.iter().find(|row| row.name == name)
}

/// Returns the row of a parameter.
#[must_use]
pub fn parameter(name: &str) -> Option<&'static Parameter> {
    PARAMETERS.iter().find(|row| row.name == name)
}

/// Checks the enabled capabilities in `now`. Each must have a row, and the command must not refuse it.
///
/// # Errors
/// [`QemuError::Setting`] with the first refused capability.
pub fn check_capabilities(purpose: Purpose, now: &[(String, bool)]) -> Result<(), QemuError> {
    for (name, _) in now.iter().filter(|(_, is_on)| *is_on) {
        let reason = match capability(name) {
            Some(row) if row.treatment(purpose) == Treatment::Refused => row.reason,
            Some(_) => continue,
            None => UNKNOWN,
        };
        return Err(QemuError::Setting {
            what: "capability",
            name: name.clone(),
            value: "on".to_owned(),
            reason,
            remedy: "off".to_owned(),
        });
    }
    Ok(())
}

const UNKNOWN: &str = "this version of hotlift does not know its effect on the stream";

/// Checks that no parameter has a value that the commands refuse. `defaults` returns QEMU's own default of a parameter that has
/// no row; `None` if QEMU does not report one.
///
/// # Errors
/// [`QemuError::Setting`] with the first refused parameter; errors of `defaults`.
pub fn check_parameters(
    now: &Map<String, Value>,
    defaults: impl Fn(&str) -> Option<Value>,
) -> Result<(), QemuError> {
    for (name, value) in now {
        let (default, reason) = match parameter(name) {
            Some(row) => (row.only.map(Value::from), row.reason),
            // This QEMU is a built-in guest of Hotlift. Its own migration options correspond to those of a relay.
            None if qmp_option(name).is_some() => continue,
            None => (defaults(name), UNKNOWN),
        };
        let is_accepted = match (&default, parameter(name)) {
            (Some(default), _) => default == value,
            (None, Some(_)) => true,
            (None, None) => is_empty(value),
        };
        if is_accepted {
            continue;
        }
        return Err(QemuError::Setting {
            what: "parameter",
            name: name.clone(),
            value: text(value),
            reason,
            remedy: default.as_ref().map_or("its default".to_owned(), text),
        });
    }
    Ok(())
}

/// Returns true if the value is empty. QEMU 7.2 to 11.1 report every default except empty ones.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
    }
}

/// Formats a value in the syntax of an operator's input.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const MIGRATE: Purpose = Purpose::Migrate {
        ignore_shared: false,
    };

    fn refusal(purpose: Purpose, name: &str) -> Option<String> {
        let now = [("events".to_owned(), true), (name.to_owned(), true)];
        let checked = check_capabilities(purpose, &now);
        checked.err().map(|error| error.to_string())
    }

    #[test]
    fn a_capability_that_is_refused_or_unknown_is_named() {
        for name in ["block", IGNORE_SHARED, "x-of-the-future"] {
            for purpose in [MIGRATE, Purpose::Save, Purpose::Restore] {
                let refusal = refusal(purpose, name).unwrap();
                assert!(refusal.contains(&format!("'{name}'")), "{refusal}");
            }
            let off = [(name.to_owned(), false)];
            assert!(check_capabilities(MIGRATE, &off).is_ok());
        }
        let asked = Purpose::Migrate {
            ignore_shared: true,
        };
        assert_eq!(refusal(asked, IGNORE_SHARED), None);
        assert!(refusal(asked, "block").is_some());
    }

    #[test]
    fn block_bitmaps_move_and_are_not_saved() {
        assert_eq!(refusal(MIGRATE, "dirty-bitmaps"), None);
        assert!(refusal(Purpose::Save, "dirty-bitmaps").is_some());
        assert_eq!(refusal(Purpose::Restore, "dirty-bitmaps"), None);
    }

    #[test]
    fn a_parameter_is_refused_by_its_value() {
        let check = |name: &str, value: Value, default: Option<Value>| {
            let now = Map::from_iter([(name.to_owned(), value)]);
            let checked = check_parameters(&now, |_| default.clone());
            checked.err().map(|error| error.to_string())
        };
        assert_eq!(check("mode", json!("normal"), None), None);
        let refused = check("mode", json!("cpr-reboot"), None).unwrap();
        assert!(
            refused.contains("'mode'") && refused.contains("cpr-reboot"),
            "{refused}"
        );
        for (name, value) in [
            ("downtime-limit", 1),
            ("max-bandwidth", 5),
            ("cpu-throttle-initial", 90),
        ] {
            assert_eq!(check(name, json!(value), Some(json!(0))), None);
        }
        assert_eq!(check("new", json!(1), Some(json!(1))), None);
        assert!(check("new", json!(2), Some(json!(1))).is_some());
        assert!(check("new", json!(2), None).is_some());
        assert_eq!(check("new", json!([]), None), None);
    }
}
