//! Converts the figures that QEMU reports to Hotlift's definitions.

use std::time::Duration;

use hotlift::figures::SourceReport;
use hotlift_command::events::ProgressSnapshot;
use serde_json::Value;

/// Returns the count `name` of an answer to `query-migrate`; 0 if the count is missing.
pub fn number(info: &Value, name: &str) -> u64 {
    info[name].as_u64().unwrap_or(0)
}

/// Returns the progress of a migration after `elapsed_ms`. Rates are means since the `last` answer to `query-migrate`,
/// given as its time in ms and its bytes.
pub fn moment(info: &Value, elapsed_ms: f64, last: Option<(f64, u64)>) -> ProgressSnapshot {
    let ram = &info["ram"];
    let transferred = number(ram, "transferred");
    let rate = last.map_or(0.0, |(then, before)| {
        let seconds = (elapsed_ms - then) / 1e3;
        if seconds > 0.0 {
            float(transferred.saturating_sub(before)) / seconds
        } else {
            0.0
        }
    });
    ProgressSnapshot {
        elapsed_ms,
        status: info["status"].as_str().unwrap_or("none").to_owned(),
        round: number(ram, "dirty-sync-count"),
        remaining_bytes: number(ram, "remaining"),
        transferred_bytes: transferred,
        bytes_per_second: rate,
        pages_per_second: float(number(ram, "pages-per-second")),
        dirty_pages_per_second: float(number(ram, "dirty-pages-rate")),
    }
}

/// Returns QEMU's figures with Hotlift's definitions. The byte count is `sent` if a relay compressed the stream, else
/// QEMU's own. The caller adds the CPU time.
pub fn source_report(info: &Value, total: Duration, sent: Option<u64>) -> SourceReport {
    let ram = &info["ram"];
    let setup = Duration::from_millis(number(info, "setup-time"));
    let transferred = sent.unwrap_or_else(|| number(ram, "transferred"));
    // QEMU counts pages of capability `compress` separately.
    let normal = number(ram, "normal") + number(&info["compression"], "pages");
    let zero = number(ram, "duplicate");
    let sending = total.saturating_sub(setup).as_secs_f64();
    let per = |what: f64, by: f64| if by > 0.0 { what / by } else { 0.0 };
    SourceReport {
        total_ms: total.as_secs_f64() * 1e3,
        setup_ms: setup.as_secs_f64() * 1e3,
        downtime_ms: float(number(info, "downtime")),
        rounds: number(ram, "dirty-sync-count"),
        transferred_bytes: transferred,
        throughput_mbps: per(float(transferred) * 8.0 / 1e6, sending),
        pages_per_second: per(float(normal + zero), total.as_secs_f64()),
        normal_pages: normal,
        zero_pages: zero,
        ratio: per(float(normal) * 4096.0, float(transferred)),
        dirty_syncs: number(ram, "dirty-sync-count"),
        ..SourceReport::default()
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_of_qemu_follow_hotlifts_definitions() {
        let info = json!({
            "status": "completed", "total-time": 2100, "setup-time": 100, "downtime": 30,
            "ram": { "transferred": 1_u64 << 28, "normal": 1 << 17, "duplicate": 5,
                     "dirty-sync-count": 3, "remaining": 0 },
            "compression": { "pages": 1 << 17 },
        });
        let total = Duration::from_millis(2100);
        let relayed = source_report(&info, total, Some(1 << 27));
        assert_eq!(relayed.transferred_bytes, 1 << 27);
        assert!((relayed.ratio - 8.0).abs() < 1e-9);
        let report = source_report(&info, total, None);
        assert_eq!((report.normal_pages, report.rounds), (1 << 18, 3));
        assert!((report.ratio - 4.0).abs() < 1e-9);
        assert!((report.throughput_mbps - f64::from(1 << 28) * 8.0 / 2.0 / 1e6).abs() < 1e-6);
    }
}
