//! What every monitor talks to: QMP's commands, whoever carries them.

pub use hotlift_qmp::server::{Commands, Refusal};
