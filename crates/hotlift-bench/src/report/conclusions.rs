//! Conclusions from the runs on one machine: the first section of a report.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::Chapter;
use super::group::Series;
use super::pictures::{Crossover, seconds};
use super::tables;
use crate::best_fixed;
use crate::record::{Completed, Engine, Record};
use crate::stats;
use crate::stats::rate_text;
use crate::table::{Grid, pairs};

/// Returns the conclusions: the fastest method, failures, and the comparison of Hotlift with QEMU.
pub fn of(
    records: &[Record],
    chapters: &[Chapter<'_>],
    crossover: Option<&Crossover<'_>>,
) -> Markup {
    let failed = problems(chapters, true);
    let beside_qemu = against_qemu(chapters);
    html! {
        ul {
            @if simulated(records) {
                li { strong { "Simulated devices took part. Their figures show that the ways work, and are no speeds." } }
            }
            @if let Some(crossover) = crossover {
                li { "Fastest, by wire: " (fastest(crossover)) "." }
            } @else if let Some(fastest) = fastest_of_one(chapters) {
                li { "Fastest: " (fastest) "." }
            }
            @for chapter in chapters {
                @for line in best_fixed::conclusions(chapter.records) { li { (line) "." } }
            }
            li { (completed(records)) "." }
        }
        @if !failed.rows.is_empty() { (tables::of(&failed)) }
        @if !beside_qemu.rows.is_empty() {
            h3 { "Hotlift / QEMU, by method" }
            (tables::of(&beside_qemu))
            p.soft { "Medians of neighbouring runs, the median (lowest–highest) of all rows of a method. Below 1 Hotlift needs less." }
        }
    }
}

/// Returns a collapsed list of the runs that were skipped on this machine; empty if none was skipped.
pub fn not_possible(chapters: &[Chapter<'_>]) -> Markup {
    let skipped = problems(chapters, false);
    let all = chapters.iter().flat_map(Chapter::series);
    let skips = all
        .flat_map(|series| &series.problems)
        .filter(|problem| !problem.failed);
    let runs: usize = skips.map(|problem| problem.times).sum();
    html! {
        @if runs > 0 {
            (tables::details(&format!("{runs} runs were not possible: something that they need is missing"), &tables::of(&skipped)))
        }
    }
}

fn simulated(records: &[Record]) -> bool {
    let runs = records.iter().filter_map(Record::completed);
    runs.flat_map(Completed::devices)
        .any(|device| device.to_lowercase().contains("simulat"))
}

fn completed(records: &[Record]) -> String {
    let completed: Vec<_> = records.iter().filter_map(Record::completed).collect();
    let wrong = completed
        .iter()
        .filter(|run| run.verified == Some(false))
        .count();
    let unseen = completed
        .iter()
        .filter(|run| run.verified.is_none())
        .count();
    let verified = match (wrong, unseen) {
        (0, 0) => ", all of them verified".to_owned(),
        (0, unseen) => format!(", {unseen} of them could not be verified"),
        (wrong, _) => format!(", and {wrong} of them did NOT arrive whole"),
    };
    let verified = if completed.is_empty() {
        String::new()
    } else {
        verified
    };
    format!(
        "{} of {} runs completed{verified}",
        completed.len(),
        records.len()
    )
}

/// Returns a sentence with the fastest Hotlift method at each link rate. Adjacent rates with the same method are
/// merged.
fn fastest(crossover: &Crossover<'_>) -> String {
    let mut spans: Vec<(&str, Option<f64>, Option<f64>)> = Vec::new();
    let ours = || {
        crossover
            .variants
            .iter()
            .filter(|way| way.engine == Engine::Hotlift)
    };
    for &rate in &crossover.rates {
        let at = ours().filter_map(|way| {
            let (_, series) = way.points.iter().find(|(other, _)| *other == rate)?;
            Some((way.name, seconds(series)?))
        });
        let Some((name, _)) = at.min_by(|a, b| a.1.total_cmp(&b.1)) else {
            continue;
        };
        match spans.last_mut() {
            Some(last) if last.0 == name => last.2 = rate,
            _ => spans.push((name, rate, rate)),
        }
    }
    let text = |(name, from, to): &(&str, Option<f64>, Option<f64>)| match from == to {
        true => format!("{name} ({})", rate_text(*from)),
        false => format!("{name} ({} to {})", rate_text(*from), rate_text(*to)),
    };
    spans.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// Returns the fastest of Hotlift's rows; `None` unless all rows have the same guest over the same link.
fn fastest_of_one(chapters: &[Chapter<'_>]) -> Option<String> {
    let [chapter] = chapters else { return None };
    let [condition] = chapter.conditions.as_slice() else {
        return None;
    };
    let ours = condition
        .series
        .iter()
        .filter(|series| series.row.engine == Engine::Hotlift);
    let times: Vec<_> = ours
        .filter_map(|series| Some((&series.name, seconds(series)?)))
        .collect();
    let fastest = times.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let (name, seconds) = fastest.filter(|_| times.len() > 1)?;
    Some(format!("{name} ({} s)", stats::number(*seconds)))
}

/// Returns a table that compares each Hotlift method with QEMU, over all rows with the same guest and link.
fn against_qemu(chapters: &[Chapter<'_>]) -> Grid {
    let mut names = Vec::new();
    let mut quotients: BTreeMap<String, Vec<Vec<Option<f64>>>> = BTreeMap::new();
    for chapter in chapters {
        for condition in &chapter.conditions {
            let compared = tables::compared(condition);
            names = compared.iter().map(|(name, _)| *name).collect();
            for (ours, theirs) in tables::beside_qemu(condition) {
                let pairs = pairs(chapter.records, &ours.row, (&theirs.row, &theirs.program));
                if pairs.is_empty() {
                    continue;
                }
                let medians = compared.map(|(_, figure)| Some(figure.quotients(&pairs)?.median));
                let relayed = if ours.row.engine == Engine::Relay {
                    "relays, "
                } else {
                    ""
                };
                let name = format!(
                    "{relayed}{} / {}",
                    ours.row.method_and_level(),
                    theirs.program
                );
                quotients.entry(name).or_default().push(medians.to_vec());
            }
        }
    }
    let mut table = Grid::new(["", "rows"].into_iter().chain(names), 0);
    for (name, rows) in quotients {
        let columns = rows.first().map_or(0, Vec::len);
        let cell = |column: usize| stats::text(rows.iter().filter_map(|row| row[column]));
        let mut line = vec![name, rows.len().to_string()];
        line.extend((0..columns).map(cell));
        table.rows.push(line);
    }
    table
}

/// Returns a table of the reasons why runs failed (`failed` is true) or were skipped (false), each with its rows.
fn problems(chapters: &[Chapter<'_>], failed: bool) -> Grid {
    let mut reasons: Vec<(&str, usize, Vec<&Series<'_>>)> = Vec::new();
    for series in chapters.iter().flat_map(Chapter::series) {
        for problem in series
            .problems
            .iter()
            .filter(|problem| problem.failed == failed)
        {
            match reasons.iter_mut().find(|(why, ..)| *why == problem.why) {
                Some((_, times, rows)) => {
                    *times += problem.times;
                    rows.push(series);
                }
                None => reasons.push((problem.why, problem.times, vec![series])),
            }
        }
    }
    let head = if failed { "failed" } else { "why not" };
    let mut table = Grid::new([head, "runs", "of"], 2);
    for (why, times, rows) in reasons {
        let mut names: Vec<&str> = rows.iter().map(|series| series.name.as_str()).collect();
        names.dedup();
        table
            .rows
            .push(vec![why.to_owned(), times.to_string(), names.join("; ")]);
    }
    table
}
