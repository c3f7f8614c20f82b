//! State of the guest, as reported by QEMU's events.

use serde_json::Value;

use crate::error::one_line;

/// Summary of all guest events of one connection. The summary includes events that were dropped from the queue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuestEvents {
    /// True if the vCPUs were started (`RESUME`). QEMU sends this event before the first instruction runs.
    pub has_run: bool,
    /// True if a migration has completed (`MIGRATION`, with capability `events`).
    pub has_migrated: bool,
    /// True if a migration has failed (`MIGRATION`, with capability `events`).
    pub has_failed: bool,
    /// QEMU's reason for the last shutdown of the machine (`SHUTDOWN`, a `ShutdownCause`); `None` before.
    pub shutdown: Option<String>,
    /// True if the guest's kernel has panicked (`GUEST_PANICKED`).
    pub has_panicked: bool,
}

impl GuestEvents {
    pub(crate) fn take(&mut self, event: &str, data: &Value) {
        let text = |name: &str| data.get(name).and_then(Value::as_str).map(one_line);
        match event {
            "RESUME" => self.has_run = true,
            "MIGRATION" => {
                let status = text("status");
                self.has_migrated |= status.as_deref() == Some("completed");
                self.has_failed |= status.as_deref() == Some("failed");
            }
            "SHUTDOWN" => self.shutdown = Some(text("reason").unwrap_or_default()),
            "GUEST_PANICKED" => self.has_panicked = true,
            // After a reset the guest starts again, and an earlier panic no longer counts.
            "RESET" => {
                self.has_panicked = false;
                self.shutdown = None;
            }
            _ => {}
        }
    }

    /// Returns true if the guest has ended by itself: it powered off, panicked, or reset itself with `-no-reboot`. Returns
    /// false if the guest has not ended, or another program has ended its machine.
    #[must_use]
    pub fn has_ended_itself(&self) -> bool {
        match &self.shutdown {
            // QEMU's names of causes begin with `guest-` or with `host-`.
            Some(reason) => reason.starts_with("guest-"),
            None => self.has_panicked,
        }
    }

    /// Describes how the guest has ended, as a clause; `None` if it has not ended.
    #[must_use]
    pub fn end(&self) -> Option<String> {
        let Some(reason) = &self.shutdown else {
            return self.has_panicked.then(|| "the guest panicked".to_owned());
        };
        Some(match &**reason {
            "guest-shutdown" => "the guest powered off".to_owned(),
            "guest-panic" => "the guest panicked".to_owned(),
            "guest-reset" => "the guest was reset under -no-reboot".to_owned(),
            "host-qmp-system-reset" => {
                "the guest was reset by 'system_reset' under -no-reboot".to_owned()
            }
            "host-qmp-quit" => "the guest's QEMU was ended by 'quit'".to_owned(),
            "host-signal" => "the guest's QEMU was ended by a signal".to_owned(),
            "" => "the guest's QEMU was shut down".to_owned(),
            other => format!("the guest's QEMU was shut down ({other})"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn after(events: &[(&str, Value)]) -> GuestEvents {
        let mut guest = GuestEvents::default();
        for (name, data) in events {
            guest.take(name, data);
        }
        guest
    }

    #[test]
    fn a_guest_has_run_once_its_vcpus_were_started() {
        assert!(!after(&[("STOP", json!({}))]).has_run);
        assert!(after(&[("RESUME", json!({})), ("STOP", json!({}))]).has_run);
    }

    #[test]
    fn the_cause_of_a_shutdown_is_named_and_a_reset_ends_nothing() {
        let shutdown = |reason: &str| ("SHUTDOWN", json!({ "guest": true, "reason": reason }));
        let reset = ("RESET", json!({ "guest": true, "reason": "guest-reset" }));
        let panicked = ("GUEST_PANICKED", json!({ "action": "pause" }));
        for (events, end) in [
            (vec![], None),
            (vec![reset.clone()], None),
            (
                vec![shutdown("guest-shutdown")],
                Some("the guest powered off"),
            ),
            (vec![panicked.clone()], Some("the guest panicked")),
            (vec![panicked, reset], None),
            (
                vec![shutdown("host-\u{1b}x")],
                Some("the guest's QEMU was shut down (host- x)"),
            ),
            (
                vec![("SHUTDOWN", json!({}))],
                Some("the guest's QEMU was shut down"),
            ),
        ] {
            assert_eq!(after(&events).end().as_deref(), end, "{events:?}");
        }
    }

    #[test]
    fn only_a_cause_of_the_guest_shows_that_the_guest_itself_has_ended() {
        let shutdown = |reason: &str| ("SHUTDOWN", json!({ "reason": reason }));
        for (reason, is_own) in [
            ("guest-shutdown", true),
            ("guest-reset", true),
            ("guest-panic", true),
            ("host-qmp-quit", false),
            ("host-qmp-system-reset", false),
            ("host-signal", false),
            ("host-ui", false),
            ("host-error", false),
            ("subsystem-reset", false),
            ("", false),
        ] {
            let ended = after(&[shutdown(reason)]);
            assert_eq!(ended.has_ended_itself(), is_own, "{reason}");
        }
        assert!(!after(&[]).has_ended_itself());
        let panicked = ("GUEST_PANICKED", json!({ "action": "pause" }));
        assert!(after(std::slice::from_ref(&panicked)).has_ended_itself());
        let killed = after(&[panicked, shutdown("host-signal")]);
        assert!(!killed.has_ended_itself());
    }

    #[test]
    fn a_migration_has_completed_once_its_event_reports_it() {
        let status = |status: &str| ("MIGRATION", json!({ "status": status }));
        assert!(!after(&[status("setup"), status("postcopy-active")]).has_migrated);
        let stray = after(&[status("completed"), status("setup")]);
        assert!(stray.has_migrated && !stray.has_failed);
        assert!(after(&[status("failed")]).has_failed);
    }
}
