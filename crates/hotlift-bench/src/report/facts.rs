//! Facts about the machine, and definitions of the figures in a report.

use std::collections::BTreeSet;

use hotlift_command::args::Fill;
use hotlift_terminal::progress::bytes;
use maud::{Markup, html};

use super::tables::details;
use crate::record::{Completed, Record};
use crate::stats;
use crate::table::zero_share;

/// Returns a description of one machine: hardware, versions, and settings of the runs.
pub fn machine(records: &[Record]) -> Markup {
    let different = |of: fn(&Record) -> String| -> String {
        let all: BTreeSet<String> = records.iter().map(of).collect();
        all.into_iter().collect::<Vec<_>>().join("; ")
    };
    let times: BTreeSet<&str> = records.iter().map(|record| record.time.as_str()).collect();
    let when = match (times.first(), times.last()) {
        (Some(first), Some(last)) if first != last => format!("{first} to {last}"),
        (Some(first), _) => (*first).to_owned(),
        _ => "never".to_owned(),
    };
    let loads = stats::spread(records.iter().map(|record| record.machine.load));
    let versions: BTreeSet<String> = records
        .iter()
        .flat_map(|record| record.machine.versions.iter().map(move |one| (record, one)))
        .filter_map(|(record, (name, version))| match name.as_str() {
            "method" if *version == record.row.method => None,
            "method" => Some(format!("{} by {version}", record.row.method)),
            _ => Some(format!("{name} {version}")),
        })
        .collect();
    let completed = records.iter().filter_map(Record::completed);
    let devices: BTreeSet<&str> = completed.flat_map(Completed::devices).collect();
    let accelerators = match devices.is_empty() {
        true => "none took part: everything ran in software".to_owned(),
        false => devices.into_iter().collect::<Vec<_>>().join("; "),
    };
    let commands: BTreeSet<String> = records
        .iter()
        .map(|record| record.machine.command.join(" "))
        .collect();
    let visible = [
        ("When", when),
        ("Machine", different(hardware)),
        (
            "Load before runs",
            loads.map_or("-".to_owned(), |load| load.text()),
        ),
        ("Accelerators", accelerators),
    ];
    let commands = commands.into_iter().map(|command| ("Command", command));
    let folded = [
        (
            "Versions",
            versions.into_iter().collect::<Vec<_>>().join("; "),
        ),
        ("Memory", different(memory)),
    ];
    html! {
        dl { @for (name, value) in visible { dt { (name) } dd { (value) } } }
        (details(
            "Versions, memory, commands",
            &html! { dl { @for (name, value) in folded.into_iter().chain(commands) { dt { (name) } dd { (value) } } } },
        ))
    }
}

fn hardware(record: &Record) -> String {
    let machine = &record.machine;
    let other = machine.destination.as_ref();
    let other = other.map_or(String::new(), |host| format!(", destination {host}"));
    format!(
        "{}, {} cores, {}, Linux {}{other}",
        machine.cpu,
        machine.cores,
        bytes(machine.memory_bytes),
        machine.kernel
    )
}

fn memory(record: &Record) -> String {
    let guest = &record.row.guest;
    let touched = match guest.zero_touched {
        true => "written once",
        false => "never touched",
    };
    let counted = record.completed().and_then(|run| run.filled);
    let zero = counted.map_or_else(|| zero_share(guest), |filled| filled.text());
    format!(
        "filled with {}, {zero} ({touched})",
        Fill::words(&guest.fill)
    )
}

/// Returns the definitions of the figures as HTML.
pub fn definitions() -> Markup {
    let entries = [
        (
            "Total time",
            "from the request to migrate until the destination runs the guest",
        ),
        (
            "Downtime",
            "from the request to stop the vCPUs until the report that they run at the destination",
        ),
        (
            "core-s/GiB",
            "user and system time of all migration threads of a side, for each GiB of pages that are not zero; where fewer \
             than 1 page of 100 has content it is not meaningful (n/a), and the time is given for each GiB of all pages",
        ),
        (
            "Ratio",
            "bytes of pages with content over all bytes written to sockets; n/a of a QEMU that does not know the bytes",
        ),
        (
            "Pages/s",
            "pages settled, zero ones among them, a second of total time",
        ),
        (
            "Verified",
            "the destination replayed every write of the guest and found each one; of QEMU: its RAM was compared byte by \
             byte with what the source was filled with, but for what a guest writes to",
        ),
        (
            "QEMU's CPU",
            "user and system time of the whole process without its vCPUs, as the kernel has it; of a relayed QEMU that of the \
             relay on its side, too",
        ),
        (
            "Bars",
            "medians; the thin line is from the lowest to the highest run",
        ),
    ];
    html! {
        section {
            h2 { "What the figures are" }
            dl { @for (name, value) in entries { dt { (name) } dd { (value) } } }
        }
    }
}
