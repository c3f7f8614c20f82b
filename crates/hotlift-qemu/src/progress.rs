//! Progress of a QEMU's outgoing migration: the displayed line, and the reasons why it does not converge.

use std::time::Duration;

use hotlift::Address;
use hotlift::progress::{Stall, StallKind};
use hotlift::relay::RelayProgress;
use hotlift_qmp::{MigrationInfo, MigrationStats};
use hotlift_terminal::progress::{Line, bytes, rounded, stalled, throttled};

/// Number of rounds in a row without a decrease of dirty pages, after which the operator is informed.
const ROUNDS_WITHOUT_GAIN: u32 = 3;

/// A round makes progress if the guest dirties less than this share of the data sent in that round. After ten rounds with
/// exactly this share a third of the data of the first round remains.
const GAIN: f64 = 0.9;

/// Time without a sent byte after which the operator is informed, if no connection shows the reason: a save into a file has
/// none.
const SILENCE: Duration = Duration::from_secs(10);

/// Time left in seconds, below which tenths of a second are shown.
const TENTHS: f64 = 1000.0;

/// Possible causes and the consequence when the other host is silent, as text for an operator.
const SILENT: &str = "the other host or the network path to it may be down, or the path drops full-size packets (check the \
                      MTU): the migration fails after 'silence-timeout', and the guest stays here; Ctrl-C ends it now";

/// Possible causes and the consequence when the other host reads no data.
const NOT_READING: &str = "the other host is up, but reads no data: its process, its QEMU or its disk may be stopped or slow; \
                           the migration waits; Ctrl-C ends it, and the guest stays here";

/// Possible causes when QEMU sends no pages, and the other host is not the cause.
const NOTHING_SENT: &str = "nothing is sent, although the other host answers: QEMU or the disk of its guest may be stopped or \
                            slow; the migration waits; Ctrl-C ends it, and the guest stays here";

/// Possible causes when a save writes nothing. No other host is involved.
const NOTHING_WRITTEN: &str = "nothing is written: QEMU, the disk of its guest or the disk of the file may be stopped or \
                               slow; the save waits; Ctrl-C ends it, and the guest stays here";

/// Possible cause when the port for the pages accepts no connection, although 'hotlift serve' was reached at its own port.
const BLOCKED: &str = "a firewall may drop packets to that port, which 'hotlift serve' chooses: open it, or set it with \
                       'hotlift serve --data-port PORT'";

/// Returns the progress line while a connection to 'hotlift serve' has not been accepted for `time`.
pub fn not_connected(address: &Address, time: Duration) -> Line {
    Line {
        text: format!("no connection to {address} for {} s", time.as_secs()),
        remark: Some(BLOCKED.to_owned()),
    }
}

/// Evaluates the progress of one migration over successive polls.
#[derive(Debug, Default)]
pub struct Watch {
    /// The relay's last report. `wire_rate` is the rate on the wire since the previous report.
    relay: RelayProgress,
    wire_rate: f64,
    /// Number of pages that QEMU has processed, including zero pages, which cause almost no data.
    processed_pages: u64,
    /// Time of the last progress since the relay's start: the relay sent data, or QEMU processed pages.
    last_progress_at: Duration,
    is_save: bool,
    round: u64,
    without_gain: u32,
}

impl Watch {
    /// Creates a watch of a save, which writes the guest into a file.
    pub fn of_save() -> Self {
        Self {
            is_save: true,
            ..Self::default()
        }
    }

    /// Evaluates the latest figures of QEMU and of the relay, and returns the line to show. `stall` describes a host that
    /// delays the relay.
    pub fn poll(
        &mut self,
        info: &MigrationInfo,
        relay: RelayProgress,
        stall: Option<Stall>,
    ) -> Line {
        // The relay reports at its own interval. A report that was already evaluated has no new rate.
        let time = relay.elapsed.saturating_sub(self.relay.elapsed);
        if !time.is_zero() {
            let sent = relay.sent_bytes.saturating_sub(self.relay.sent_bytes);
            self.wire_rate = to_f64(sent) / time.as_secs_f64();
            if sent > 0 {
                self.last_progress_at = relay.elapsed;
            }
            self.relay = relay;
        }
        let Some(ram) = &info.ram else {
            let stall = stall.map_or_else(String::new, |stall| format!(", {stall}"));
            return format!("migration {}{stall}", info.status()).into();
        };
        let processed_pages = ram.normal.saturating_add(ram.duplicate);
        if processed_pages != self.processed_pages {
            self.processed_pages = processed_pages;
            self.last_progress_at = relay.elapsed;
        }
        let rates = Rates::of(ram);
        if ram.dirty_sync_count != self.round {
            self.round = ram.dirty_sync_count;
            self.without_gain = if rates.gain() {
                0
            } else {
                self.without_gain + 1
            };
        }
        let throttle = info.cpu_throttle_percentage.unwrap_or(0);
        let reason = self.stall_reason(&rates, throttle > 0);
        let silence = relay.elapsed.saturating_sub(self.last_progress_at);
        // In postcopy the guest may request no pages for a long time, which is not a stall.
        let is_silent = stall.is_none() && silence >= SILENCE && info.status() == "active";
        let is_held_up = stall.is_some() || is_silent;
        let seconds_left = rates.seconds_left(ram.remaining).filter(|_| !is_held_up);
        let left = match (seconds_left, &reason) {
            (Some(seconds), _) if seconds < TENTHS => format!("{seconds:.1} s left, "),
            (Some(seconds), _) => format!("{seconds:.0} s left, "),
            (None, None) => "time unknown, ".to_owned(),
            // The remark already reports that the migration does not converge.
            (None, Some(_)) => String::new(),
        };
        let state = match (info.status(), stall) {
            ("active", Some(stall)) => format!("{stall}, "),
            ("active", None) if is_silent => {
                let what = if self.is_save { "written" } else { "sent" };
                format!("nothing {what} for {} s, ", silence.as_secs())
            }
            ("active", None) if reason.is_some() => "not converging, ".to_owned(),
            ("active", None) => String::new(),
            (status, Some(stall)) => format!("{status}, {stall}, "),
            (status, None) => format!("{status}{}, ", stalled(reason.is_some())),
        };
        // Everything up to the dirty rate fits into 80 columns.
        let text = format!(
            "{state}round {}, {} to go, {left}wire {}/s, dirty {}/s{}, RAM {}/s of {}",
            self.round,
            bytes(ram.remaining),
            bytes(rounded(self.wire_rate)),
            bytes(rounded(rates.dirty)),
            throttled(throttle),
            bytes(rounded(rates.sent)),
            bytes(ram.total),
        );
        let remark = match stall.map(|stall| stall.kind) {
            Some(StallKind::Silent) => Some(SILENT.to_owned()),
            Some(StallKind::NotReading) => Some(NOT_READING.to_owned()),
            None if is_silent && self.is_save => Some(NOTHING_WRITTEN.to_owned()),
            None if is_silent => Some(NOTHING_SENT.to_owned()),
            None => reason.map(|reason| format!("not converging: {reason}")),
        };
        Line { text, remark }
    }

    /// Returns the number of the current round, from 1; 0 before the first figures.
    pub fn round(&self) -> u64 {
        self.round
    }

    fn stall_reason(&self, rates: &Rates, is_throttled: bool) -> Option<String> {
        let throttle = match is_throttled {
            true => "",
            false => ", turn on QEMU's auto-converge",
        };
        (self.without_gain >= ROUNDS_WITHOUT_GAIN).then(|| {
            format!(
                "for {} rounds the guest dirtied {}/s while {}/s were sent; raise the bandwidth or downtime-limit{throttle}, \
                 or choose another method",
                self.without_gain,
                bytes(rounded(rates.dirty)),
                bytes(rounded(rates.sent)),
            )
        })
    }
}

/// Rates of RAM in bytes per second.
struct Rates {
    /// Bytes that QEMU has processed: sent, or found to be zero.
    sent: f64,
    dirty: f64,
}

impl Rates {
    fn of(ram: &MigrationStats) -> Self {
        let bytes = |pages: u64| to_f64(pages.saturating_mul(ram.page_size.max(1)));
        // The remaining bytes include zero pages, which need almost no data, so the rate of pages is used. A QEMU that reports
        // no rate of pages reports only a rate of bytes.
        let sent = match ram.pages_per_second {
            0 => ram.mbps * 1e6 / 8.0,
            pages => bytes(pages),
        };
        Self {
            sent,
            dirty: bytes(ram.dirty_pages_rate),
        }
    }

    fn gain(&self) -> bool {
        self.dirty < self.sent * GAIN
    }

    /// Estimates the time in seconds until almost nothing remains, at constant rates, including the pages dirtied in that time.
    /// Returns `None` if the guest dirties pages too fast.
    fn seconds_left(&self, remaining: u64) -> Option<f64> {
        self.gain()
            .then(|| to_f64(remaining) / (self.sent - self.dirty))
    }
}

/// Converts a count to `f64`.
#[expect(clippy::cast_precision_loss, reason = "shown with two digits")]
fn to_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn active(round: u64, dirty_pages_rate: u64) -> MigrationInfo {
        MigrationInfo {
            status: Some("active".to_owned()),
            ram: Some(MigrationStats {
                remaining: 100 << 20,
                total: 1 << 30,
                mbps: 8.0 * f64::from(100 << 20) / 1e6,
                dirty_pages_rate,
                page_size: 4096,
                dirty_sync_count: round,
                ..MigrationStats::default()
            }),
            ..MigrationInfo::default()
        }
    }

    #[test]
    fn a_line_has_both_rates_the_remaining_bytes_and_the_time_left() {
        let mut watch = Watch::default();
        let report = |seconds: u64, sent_bytes| RelayProgress {
            elapsed: Duration::from_secs(seconds),
            sent_bytes,
            ..RelayProgress::default()
        };
        watch.poll(&active(2, 12_800), report(1, 0), None);
        watch.poll(&active(2, 12_800), report(3, 20 << 20), None);
        let line = watch.poll(&active(2, 12_800), report(3, 20 << 20), None);
        assert_eq!(
            line.to_string(),
            "round 2, 100.0 MiB to go, 2.0 s left, wire 10.0 MiB/s, dirty 50.0 MiB/s, RAM 100.0 MiB/s of 1.0 GiB"
        );
    }

    #[test]
    fn on_80_columns_both_rates_and_the_missing_convergence_are_visible() {
        let report = |seconds: u64, sent_bytes| RelayProgress {
            elapsed: Duration::from_secs(seconds),
            sent_bytes,
            ..RelayProgress::default()
        };
        for dirty_pages_rate in [20_000, 240_000] {
            let mut watch = Watch::default();
            for round in 10..15 {
                let mut info = active(round, dirty_pages_rate);
                if let Some(ram) = &mut info.ram {
                    ram.remaining = 999 << 20;
                }
                let line = watch.poll(&info, report(round, round * (999 << 20)), None);
                let narrow = hotlift_terminal::width::cut(&line.text, 79);
                let rate = bytes(dirty_pages_rate * 4096);
                for words in [
                    "999.0 MiB to go",
                    "wire 999.0 MiB/s",
                    &format!("dirty {rate}/s"),
                ] {
                    assert!(round == 10 || narrow.contains(words), "{narrow}");
                }
                let stalls = round > 11 && dirty_pages_rate > 200_000;
                assert_eq!(narrow.contains("not converging"), stalls, "{narrow}");
            }
        }
    }

    #[test]
    fn three_rounds_without_progress_are_explained_until_one_makes_progress() {
        let mut watch = Watch::default();
        for round in 2..4 {
            // Several polls in one round count as one round.
            for _ in 0..5 {
                let line = watch
                    .poll(&active(round, 24_000), RelayProgress::default(), None)
                    .to_string();
                assert!(!line.contains("not converging"), "{line}");
            }
        }
        let line = watch
            .poll(&active(4, 24_000), RelayProgress::default(), None)
            .to_string();
        assert!(
            line.contains("dirtied 93.7 MiB/s while 100.0 MiB/s were sent"),
            "{line}"
        );
        assert!(line.starts_with("not converging, round 4"), "{line}");
        assert!(!line.contains(" left"), "{line}");
        let line = watch
            .poll(&active(5, 25), RelayProgress::default(), None)
            .to_string();
        assert!(!line.contains("not converging"), "{line}");
    }

    #[test]
    fn a_stalled_relay_is_distinguished_from_a_slow_one() {
        let mut watch = Watch::default();
        let mut look = |seconds: u64, sent_bytes| {
            let report = RelayProgress {
                elapsed: Duration::from_secs(seconds),
                sent_bytes,
                ..RelayProgress::default()
            };
            watch.poll(&active(2, 25), report, None)
        };
        for seconds in [1, 10, 19] {
            let line = look(seconds, seconds).to_string();
            assert!(!line.contains("nothing"), "{line}");
        }
        assert!(!look(28, 19).text.contains("nothing"), "9 s");
        let line = look(29, 19);
        assert!(line.text.starts_with("nothing sent for 10 s"), "{line}");
        assert!(!line.text.contains(" left"), "{line}");
        assert!(line.remark.is_some());
        assert!(!look(30, 20).text.contains("nothing"), "it continues");
    }

    #[test]
    fn the_time_left_counts_pages_that_are_zero() {
        let mut info = active(1, 0);
        if let Some(ram) = &mut info.ram {
            (ram.total, ram.remaining) = (64 << 30, 28 << 30);
            // 9.3 MiB/s by the rate of bytes; 3.5 GiB/s by the rate of pages, most of which are zero.
            ram.mbps = 78.0;
            ram.pages_per_second = (7 << 29) / 4096;
        }
        let line = Watch::default().poll(&info, RelayProgress::default(), None);
        assert!(line.text.contains("28.0 GiB to go, 8.0 s left"), "{line}");
        assert!(line.text.contains("RAM 3.5 GiB/s of 64.0 GiB"), "{line}");
    }

    #[test]
    fn unsent_zero_pages_are_not_reported_as_a_stall_and_a_save_names_no_host() {
        let mut watch = Watch::of_save();
        let mut look = |seconds: u64, duplicate| {
            let mut info = active(1, 0);
            if let Some(ram) = &mut info.ram {
                ram.duplicate = duplicate;
            }
            let report = RelayProgress {
                elapsed: Duration::from_secs(seconds),
                sent_bytes: 1,
                ..RelayProgress::default()
            };
            watch.poll(&info, report, None)
        };
        for seconds in 1..60 {
            let line = look(seconds, seconds << 20).to_string();
            assert!(!line.contains("nothing"), "{line}");
        }
        let line = look(69, 59 << 20);
        assert!(line.text.starts_with("nothing written for 10 s"), "{line}");
        let remark = line.remark.unwrap();
        assert!(!remark.contains("other host"), "{remark}");
        assert!(remark.contains("disk of the file"), "{remark}");
    }

    #[test]
    fn the_host_that_delays_the_migration_is_named_with_the_effect() {
        let stall = |kind| {
            Some(Stall {
                kind,
                peer: std::net::Ipv4Addr::new(192, 0, 2, 2).into(),
                time: Duration::from_millis(12_900),
            })
        };
        let mut watch = Watch::default();
        let mut look = |kind, info| watch.poll(&info, RelayProgress::default(), stall(kind));
        let line = look(StallKind::Silent, active(2, 25));
        assert!(
            line.text.starts_with("192.0.2.2 silent for 12 s, round 2"),
            "{line}"
        );
        assert!(!line.text.contains(" left"), "{line}");
        assert!(line.remark.unwrap().contains("'silence-timeout'"));
        let line = look(StallKind::NotReading, active(2, 25));
        assert!(
            line.text.starts_with("192.0.2.2 not reading for 12 s, "),
            "{line}"
        );
        assert!(line.remark.unwrap().contains("the migration waits"));
        let setup = MigrationInfo {
            status: Some("setup".to_owned()),
            ..MigrationInfo::default()
        };
        let line = look(StallKind::Silent, setup);
        assert_eq!(line.text, "migration setup, 192.0.2.2 silent for 12 s");
    }

    #[test]
    fn a_connection_that_is_not_made_names_the_port_and_the_option() {
        let address = "tcp:192.0.2.2:37621".parse().unwrap();
        let line = not_connected(&address, Duration::from_millis(5_900));
        assert_eq!(line.text, "no connection to tcp:192.0.2.2:37621 for 5 s");
        assert!(line.remark.unwrap().contains("--data-port"));
    }

    #[test]
    fn a_migration_without_figures_shows_its_state() {
        let info = MigrationInfo {
            status: Some("setup".to_owned()),
            ..MigrationInfo::default()
        };
        assert_eq!(
            Watch::default()
                .poll(&info, RelayProgress::default(), None)
                .to_string(),
            "migration setup"
        );
    }
}
