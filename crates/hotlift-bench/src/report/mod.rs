//! The report of kept runs: one HTML file that needs nothing but itself.
//!
//! | file | subject |
//! |---|---|
//! | `head` | what ran where, and what the figures are |
//! | `group` | runs put together: repeats, and rows of the same work |
//! | `pictures` | what is drawn |
//! | `svg` | bars and lines |
//! | `tables` | figures, quotients with QEMU, what failed |
//! | `style.css` | light, dark, and on paper |
//!
//! Machines are never mixed: each has its own part. In it a chapter is what one table can show.
//!
//! There is no script in it, and nothing is fetched. All names and words come from files that anybody may have
//! written, so every one of them is escaped.

mod group;
mod head;
mod pictures;
mod svg;
mod tables;

use super::record::Record;
use super::suite::{self, Suite};
use group::conditions;
pub use group::fill;
use svg::escape;

/// The report of these runs, in any order of suites and series.
pub fn html(records: &[Record]) -> String {
    let machines = machines(records);
    let mut body = head::title();
    for (i, records) in machines.iter().enumerate() {
        body.push_str(&head::machine(records, i + 1, machines.len()));
        let chapters = suite::split(records);
        let mut names: Vec<String> = Vec::new();
        for records in &chapters {
            let name = &records[0].suite;
            let before = names.iter().filter(|other| other.starts_with(name)).count();
            names.push(match before {
                0 => name.clone(),
                _ => format!("{name} ({})", before + 1),
            });
        }
        if chapters.len() > 1 {
            body.push_str(&head::contents(&names, i));
        }
        for (k, records) in chapters.iter().enumerate() {
            let name = (chapters.len() > 1).then_some(names[k].as_str());
            body.push_str(&chapter(records, &format!("m{i}-{k}"), name));
        }
        body.push_str(&section(
            "One migration, round by round",
            "Of Hotlift's runs the one with the most rounds. A round sends what the guest has dirtied in the one before; \
             the last runs with the guest stopped.",
            pictures::timeline(records, &format!("m{i}-timeline")),
        ));
    }
    body.push_str(&head::definitions());
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>Hotlift bench</title><style>{}</style></head><body><main>{body}</main></body></html>\n",
        include_str!("style.css")
    )
}

/// The records of each machine.
fn machines(records: &[Record]) -> Vec<Vec<Record>> {
    let mut machines: Vec<Vec<Record>> = Vec::new();
    for record in records {
        let is_it = |other: &&mut Vec<Record>| {
            other
                .first()
                .is_some_and(|other| other.machine.identity() == record.machine.identity())
        };
        match machines.iter_mut().find(is_it) {
            Some(machine) => machine.push(record.clone()),
            None => machines.push(vec![record.clone()]),
        }
    }
    machines
}

/// All of one suite or matrix; its name if it is one of many.
fn chapter(records: &[Record], id: &str, name: Option<&str>) -> String {
    let conditions = conditions(records);
    let title = |title: &str| match name {
        Some(name) => format!("{name}: {title}"),
        None => {
            let mut letters = title.chars();
            let capital = letters.next().map(|first| first.to_uppercase().to_string());
            capital.unwrap_or_default() + letters.as_str()
        }
    };
    let suite = records.first().and_then(|one| suite::find(&one.suite).ok());
    let mut text = format!("<div id=\"{id}\"></div>");
    text.push_str(&suite.map_or(String::new(), |suite| {
        published(suite, &title("published beside ours"), records)
    }));
    text.push_str(&section(
        &title("where methods cross"),
        "One line a method. A method is worth its CPU where its line of total time lies below that of none; both axes \
         are logarithmic.",
        pictures::crossover(&conditions, id),
    ));
    for (i, condition) in conditions.iter().enumerate() {
        let note = format!(
            "{}. Medians; the thin line is from the lowest to the highest run.",
            condition.note
        );
        let pictures = pictures::condition(condition, records, &format!("{id}-{i}"));
        text.push_str(&section(&title(&condition.title), &note, Some(pictures)));
    }
    text + &section(
        &title("CPU by thread"),
        "Of the run in the middle of each row, by total time, over the fastest wire.",
        pictures::threads(&conditions, id),
    )
}

fn published(suite: &Suite, title: &str, records: &[Record]) -> String {
    let sheet = suite.sheet(records);
    let differs = sheet.differs.iter();
    let differs: Vec<_> = differs
        .map(|line| format!("<li>{}</li>", escape(line)))
        .collect();
    let tables = sheet
        .tables
        .iter()
        .enumerate()
        .map(|(i, (caption, table))| {
            // Its second column says whose the figures are.
            let class = if i == 0 { "published" } else { "" };
            format!("<h3>{}</h3>{}", escape(caption), tables::of(table, class))
        });
    let inner = format!(
        "<p>Here, what differs:</p><ul>{}</ul>{}",
        differs.concat(),
        tables.collect::<String>()
    );
    section(
        title,
        &format!("Published: {}", sheet.published),
        Some(inner),
    )
}

/// Nothing, if there is nothing in it.
fn section(title: &str, note: &str, inner: Option<String>) -> String {
    inner.map_or(String::new(), |inner| {
        format!(
            "<section><h2>{}</h2><p>{}</p>{inner}</section>",
            escape(title),
            escape(note)
        )
    })
}

#[cfg(test)]
mod tests;
