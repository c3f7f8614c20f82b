//! Sends QEMU's events to the clients.

use hotlift::Status;
use hotlift_qmp::server::Events;
use serde_json::json;

/// Sends MIGRATION: the state of the migration has changed to `status`.
pub fn status(events: &Events, status: Status) {
    let data = json!({ "status": status.name() });
    events.send("MIGRATION", Some(&data));
}

/// Sends MIGRATION_PASS: the dirty log was fetched, `pass` times so far.
pub fn pass(events: &Events, pass: u64) {
    let data = json!({ "pass": pass });
    events.send("MIGRATION_PASS", Some(&data));
}

/// Sends STOP: the guest has stopped.
pub fn stop(events: &Events) {
    events.send("STOP", None);
}

/// Sends RESUME: the guest has started to run.
pub fn resume(events: &Events) {
    events.send("RESUME", None);
}

/// Sends SHUTDOWN: the process ends. `by_client` is true after a client's request, and false after a signal.
pub fn shutdown(events: &Events, by_client: bool) {
    let reason = if by_client {
        "host-qmp-quit"
    } else {
        "host-signal"
    };
    let data = json!({ "guest": false, "reason": reason });
    events.send("SHUTDOWN", Some(&data));
}
