//! The tables of a report.

use maud::{Markup, html};

use super::group::{Condition, Series};
use crate::figures::{self, Figure};
use crate::record::{Completed, Record};
use crate::table::{Grid, is_the_same_work, pairs, verified};

/// Returns the table as HTML. If the table is narrow, a spread is in one line below its median.
pub fn of(table: &Grid) -> Markup {
    let class = |column: usize| (column > 0 && column == table.words).then_some("words");
    let spread = |text: &str| {
        let (median, spread) = text.split_once(" (")?;
        let is_one = spread.contains('–') && spread.ends_with(')');
        is_one.then(|| html! { (median) " " span.range { "(" (spread) } })
    };
    html! {
        div.wide {
            table {
                thead {
                    tr {
                        @for (i, name) in table.header.iter().enumerate() {
                            th scope="col" class=[class(i)] { (name) }
                        }
                    }
                }
                tbody {
                    @for row in &table.rows {
                        tr {
                            @for (i, cell) in row.iter().enumerate() {
                                td class=[class(i)] {
                                    @match spread(cell) { Some(cell) => { (cell) }, None => { (cell) } }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Returns `inner` in a collapsible element with the title `summary`.
pub fn details(summary: &str, inner: &Markup) -> Markup {
    html! { details { summary { (summary) } (inner) } }
}

/// Returns a table of median and spread of all figures, a line for each series.
pub fn figures(series: &[Series<'_>]) -> Markup {
    let all: Vec<&Completed> = series.iter().flat_map(Series::completed).collect();
    let columns = figures::meaningful(figures::ALL, &all);
    let names = columns.iter().map(|figure| figure.name);
    let header = ["row", "runs"].into_iter().chain(names).chain(["verified"]);
    let mut table = Grid::new(header, 0);
    for series in series.iter().filter(|series| !series.runs.is_empty()) {
        let mut row = vec![series.name.clone(), series.runs.len().to_string()];
        row.extend(columns.iter().map(|figure| figure.text(series.completed())));
        row.push(verified(&series.runs));
        table.rows.push(row);
    }
    of(&table)
}

/// Returns a table of the quotients Hotlift / QEMU, made of runs with the same repeat number; empty without QEMU.
pub fn quotients(condition: &Condition<'_>, records: &[Record]) -> Markup {
    let compared = compared(condition);
    let names = compared.iter().map(|(name, _)| *name);
    let mut table = Grid::new(
        ["Hotlift / QEMU"].into_iter().chain(names).chain(["pairs"]),
        0,
    );
    for (ours, theirs) in beside_qemu(condition) {
        let pairs = pairs(records, &ours.row, (&theirs.row, &theirs.program));
        if pairs.is_empty() {
            continue;
        }
        let mut row = vec![format!("{} / {}", ours.name, theirs.program)];
        row.extend(compared.iter().map(|(_, figure)| figure.quotient(&pairs)));
        row.push(pairs.len().to_string());
        table.rows.push(row);
    }
    html! { @if !table.rows.is_empty() { (of(&table)) } }
}

/// Returns Hotlift's series, each with the QEMU series of the same work.
pub fn beside_qemu<'a>(
    condition: &'a Condition<'a>,
) -> impl Iterator<Item = (&'a Series<'a>, &'a Series<'a>)> {
    let all = &condition.series;
    all.iter().flat_map(move |ours| {
        let theirs = all.iter();
        theirs
            .filter(move |theirs| is_the_same_work(&ours.row, &theirs.row))
            .map(move |theirs| (ours, theirs))
    })
}

/// Returns the figures that are compared with QEMU.
pub fn compared(condition: &Condition<'_>) -> [(&'static str, Figure); 5] {
    let ([source, destination], _) = condition.cpu();
    [
        ("total time", figures::TOTAL_MS),
        ("downtime", figures::DOWN_MS),
        ("source CPU", source),
        ("destination CPU", destination),
        ("bytes", figures::BYTES),
    ]
}
