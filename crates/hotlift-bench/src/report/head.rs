//! What ran where, and what the figures are.

use std::collections::BTreeSet;

use super::group::fill;
use super::svg::escape;
use crate::record::Record;
use crate::stats;
use crate::table::zero_share;

/// What the page is.
pub fn title() -> String {
    "<header><h1>Hotlift bench</h1><p class=\"soft\">Live migrations in turn, and what they cost.</p></header>"
        .to_owned()
}

/// What ran on one machine, of `machines`.
pub fn machine(records: &[Record], number: usize, machines: usize) -> String {
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
    let completed = records
        .iter()
        .filter(|record| record.completed().is_some())
        .count();
    let versions: BTreeSet<String> = records
        .iter()
        .flat_map(|record| record.machine.versions.iter().map(move |one| (record, one)))
        .filter_map(|(record, (name, version))| match name.as_str() {
            "method" if *version == record.row.method => None,
            "method" => Some(format!("{} by {version}", record.row.method)),
            _ => Some(format!("{name} {version}")),
        })
        .collect();
    let devices: BTreeSet<String> = records
        .iter()
        .filter_map(Record::completed)
        .flat_map(|run| [&run.source.side, &run.destination.side])
        .flat_map(|side| side.jobs.devices.iter().chain(&side.zero_jobs.devices))
        .cloned()
        .collect();
    let devices: Vec<String> = devices.into_iter().collect();
    let accelerators = match devices.is_empty() {
        true => "none took part: everything ran in software".to_owned(),
        false => devices.join("; "),
    };
    let simulated = devices
        .iter()
        .any(|device| device.to_lowercase().contains("simulat"));
    let entries = [
        (
            "Runs",
            format!("{completed} completed of {}, {when}", records.len()),
        ),
        (
            "Machine",
            different(|record| {
                let machine = &record.machine;
                let other = machine.destination.as_ref();
                let other = other.map_or(String::new(), |host| format!(", destination {host}"));
                let memory = hotlift_console::progress::bytes(machine.memory_bytes);
                format!(
                    "{}, {} cores, {memory}, Linux {}{other}",
                    machine.cpu, machine.cores, machine.kernel
                )
            }),
        ),
        (
            "Load before runs",
            loads.map_or("-".to_owned(), |load| load.text()),
        ),
        (
            "Versions",
            versions.into_iter().collect::<Vec<_>>().join("; "),
        ),
        ("Accelerators", accelerators),
        (
            "Memory",
            different(|record| {
                let guest = &record.row.guest;
                let touched = match guest.zero_touched {
                    true => "written once",
                    false => "never touched",
                };
                let counted = record.completed().and_then(|run| run.filled);
                let zero = counted.map_or_else(|| zero_share(guest), |filled| filled.text());
                format!("filled with {}, {zero} ({touched})", fill(&guest.fill))
            }),
        ),
    ];
    let mut text = match machines {
        1 => "<dl>".to_owned(),
        _ => format!("<h1 class=\"machine\">Machine {number} of {machines}</h1><dl>"),
    };
    for (name, value) in entries {
        text.push_str(&format!(
            "<dt>{}</dt><dd>{}</dd>",
            escape(name),
            escape(&value)
        ));
    }
    let commands: BTreeSet<String> = records
        .iter()
        .map(|record| record.machine.command.join(" "))
        .collect();
    for command in commands {
        text.push_str(&format!(
            "<dt>Command</dt><dd><code>{}</code></dd>",
            escape(&command)
        ));
    }
    text.push_str("</dl>");
    if simulated {
        text.push_str("<p><strong>Simulated devices took part. Their figures show that the ways work, and are no speeds.</strong></p>");
    }
    text
}

/// The chapters of the machine with this index, by name.
pub fn contents(names: &[String], machine: usize) -> String {
    let links = names.iter().enumerate().map(|(i, name)| {
        let name = escape(name);
        format!("<a href=\"#m{machine}-{i}\">{name}</a>")
    });
    format!("<p>{}</p>", links.collect::<Vec<_>>().join(" · "))
}

/// What the figures mean.
pub fn definitions() -> String {
    let entries = [
        (
            "Total time",
            "from the request to migrate until the destination runs the guest",
        ),
        (
            "Downtime",
            "from the request to stop the vCPUs until word that they run at the destination",
        ),
        (
            "core-s/GiB",
            "user and system time of all migration threads of a side, for each GiB of pages that are not zero; where fewer \
             than 1 page of 100 has content it says nothing (n/a), and the time is given for each GiB of all pages",
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
            "user and system time of the whole process without its vCPUs, as the kernel has it",
        ),
    ];
    let mut text = "<section><h2>What the figures are</h2><dl>".to_owned();
    for (name, value) in entries {
        text.push_str(&format!(
            "<dt>{}</dt><dd>{}</dd>",
            escape(name),
            escape(value)
        ));
    }
    text + "</dl></section>"
}
