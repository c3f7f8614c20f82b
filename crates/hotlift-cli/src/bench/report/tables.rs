//! The tables of a report.

use std::fmt::Write;

use super::group::{Condition, Series};
use super::svg::escape;
use crate::bench::record::{Completed, Engine, Record};
use crate::bench::stats::{Spread, spread};

/// A figure, with its name.
type Figure = (&'static str, fn(&Completed) -> f64);

const FIGURES: [Figure; 10] = [
    ("total ms", |run| run.source.total_ms),
    ("downtime ms", |run| run.source.downtime_ms),
    ("rounds", |run| run.source.rounds as f64),
    ("Mbit/s", |run| run.source.throughput_mbps),
    ("pages/s", |run| run.source.pages_per_second),
    ("ratio", |run| run.source.ratio),
    ("CPU % source", |run| run.source.side.cpu_percent),
    ("CPU % destination", |run| run.destination.side.cpu_percent),
    ("core-s/GiB source", |run| run.source.side.core_s_per_gib),
    ("core-s/GiB destination", |run| {
        run.destination.side.core_s_per_gib
    }),
];

/// A table; `class` may be empty.
pub fn table(header: &[String], rows: impl Iterator<Item = Vec<String>>, class: &str) -> String {
    let mut text = format!("<div class=\"wide\"><table class=\"{class}\"><thead><tr>");
    for name in header {
        let _ = write!(text, "<th scope=\"col\">{}</th>", escape(name));
    }
    text.push_str("</tr></thead><tbody>");
    for row in rows {
        text.push_str("<tr>");
        for cell in row {
            let _ = write!(text, "<td>{}</td>", escape(&cell));
        }
        text.push_str("</tr>");
    }
    text + "</tbody></table></div>"
}

/// Folded until it is asked for.
pub fn details(summary: &str, inner: &str) -> String {
    format!(
        "<details><summary>{}</summary>{inner}</details>",
        escape(summary)
    )
}

/// Medians and spread of all figures.
pub fn figures(series: &[Series<'_>]) -> String {
    let mut header = vec!["row".to_owned(), "runs".to_owned()];
    header.extend(FIGURES.map(|(name, _)| name.to_owned()));
    header.push("verified".to_owned());
    let rows = series
        .iter()
        .filter(|series| !series.runs.is_empty())
        .map(|series| {
            let mut row = vec![series.name(), series.runs.len().to_string()];
            row.extend(FIGURES.map(|(_, figure)| {
                series
                    .spread(figure)
                    .map_or("-".to_owned(), |spread| spread.text())
            }));
            let verified: Vec<_> = series
                .runs
                .iter()
                .filter_map(|run| run.completed()?.verified)
                .collect();
            row.push(
                match (verified.is_empty(), verified.iter().all(|well| *well)) {
                    (true, _) => "-".to_owned(),
                    (false, true) => "yes".to_owned(),
                    (false, false) => "NO".to_owned(),
                },
            );
            row
        });
    table(&header, rows, "")
}

/// Rows that did not complete, and why.
pub fn problems(series: &[Series<'_>]) -> String {
    let rows: Vec<_> = series
        .iter()
        .flat_map(|series| {
            series
                .problems
                .iter()
                .map(|problem| vec![series.name(), (*problem).to_owned()])
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let header = ["did not complete", "why"].map(str::to_owned);
    table(&header, rows.into_iter(), "words")
}

/// Quotients Hotlift / QEMU of runs with the same repeat; `None` if no QEMU took part.
pub fn quotients(conditions: &[Condition<'_>]) -> Option<String> {
    const COMPARED: [Figure; 5] = [
        ("total time", |run| run.source.total_ms),
        ("downtime", |run| run.source.downtime_ms),
        ("source CPU", |run| run.source.side.core_s_per_gib),
        ("destination CPU", |run| run.destination.side.core_s_per_gib),
        ("bytes", |run| run.source.transferred_bytes as f64),
    ];
    let mut rows = Vec::new();
    for condition in conditions {
        let of = |engine: Engine| {
            condition
                .series
                .iter()
                .filter(move |series| series.row.engine == engine)
        };
        for ours in of(Engine::Hotlift) {
            for theirs in
                of(Engine::Qemu).filter(|theirs| format!("QEMU {}", ours.name()) == theirs.name())
            {
                let pairs = pairs(ours, theirs);
                let mut row = vec![format!(
                    "{}. {}. {}",
                    ours.name(),
                    condition.title,
                    condition.guest
                )];
                row.extend(COMPARED.map(|(_, figure)| {
                    let quotient = quotient(&pairs, figure);
                    quotient.map_or("-".to_owned(), |spread| spread.text())
                }));
                row.push(pairs.len().to_string());
                rows.push(row);
            }
        }
    }
    let mut header = vec!["row".to_owned()];
    header.extend(COMPARED.map(|(name, _)| name.to_owned()));
    header.push("pairs".to_owned());
    (!rows.is_empty()).then(|| table(&header, rows.into_iter(), ""))
}

fn pairs<'a>(ours: &Series<'a>, theirs: &Series<'a>) -> Vec<(&'a Completed, &'a Completed)> {
    let same = |a: &Record, b: &Record| a.series == b.series && a.repeat == b.repeat;
    ours.runs
        .iter()
        .filter_map(|mine| {
            let other = theirs.runs.iter().find(|other| same(mine, other))?;
            Some((mine.completed()?, other.completed()?))
        })
        .collect()
}

fn quotient(pairs: &[(&Completed, &Completed)], figure: fn(&Completed) -> f64) -> Option<Spread> {
    spread(
        pairs
            .iter()
            .map(|(mine, other)| figure(mine) / figure(other)),
    )
}
