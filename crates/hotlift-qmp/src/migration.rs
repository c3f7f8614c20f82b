//! What `query-migrate` answers.

use serde::{Deserialize, Deserializer, Serialize};

/// The state of a migration (`MigrationInfo`). Members that this QEMU does not send are `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MigrateInfo {
    /// QEMU's name of the state (`MigrationStatus`); `none` if there was no migration yet.
    pub status: String,
    /// Time since its start, in milliseconds.
    #[serde(deserialize_with = "not_negative")]
    pub total_time: Option<u64>,
    /// Time from its start until the first page could be sent, in milliseconds.
    #[serde(deserialize_with = "not_negative")]
    pub setup_time: Option<u64>,
    /// How long the guest stood still, in milliseconds; only when completed.
    #[serde(deserialize_with = "not_negative")]
    pub downtime: Option<u64>,
    /// How long it would stand still if it were switched over now, in milliseconds; only while it
    /// is under way.
    #[serde(deserialize_with = "not_negative")]
    pub expected_downtime: Option<u64>,
    /// Figures of RAM; absent in set-up and after a failure.
    pub ram: Option<RamInfo>,
    /// Percent of its time that the guest is kept from running so that the migration converges.
    #[serde(deserialize_with = "not_negative")]
    pub cpu_throttle_percentage: Option<u64>,
    /// Why it failed, in QEMU's words.
    pub error_desc: Option<String>,
}

/// Figures of RAM (`MigrationStats`).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RamInfo {
    /// Bytes sent.
    pub transferred: u64,
    /// Bytes of RAM still dirty.
    pub remaining: u64,
    /// Bytes of RAM.
    pub total: u64,
    /// Zero pages.
    pub duplicate: u64,
    /// Pages sent with their content.
    pub normal: u64,
    /// Bytes of the same.
    pub normal_bytes: u64,
    /// Pages that the guest dirtied a second, in the last round.
    pub dirty_pages_rate: u64,
    /// Rate of sending, in 10^6 bit/s.
    pub mbps: f64,
    /// Rounds so far: how often the dirty log was fetched.
    pub dirty_sync_count: u64,
    /// Bytes of a page.
    pub page_size: u64,
    /// Bytes sent on multifd channels.
    pub multifd_bytes: u64,
    /// Pages sent a second.
    pub pages_per_second: u64,
}

impl Default for MigrateInfo {
    fn default() -> Self {
        Self {
            status: "none".to_owned(),
            total_time: None,
            setup_time: None,
            downtime: None,
            expected_downtime: None,
            ram: None,
            cpu_throttle_percentage: None,
            error_desc: None,
        }
    }
}

impl MigrateInfo {
    /// True while a migration is under way: neither idle nor ended.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !matches!(
            self.status.as_str(),
            "none" | "completed" | "failed" | "cancelled"
        )
    }

    /// True if it ended and the guest stayed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        matches!(self.status.as_str(), "failed" | "cancelled")
    }

    /// True if it completed.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        self.status == "completed"
    }
}

/// QEMU's times are signed, and an estimate of "for ever" may come as anything.
fn not_negative<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let number = Option::<serde_json::Number>::deserialize(from)?;
    Ok(number.map(|number| number.as_u64().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_idle_qemu_answers_an_empty_object() {
        let info: MigrateInfo = serde_json::from_value(json!({})).unwrap();
        assert_eq!(info, MigrateInfo::default());
        assert!(!info.is_running() && !info.has_failed() && !info.is_completed());
    }

    #[test]
    fn unknown_members_are_passed_over_and_a_negative_time_is_no_failure() {
        let info: MigrateInfo = serde_json::from_value(json!({
            "status": "active", "expected-downtime": -1, "total-time": 7, "x-new": {},
            "ram": { "mbps": 1.5, "remaining": 4096, "postcopy-requests": 0 },
        }))
        .unwrap();
        assert!(info.is_running());
        assert_eq!(
            (info.expected_downtime, info.total_time),
            (Some(0), Some(7))
        );
        assert_eq!(info.ram.unwrap().remaining, 4096);
    }
}
