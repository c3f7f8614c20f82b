//! QEMU's events, sent to clients.

use hotlift::Status;
use hotlift_qmp::server::Events;
use serde_json::json;

/// Sends MIGRATION: a migration has a new state.
pub fn status(events: &Events, status: Status) {
    let data = json!({ "status": status.name() });
    events.send("MIGRATION", Some(&data));
}

/// Sends MIGRATION_PASS: the dirty log was fetched for the `pass`-th time.
pub fn pass(events: &Events, pass: u64) {
    let data = json!({ "pass": pass });
    events.send("MIGRATION_PASS", Some(&data));
}

/// Sends STOP: the guest no longer runs.
pub fn stop(events: &Events) {
    events.send("STOP", None);
}

/// Sends RESUME: the guest runs.
pub fn resume(events: &Events) {
    events.send("RESUME", None);
}

/// Sends SHUTDOWN: the process ends, because of a client's request or a signal.
pub fn shutdown(events: &Events, by_client: bool) {
    let reason = if by_client {
        "host-qmp-quit"
    } else {
        "host-signal"
    };
    let data = json!({ "guest": false, "reason": reason });
    events.send("SHUTDOWN", Some(&data));
}
