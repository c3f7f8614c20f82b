//! Errors for clients, with QEMU's text if QEMU has one for this case.

use std::error::Error;

use hotlift::MigrationError;
use hotlift::transport::TransportError;
use hotlift_qmp::server::Refusal;
use hotlift_terminal::error::error_line;

/// Converts an error of Hotlift to a refusal.
pub fn of(error: &dyn Error) -> Refusal {
    Refusal::generic(error_line(error))
}

/// Returns QEMU's refusal of `migrate-pause` without an active postcopy.
pub fn no_postcopy() -> Refusal {
    Refusal::generic(
        "migrate-pause is currently only supported during postcopy-active or postcopy-recover state",
    )
}

/// Returns QEMU's refusal of `migrate-recover` without a paused postcopy.
pub fn not_paused() -> Refusal {
    Refusal::generic("Migrate recover can only be run when postcopy is paused.")
}

/// Returns the text of a migration's failure (`error-desc`) in QEMU's wording, which tools search for.
pub fn error_desc(error: &MigrationError) -> String {
    let MigrationError::Transport(TransportError::Connect { uri, source }) = error else {
        return error.chain();
    };
    let address = uri.split_once(':').map_or(uri.as_str(), |(_, rest)| rest);
    let reason = source.to_string();
    // Rust's standard library appends the error number, QEMU does not.
    let reason = reason.split(" (os error").next().unwrap_or_default();
    format!("Failed to connect to '{address}': {reason}")
}
