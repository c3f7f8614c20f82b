//! What clients are refused with, in QEMU's words where it has any.

use std::error::Error;

use hotlift::MigrationError;
use hotlift::transport::TransportError;
use hotlift_qmp::server::Refusal;
use hotlift_terminal::error::error_line;

/// An error of ours.
pub fn of(error: &dyn Error) -> Refusal {
    Refusal::generic(error_line(error))
}

/// `migrate-pause`.
pub fn no_postcopy() -> Refusal {
    Refusal::generic(
        "migrate-pause is currently only supported during postcopy-active or postcopy-recover state",
    )
}

/// `migrate-recover`.
pub fn not_paused() -> Refusal {
    Refusal::generic("Migrate recover can only be run when postcopy is paused.")
}

/// Why a migration failed (`error-desc`): as QEMU says it, where tools look for its words.
pub fn error_desc(error: &MigrationError) -> String {
    let MigrationError::Transport(TransportError::Connect { uri, source }) = error else {
        return error.chain();
    };
    let address = uri.split_once(':').map_or(uri.as_str(), |(_, rest)| rest);
    let reason = source.to_string();
    // The number of the error is std's addition.
    let reason = reason.split(" (os error").next().unwrap_or_default();
    format!("Failed to connect to '{address}': {reason}")
}
