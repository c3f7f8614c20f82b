//! What a server runs for its clients.

use serde_json::{Value, json};

/// Runs QMP's commands.
pub trait Commands: Send + Sync {
    /// Runs `command`. `arguments` are an object, or null for none.
    ///
    /// # Errors
    /// [`Refusal`], in QEMU's words where it has any.
    fn execute(&self, command: &str, arguments: &Value) -> Result<Value, Refusal>;
}

/// Why a command was refused; what a client finds in `error`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{desc}")]
pub struct Refusal {
    /// `GenericError` or `CommandNotFound`.
    pub class: &'static str,
    /// For people.
    pub desc: String,
}

impl Refusal {
    /// The class of almost all.
    pub fn generic(desc: impl Into<String>) -> Self {
        Self {
            class: "GenericError",
            desc: desc.into(),
        }
    }

    /// The class of a command that is not there, or not now.
    pub fn not_found(desc: impl Into<String>) -> Self {
        Self {
            class: "CommandNotFound",
            desc: desc.into(),
        }
    }

    /// There is no such command, in QEMU's words.
    #[must_use]
    pub fn no_command(name: &str) -> Self {
        Self::not_found(format!("The command {name} has not been found"))
    }

    pub(super) fn to_json(&self) -> Value {
        json!({ "class": self.class, "desc": self.desc })
    }
}
