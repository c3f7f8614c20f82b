//! What clients are told unasked: QEMU's events.

use hotlift::Status;
use hotlift_qmp::server::Events;
use serde_json::json;

/// MIGRATION: a migration is in another state.
pub fn status(events: &Events, status: Status) {
    let data = json!({ "status": status.name() });
    events.send("MIGRATION", Some(&data));
}

/// MIGRATION_PASS: the dirty log was fetched, for the `pass`th time.
pub fn pass(events: &Events, pass: u64) {
    let data = json!({ "pass": pass });
    events.send("MIGRATION_PASS", Some(&data));
}

/// STOP: the guest runs no longer.
pub fn stop(events: &Events) {
    events.send("STOP", None);
}

/// RESUME: the guest runs.
pub fn resume(events: &Events) {
    events.send("RESUME", None);
}

/// SHUTDOWN: the process ends, because a client has asked for it, or a signal.
pub fn shutdown(events: &Events, by_client: bool) {
    let reason = if by_client {
        "host-qmp-quit"
    } else {
        "host-signal"
    };
    let data = json!({ "guest": false, "reason": reason });
    events.send("SHUTDOWN", Some(&data));
}
