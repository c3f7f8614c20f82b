//! The report of kept runs: one HTML file that needs nothing but itself.
//!
//! | file | subject |
//! |---|---|
//! | `group` | runs put together: repeats, and rows of the same work |
//! | `pictures` | what is drawn |
//! | `svg` | bars and lines |
//! | `tables` | figures, quotients with QEMU, what failed |
//! | `style.css` | light, dark, and on paper |
//!
//! There is no script in it, and nothing is fetched. All names and words come from files that anybody may have
//! written, so every one of them is escaped.

mod group;
mod pictures;
mod svg;
mod tables;

use std::collections::BTreeSet;

use super::record::Record;
use super::suite;
use group::{conditions, fill, series};
use svg::escape;

/// The report of these runs, in any order of suites and series.
pub fn html(records: &[Record]) -> String {
    let conditions = conditions(series(records));
    let mut body = head(records);
    let mut section = |title: &str, note: &str, inner: Option<String>| {
        if let Some(inner) = inner {
            body.push_str(&format!(
                "<section><h2>{}</h2><p>{}</p>{inner}</section>",
                escape(title),
                escape(note)
            ));
        }
    };
    for records in suite::split(records) {
        let Some(suite) = records.first().and_then(|one| suite::find(&one.suite).ok()) else {
            continue;
        };
        section(
            &format!("Published beside ours: {}", suite.name),
            "The rows of a published table, with its own figures and those of this machine.",
            Some(format!("<pre>{}</pre>", escape(&suite.table(&records)))),
        );
    }
    section(
        "Where methods cross",
        "One line a method. A method is worth its CPU where its line of total time lies below that of none; both axes \
         are logarithmic.",
        pictures::crossover(&conditions),
    );
    section(
        "Beside QEMU",
        "Quotients Hotlift / QEMU of runs that were neighbours in time, median (lowest–highest): below 1 Hotlift needs less.",
        tables::quotients(&conditions),
    );
    for (i, condition) in conditions.iter().enumerate() {
        let note = format!(
            "{}. Medians; the thin line is from the lowest to the highest run.",
            condition.guest
        );
        let pictures = pictures::condition(condition, &format!("c{i}"));
        section(&condition.title, &note, Some(pictures));
    }
    section(
        "One migration, round by round",
        "The run with the most rounds. A round sends what the guest has dirtied in the one before; the last runs with the \
         guest stopped.",
        pictures::timeline(&conditions),
    );
    section(
        "CPU by thread",
        "Of the run in the middle of each row, by total time.",
        pictures::threads(&conditions),
    );
    body.push_str(&definitions());
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>Hotlift bench</title><style>{}</style></head><body><main>{body}</main></body></html>\n",
        include_str!("style.css")
    )
}

/// What ran where.
fn head(records: &[Record]) -> String {
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
    let loads = super::stats::spread(records.iter().map(|record| record.machine.load));
    let completed = records
        .iter()
        .filter(|record| record.completed().is_some())
        .count();
    let versions: BTreeSet<String> = records
        .iter()
        .flat_map(|record| &record.machine.versions)
        .map(|(name, version)| format!("{name} {version}"))
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
                let memory = crate::progress::bytes(machine.memory_bytes);
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
                let zero = if guest.zero_touched {
                    "zero, written once"
                } else {
                    "zero, never touched"
                };
                format!(
                    "filled with {}, {:.0} % of pages {zero}",
                    fill(&guest.fill),
                    guest.zero_share * 100.0
                )
            }),
        ),
    ];
    let mut text = "<header><h1>Hotlift bench</h1><p class=\"soft\">Live migrations in turn, and what they cost.</p><dl>".to_owned();
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
    text + "</header>"
}

fn definitions() -> String {
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
            "user and system time of all migration threads of a side, for each GiB of pages that are not zero",
        ),
        (
            "Ratio",
            "bytes of pages with content over all bytes written to sockets",
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

#[cfg(test)]
mod tests;
