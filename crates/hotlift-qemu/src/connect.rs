//! Connects to the QMP socket of a QEMU that another process has started, or is starting.

use std::time::Duration;

use hotlift_qmp::{Client, Qemu, QmpAddress, QmpError};
use hotlift_terminal::output::warn;

/// Interval between queries for changes that may cause no event. Examples are the end of a migration's threads, and state
/// changes without the capability `events`.
pub const QUERY_INTERVAL: Duration = Duration::from_millis(50);

/// Connects within `timeout`. If the socket does not accept at once, prints a line that the command waits.
///
/// # Errors
/// As [`Qemu::connect`].
pub fn connect(address: &QmpAddress, timeout: Duration) -> Result<Qemu, QmpError> {
    let client = Client::connect_with_notice(address, timeout, |error| {
        warn!("waiting for the QMP socket {address}: {error}");
    });
    Qemu::over(client?)
}
