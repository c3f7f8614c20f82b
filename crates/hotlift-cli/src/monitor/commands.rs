//! What every monitor talks to: QMP's commands, whoever carries them.

use serde_json::Value;

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
}
