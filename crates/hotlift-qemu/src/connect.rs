//! The QMP socket of a QEMU that somebody else has started, or is starting just now.

use std::time::Duration;

use hotlift_qmp::{Client, Qemu, QmpAddress, QmpError};
use hotlift_terminal::output::complain;

/// Between two questions about what QEMU may send no event of: the end of a migration's threads, and a change of state without
/// the capability `events`.
pub const QUERY_INTERVAL: Duration = Duration::from_millis(50);

/// Connects within `timeout`; says so if the socket must be waited for.
///
/// # Errors
/// As [`Qemu::connect`].
pub fn connect(address: &QmpAddress, timeout: Duration) -> Result<Qemu, QmpError> {
    let client = Client::connect_telling(address, timeout, |error| {
        complain!("waiting for the QMP socket {address}: {error}");
    });
    Qemu::over(client?)
}
