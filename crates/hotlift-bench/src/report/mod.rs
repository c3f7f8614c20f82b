//! The report of kept runs: one HTML file that needs nothing but itself.
//!
//! | file | subject |
//! |---|---|
//! | `choices` | which methods were chosen, over time |
//! | `conclusions` | what the runs come to, and what was not possible |
//! | `facts` | what ran where, and what the figures are |
//! | `group` | runs put together: repeats, and rows of the same work |
//! | `pictures` | what is drawn |
//! | `plot` | bars and lines |
//! | `tables` | figures, quotients with QEMU |
//! | `style.css` | light, dark, and on paper |
//!
//! Machines are never mixed: each has its own part. In it a chapter is what one table can show.
//!
//! There is no script in it, and nothing is fetched. All names and words come from files that anybody may have
//! written: the templates (maud) escape every one of them.
//!
//! Pictures are drawn here and not by a chart crate: those bring fonts and a raster, and their words are SVG, which
//! does not wrap in a narrow window.

mod choices;
mod conclusions;
mod facts;
mod group;
mod pictures;
mod plot;
mod tables;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::record::Record;
use super::suite::{self, Suite};
use group::{Condition, Series, conditions};
pub use group::{neighbour, rate};

/// A page that runs nothing, and fetches nothing.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// The report of these runs, in any order of suites and series.
pub fn html(records: &[Record]) -> String {
    let machines = machines(records);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                title { "Hotlift bench" }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                main {
                    h1 { "Hotlift bench" }
                    @for (i, records) in machines.iter().enumerate() {
                        @if machines.len() > 1 {
                            h1.machine { "Machine " (i + 1) " of " (machines.len()) }
                        }
                        (machine(records, i))
                    }
                    (facts::definitions())
                }
            }
        }
    };
    // Neither HTML nor XML has room for the others, which names of files may hold.
    let control = |c: char| c.is_control() && !c.is_whitespace();
    page.into_string().replace(control, "\u{fffd}")
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

/// All of one suite or matrix.
struct Chapter<'a> {
    /// Where contents lead.
    id: String,
    /// Its name; none if it is the only one.
    name: Option<String>,
    /// The published table, if it is of one.
    suite: Option<&'static Suite>,
    /// Its runs.
    records: &'a [Record],
    /// The same by wire and guest.
    conditions: Vec<Condition<'a>>,
}

impl<'a> Chapter<'a> {
    fn series(&self) -> impl Iterator<Item = &Series<'a>> {
        self.conditions
            .iter()
            .flat_map(|condition| &condition.series)
    }
}

/// The parts of a machine's runs; a suite that ran more than once has a number.
fn chapters(parts: &[Vec<Record>], machine: usize) -> Vec<Chapter<'_>> {
    let mut chapters: Vec<Chapter<'_>> = Vec::new();
    for (i, records) in parts.iter().enumerate() {
        let suite = &records[0].suite;
        let before = parts[..i]
            .iter()
            .filter(|part| part[0].suite == *suite)
            .count();
        let name = match before {
            0 => suite.clone(),
            _ => format!("{suite} ({})", before + 1),
        };
        chapters.push(Chapter {
            id: format!("m{machine}-{i}"),
            name: (parts.len() > 1).then_some(name),
            suite: suite::find(suite).ok(),
            records,
            conditions: conditions(records),
        });
    }
    chapters
}

/// All of one machine: conclusions and the crossover first.
fn machine(records: &[Record], number: usize) -> Markup {
    let parts = suite::split(records);
    let chapters = chapters(&parts, number);
    let all = chapters.iter().flat_map(|chapter| {
        let crossovers = pictures::crossovers(&chapter.conditions).into_iter();
        crossovers.map(move |crossover| (chapter.id.as_str(), crossover))
    });
    let mut crossovers: Vec<_> = all.collect();
    crossovers.sort_by_key(|(_, crossover)| std::cmp::Reverse(crossover.rates.len()));
    let mut crossovers = crossovers.into_iter();
    let first = crossovers.next().map(|(_, crossover)| crossover);
    let others: Vec<_> = crossovers.collect();
    html! {
        section {
            (conclusions::of(records, &chapters, first.as_ref()))
            @if let Some(crossover) = &first {
                h2 { "Where methods cross" }
                p { "A method is worth its CPU where its line of total time lies below that of none." }
                (crossover.picture(&format!("m{number}-cross")))
            }
            (facts::machine(records))
            @if chapters.len() > 1 {
                p {
                    @for chapter in &chapters {
                        a href={ "#" (chapter.id) } { (chapter.name.as_deref().unwrap_or_default()) } " "
                    }
                }
            }
        }
        @for chapter in &chapters {
            section id=(chapter.id) {
                h2 { (chapter.name.as_deref().unwrap_or("The runs")) }
                (self::chapter(chapter))
                @for (i, (_, crossover)) in others.iter().enumerate().filter(|(_, (id, _))| *id == chapter.id) {
                    h3 { "Where methods cross" }
                    (crossover.picture(&format!("m{number}-cross{i}")))
                }
            }
        }
        (choices::of(&chapters, &format!("m{number}-choices")))
        (conclusions::not_possible(&chapters))
    }
}

/// The published table with ours; and what was measured, folded where that table has said it.
fn chapter(chapter: &Chapter<'_>) -> Markup {
    let pictures = html! {
        @for condition in &chapter.conditions {
            h3 { (condition.title) }
            p.soft { (condition.note) }
            (pictures::condition(condition, chapter.records))
        }
    };
    match chapter.suite {
        None => pictures,
        Some(suite) => html! {
            (published(suite, chapter.records))
            (tables::details("The same as bars", &pictures))
        },
    }
}

fn published(suite: &Suite, records: &[Record]) -> Markup {
    let sheet = suite.sheet(records);
    html! {
        p { (sheet.heading) "." }
        @for (caption, table) in &sheet.tables {
            h3 { (caption) }
            (tables::of(table))
        }
        h3 { "What differs here" }
        ul { @for line in &sheet.differs { li { (line) } } }
    }
}

#[cfg(test)]
mod tests;
