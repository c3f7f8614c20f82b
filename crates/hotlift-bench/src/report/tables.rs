//! The tables of a report.

use std::fmt::Write;

use super::group::{Condition, Series};
use super::svg::escape;
use crate::figures::{self, Figure};
use crate::record::{Completed, Record, ThreadCounts};
use crate::table::{is_the_same_work, pairs, verified};

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
            let _ = write!(text, "<td>{}</td>", of_cell(&cell));
        }
        text.push_str("</tr>");
    }
    text + "</tbody></table></div>"
}

/// A cell; a spread stays in one line, below its median where the table is narrow.
fn of_cell(text: &str) -> String {
    match text.split_once(" (") {
        Some((median, spread)) if spread.contains('–') && spread.ends_with(')') => format!(
            "{} <span class=\"range\">({}</span>",
            escape(median),
            escape(spread)
        ),
        _ => escape(text),
    }
}

/// A table that was made for the terminal.
pub fn of(table: &comfy_table::Table, class: &str) -> String {
    let cells = |row: &comfy_table::Row| row.cell_iter().map(comfy_table::Cell::content).collect();
    let header: Vec<String> = table.header().map(cells).unwrap_or_default();
    self::table(&header, table.row_iter().map(cells), class)
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
    let all: Vec<&Completed> = series.iter().flat_map(Series::completed).collect();
    let columns = figures::meant(figures::ALL, &all);
    let mut header = vec!["row".to_owned(), "runs".to_owned()];
    header.extend(columns.iter().map(|figure| figure.name.to_owned()));
    header.push("verified".to_owned());
    let rows = series
        .iter()
        .filter(|series| !series.runs.is_empty())
        .map(|series| {
            let mut row = vec![series.name.clone(), series.runs.len().to_string()];
            row.extend(columns.iter().map(|figure| figure.text(series.completed())));
            row.push(verified(&series.runs));
            row
        });
    table(&header, rows, "")
}

/// Rows that did not complete, and why.
pub fn problems(series: &[Series<'_>]) -> String {
    let rows: Vec<_> = series
        .iter()
        .flat_map(|series| {
            let problems = series.problems.iter();
            problems.map(|(why, times)| {
                let times = times.to_string();
                vec![series.name.clone(), times, (*why).to_owned()]
            })
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let header = ["did not complete", "runs", "why"].map(str::to_owned);
    table(&header, rows.into_iter(), "words")
}

/// Quotients Hotlift / QEMU of runs with the same repeat; empty if no QEMU took part.
pub fn quotients(condition: &Condition<'_>, records: &[Record]) -> String {
    let ([source, destination], _) = condition.cpu();
    let compared: [(&str, Figure); 5] = [
        ("total time", figures::TOTAL_MS),
        ("downtime", figures::DOWN_MS),
        ("source CPU", source),
        ("destination CPU", destination),
        ("bytes", figures::BYTES),
    ];
    let mut rows = Vec::new();
    for ours in &condition.series {
        let theirs = condition.series.iter();
        for theirs in theirs.filter(|theirs| is_the_same_work(&ours.row, &theirs.row)) {
            let pairs = pairs(records, &ours.row, (&theirs.row, &theirs.who));
            if pairs.is_empty() {
                continue;
            }
            let mut row = vec![format!("{} / {}", ours.name, theirs.who)];
            row.extend(compared.map(|(_, figure)| figure.quotient(&pairs)));
            row.push(pairs.len().to_string());
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let mut header = vec!["row".to_owned()];
    header.extend(compared.map(|(name, _)| name.to_owned()));
    header.push("pairs".to_owned());
    format!(
        "<h3>Hotlift / QEMU</h3><p class=\"soft\">Of runs that were neighbours in time, median (lowest–highest): below 1 \
         Hotlift needs less.</p>{}",
        table(&header, rows.into_iter(), "")
    )
}

/// What the kernel has counted for the threads of a run; empty if it was not asked.
pub fn counts(run: &Completed) -> String {
    let side = |side: &'static str, threads: &[ThreadCounts]| -> Vec<Vec<String>> {
        let row = |thread: &ThreadCounts| {
            vec![
                thread.name.clone(),
                side.to_owned(),
                format!("{:.1}", thread.cpu_s * 1e3),
                thread.waits.to_string(),
                thread.preempted.to_string(),
                thread.page_faults.to_string(),
            ]
        };
        threads.iter().map(row).collect()
    };
    let rows = [
        side("source", &run.source_threads),
        side("destination", &run.destination_threads),
    ]
    .concat();
    if rows.is_empty() {
        return String::new();
    }
    let header = [
        "thread",
        "side",
        "CPU ms",
        "waits",
        "preempted",
        "page faults",
    ];
    let header = header.map(str::to_owned);
    details(
        "What the kernel has counted",
        &table(&header, rows.into_iter(), "published"),
    )
}
