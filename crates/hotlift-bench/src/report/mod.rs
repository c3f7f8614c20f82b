//! The report of kept runs: one self-contained HTML file.
//!
//! | file | subject |
//! |---|---|
//! | `choices` | the chosen methods over time |
//! | `conclusions` | conclusions from the runs, and runs that were not possible |
//! | `facts` | facts about the machine, and definitions of the figures |
//! | `group` | groups of runs: repeats, and rows of the same work |
//! | `pictures` | the pictures |
//! | `plot` | bars and lines |
//! | `tables` | figures, quotients with QEMU |
//! | `style.css` | light, dark, and on paper |
//!
//! Each machine has its own part of the report. A part has a chapter for each suite or matrix.
//!
//! The report contains no script, and loads no other files. All names and texts come from files of unknown origin, and
//! the templates (maud) escape every one.
//!
//! The pictures are drawn without a chart crate. Such crates bring fonts and a rasterizer, and they write text as SVG,
//! which does not wrap in a narrow window.

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

/// Content security policy that forbids scripts and loading of other files.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// Returns the report of `records` as HTML. The suites and series may be in any order.
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
    // File names may contain other control characters, which HTML and XML forbid.
    let control = |c: char| c.is_control() && !c.is_whitespace();
    page.into_string().replace(control, "\u{fffd}")
}

/// Groups the records by machine, one list for each machine.
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

/// The runs of one suite or matrix on one machine.
struct Chapter<'a> {
    /// Anchor of the chapter for the table of contents.
    id: String,
    /// Name of the chapter; `None` if it is the only chapter.
    name: Option<String>,
    /// The published table, if the chapter has one.
    suite: Option<&'static Suite>,
    /// The runs of the chapter.
    records: &'a [Record],
    /// The runs, grouped by link and guest.
    conditions: Vec<Condition<'a>>,
}

impl<'a> Chapter<'a> {
    fn series(&self) -> impl Iterator<Item = &Series<'a>> {
        self.conditions
            .iter()
            .flat_map(|condition| &condition.series)
    }
}

/// Returns the chapters of one machine's runs. Chapters of a suite that ran more than once are numbered.
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

/// Returns the part of the report for one machine. The conclusions and the crossover picture come first.
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

/// Returns the chapter as HTML: the published table with our figures, and the measured figures. The measured figures
/// are collapsed if the published table already shows them.
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
