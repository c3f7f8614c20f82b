//! Commands that a server executes for its clients.

use serde_json::{Value, json};

/// Executes QMP commands, for the server.
pub trait Commands: Send + Sync {
    /// Executes `command`. `arguments` are an object, or null for none.
    ///
    /// # Errors
    /// [`Refusal`], with QEMU's own text if QEMU has one for this case.
    fn execute(&self, command: &str, arguments: &Value) -> Result<Value, Refusal>;
}

/// Refusal of a command, sent to the client as the member `error`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{desc}")]
pub struct Refusal {
    /// QEMU's error class: `GenericError` or `CommandNotFound`.
    pub class: &'static str,
    /// Description for the operator.
    pub desc: String,
}

impl Refusal {
    /// Returns a refusal of the class `GenericError`.
    pub fn generic(desc: impl Into<String>) -> Self {
        Self {
            class: "GenericError",
            desc: desc.into(),
        }
    }

    /// Returns a refusal of the class `CommandNotFound`: the command does not exist, or is not available now.
    pub fn not_found(desc: impl Into<String>) -> Self {
        Self {
            class: "CommandNotFound",
            desc: desc.into(),
        }
    }

    /// Returns QEMU's refusal of an unknown command.
    #[must_use]
    pub fn no_command(name: &str) -> Self {
        Self::not_found(format!("The command {name} has not been found"))
    }

    pub(super) fn to_json(&self) -> Value {
        json!({ "class": self.class, "desc": self.desc })
    }
}
