//! Formats the results of migrations through relays, as tables and as JSON.

use comfy_table::Table;
use hotlift::figures::{JobFigures, SideFigures, shares_of};
use hotlift::progress::Stall;
use hotlift::relay::{RelayProgress, RelayReport};
use hotlift_qemu::downtime_limit::DowntimeLimit;
use hotlift_qmp::{MigrationInfo, MigrationStats, RunState, Version};
use hotlift_terminal::progress::bytes;
use hotlift_terminal::table::{align, new_table};
use hotlift_terminal::width;
use serde::Serialize;

use crate::libvirt::virsh::{Domain, Job};
use crate::report::done_by;

/// A migration through two relays, in the output of `--json`.
#[derive(Debug, Serialize)]
pub struct Migration {
    /// Statistics of the source's QEMU (`query-migrate`): times, rounds, bytes sent to the relay.
    pub qemu: MigrationInfo,
    /// Downtime limit at the switchover; `null` if the operator's limit applied from the start.
    pub downtime_limit: Option<DowntimeLimit>,
    /// Version of the source's QEMU.
    pub source_qemu: Version,
    /// Version of the destination's QEMU.
    pub destination_qemu: Version,
    /// True if the guest runs at the destination.
    pub running: bool,
    /// Run state of the guest at the destination.
    pub state: RunState,
    /// Report of the relay at the source.
    pub source: RelayReport,
    /// Report of the relay at the destination.
    pub destination: RelayReport,
}

impl Migration {
    /// Returns the table of results, and the CPU time of each thread.
    pub fn table(&self) -> String {
        let mut table = new_table(&["migration", ""]);
        let mut row = |name: &str, value: String| {
            table.add_row([name.to_owned(), value]);
        };
        qemu_rows(&mut row, &self.qemu);
        if let Some(limit) = &self.downtime_limit {
            row("downtime limit (QEMU)", limit.to_string());
        }
        relay_rows(&mut row, &self.source);
        let reports = [("source", &self.source), ("destination", &self.destination)];
        for (side, report) in &reports {
            row(&format!("CPU, relay at the {side}"), cpu(&report.side));
        }
        align(&mut table);
        width::wrap(&mut table, 1);
        let threads = reports.iter().map(|(side, report)| (*side, &report.side));
        format!("{table}\n{}", threads_table(threads))
    }
}

/// A domain that libvirt moved, in the output of `--json`.
#[derive(Debug, Serialize)]
pub struct DomainMigration {
    /// The domain.
    #[serde(flatten)]
    pub domain: Domain,
    /// URI of the destination's libvirt.
    pub to: String,
    /// Statistics of libvirt; `null` if libvirt reports none.
    pub libvirt: Option<Job>,
    /// Downtime limit at the switchover; `null` if the operator's limit applied from the start.
    pub downtime_limit: Option<DowntimeLimit>,
    /// Report of the relay at the source; `null` if the relay failed after the domain had moved.
    pub relay: Option<RelayReport>,
}

impl DomainMigration {
    /// Returns the table of results, and the CPU time of each thread.
    pub fn table(&self) -> String {
        let mut table = new_table(&["migration", ""]);
        let mut row = |name: &str, value: String| {
            table.add_row([name.to_owned(), value]);
        };
        if let Some(job) = &self.libvirt {
            row("total time (libvirt)", format!("{} ms", job.total_ms));
            let downtime = job
                .downtime_ms
                .map_or("-".to_owned(), |ms| format!("{ms} ms"));
            row("downtime (libvirt)", downtime);
        }
        if let Some(limit) = &self.downtime_limit {
            row("downtime limit (QEMU)", limit.to_string());
        }
        let mut threads = String::new();
        if let Some(relay) = &self.relay {
            row("sent by QEMU", bytes(relay.received_bytes));
            relay_rows(&mut row, relay);
            row("CPU", cpu(&relay.side));
            let side = std::iter::once(("source", &relay.side));
            threads = format!("\n{}", threads_table(side));
        }
        align(&mut table);
        width::wrap(&mut table, 1);
        format!("{table}{threads}")
    }
}

/// Returns a line with the relay's progress, and with a stall if there is one.
pub fn progress_line(label: &str, progress: &RelayProgress, stall: Option<Stall>) -> String {
    let stall = stall.map_or_else(String::new, |stall| format!("{stall}, "));
    format!(
        "{label}: {stall}{:.1} s, {} in, {} out, {} normal and {} zero pages of {} of RAM",
        progress.elapsed.as_secs_f64(),
        bytes(progress.received_bytes),
        bytes(progress.sent_bytes),
        progress.normal_pages,
        progress.zero_pages,
        bytes(progress.total_bytes),
    )
}

/// A saved VM, in the output of `--json`.
#[derive(Debug, Serialize)]
pub struct Saved {
    /// Statistics of QEMU (`query-migrate`): times, rounds, bytes sent to the relay.
    pub qemu: MigrationInfo,
    /// Report of the relay between QEMU and the file.
    pub relay: RelayReport,
    /// Size of the file in bytes.
    pub file_bytes: u64,
}

impl Saved {
    /// Returns the table of results, and the CPU time of each thread.
    pub fn table(&self) -> String {
        let ram = self.qemu.ram.clone().unwrap_or_default();
        let mut table = new_table(&["save", ""]);
        let mut row = |name: &str, value: String| {
            table.add_row([name.to_owned(), value]);
        };
        qemu_rows(&mut row, &self.qemu);
        row("RAM", bytes(ram.total));
        row("file", bytes(self.file_bytes));
        relay_rows(&mut row, &self.relay);
        row("CPU", cpu(&self.relay.side));
        align(&mut table);
        width::wrap(&mut table, 1);
        let threads = std::iter::once(("save", &self.relay.side));
        format!("{table}\n{}", threads_table(threads))
    }
}

/// Returns the table of one relay's results.
pub fn relay_table(label: &str, report: &RelayReport) -> String {
    let mut table = new_table(&[label, ""]);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row("total time", format!("{:.0} ms", report.total_ms));
    row("received", bytes(report.received_bytes));
    relay_rows(&mut row, report);
    row("CPU", cpu(&report.side));
    align(&mut table);
    width::wrap(&mut table, 1);
    let threads = std::iter::once((label, &report.side));
    format!("{table}\n{}", threads_table(threads))
}

fn qemu_rows(row: &mut impl FnMut(&str, String), info: &MigrationInfo) {
    let ram = info.ram.clone().unwrap_or_default();
    let ms = |time: Option<u64>| time.map_or("-".to_owned(), |ms| format!("{ms} ms"));
    row("total time (QEMU)", ms(info.total_time));
    row("downtime (QEMU)", ms(info.downtime));
    row("rounds", ram.dirty_sync_count.to_string());
    row("sent by QEMU", bytes(sent_by_qemu(&ram)));
}

fn relay_rows(row: &mut impl FnMut(&str, String), report: &RelayReport) {
    row("sent by the relay", bytes(report.sent_bytes));
    row(
        "method",
        match report.methods.is_empty() {
            true => report.method.clone(),
            false => format!("{}: {}", report.method, shares_of(&report.methods)),
        },
    );
    row("ratio", format!("{:.2}", report.ratio));
    row(
        "throughput",
        format!("{:.0} Mbit/s", report.throughput_mbps),
    );
    row("normal pages", report.normal_pages.to_string());
    row("zero pages", report.zero_pages.to_string());
    let jobs = &report.side.jobs;
    if *jobs != JobFigures::default() {
        row("jobs in hardware", jobs.hardware.to_string());
        row("jobs in software", jobs.software.to_string());
        row("retries", jobs.retries.to_string());
        row("raw pages", jobs.raw_pages.to_string());
        row("jobs done by", done_by(jobs));
    }
    if !report.lost.is_empty() {
        let pages: usize = report.lost.iter().map(|lost| lost.offsets.len()).sum();
        row("lost, replaced by zero pages", format!("{pages} pages"));
    }
    if let Some(why) = &report.passed_through {
        row("passed through unread", why.clone());
    }
}

fn cpu(side: &SideFigures) -> String {
    format!("{:.2} s, {:.2} core-s/GiB", side.cpu_s, side.core_s_per_gib)
}

/// Returns the bytes that QEMU wrote to all its sockets. Up to QEMU 8.0, its total does not contain the bytes of multifd, so
/// the larger count is returned.
fn sent_by_qemu(ram: &MigrationStats) -> u64 {
    ram.transferred.max(ram.multifd_bytes)
}

fn threads_table<'a>(sides: impl Iterator<Item = (&'a str, &'a SideFigures)>) -> Table {
    let mut table = new_table(&["thread", "CPU ms"]);
    for (side, figures) in sides {
        for thread in &figures.threads {
            let name = format!("{} ({side})", thread.name);
            table.add_row([name, format!("{:.1}", thread.cpu_s * 1e3)]);
        }
    }
    align(&mut table);
    table
}
