//! Picture of method `auto` in a report: the share of each chosen compression method over time.

use std::collections::{BTreeMap, BTreeSet};

use maud::{Markup, html};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::Chapter;
use super::group::{Condition, Series};
use super::plot::{Area, Axis, Line, Plot, lines};
use super::tables;
use crate::record::{Completed, Row};
use crate::table::Grid;

/// Maximum number of migrations in the picture of chosen methods.
const MAX_DRAWN: usize = 24;

/// One interval of a run: the methods that `auto` chose in this interval.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct ChoiceInterval {
    /// End of the interval, in ms since the request to migrate.
    ms: f64,
    /// Throughput of the link in the interval, in bytes per second.
    link_bytes_per_s: f64,
    /// Share of each method in the interval, 0 to 1.
    shares: BTreeMap<String, f64>,
}

/// Packets and bytes of one method in a run.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Used {
    name: String,
    #[serde(default)]
    level: Option<u8>,
    packets: u64,
    pages: u64,
    bytes_in: u64,
    bytes_out: u64,
    core_seconds: f64,
}

/// Returns the list `name` from the source's report, empty if the report lacks it. Reads by name, because some engines
/// do not report the list.
fn list<T: DeserializeOwned>(run: &Completed, name: &str) -> Vec<T> {
    let report = serde_json::to_value(&run.source).unwrap_or_default();
    let list = report.get(name).cloned().unwrap_or_default();
    serde_json::from_value(list).unwrap_or_default()
}

/// Draws the median run of each row in which `auto` chose methods. Rows whose link or cores change during the run come
/// first.
pub fn of(chapters: &[Chapter<'_>], id: &str) -> Markup {
    let conditions = chapters.iter().flat_map(|chapter| &chapter.conditions);
    let all =
        conditions.flat_map(|condition| condition.series.iter().map(move |one| (condition, one)));
    let mut drawn: Vec<_> = all
        .filter_map(|(condition, series)| {
            let run = series.typical()?;
            let intervals: Vec<ChoiceInterval> = list(run, "timeline");
            (intervals.len() > 1).then_some((condition, series, run, intervals))
        })
        .collect();
    drawn.sort_by_key(|(condition, ..)| condition.is_steady());
    let left_out = drawn.len().saturating_sub(MAX_DRAWN);
    html! {
        @if !drawn.is_empty() {
            section {
                h2 { "What was chosen" }
                p { "What went by which method, under the rate that the link had." }
                @for (i, (condition, series, run, intervals)) in drawn.iter().take(MAX_DRAWN).enumerate() {
                    @let picture = picture(condition, series, run, intervals, &format!("{id}{i}"));
                    @match condition.is_steady() {
                        false => { (picture) }
                        true => { (tables::details(&format!("{}. {}", series.name, condition.title), &picture)) }
                    }
                }
                @if left_out > 0 { p.soft { (left_out) " rows more are in runs.jsonl." } }
            }
        }
    }
}

fn picture(
    condition: &Condition<'_>,
    series: &Series<'_>,
    run: &Completed,
    intervals: &[ChoiceInterval],
    id: &str,
) -> Markup {
    let title = format!("{}. {}", series.name, condition.title);
    html! {
        figure {
            figcaption { (title) "; " (condition.note) }
            (stack(&series.row, intervals, run.source.total_ms, id, &title))
        }
        (tables::of(&used(&list(run, "methods"))))
    }
}

/// Draws the rate of each method over time, stacked, and the configured rate of the link.
fn stack(row: &Row, intervals: &[ChoiceInterval], total_ms: f64, id: &str, title: &str) -> Markup {
    let mbit = |bytes: f64| bytes * 8.0 / 1e6;
    let names: BTreeSet<&str> = intervals
        .iter()
        .flat_map(|interval| interval.shares.keys().map(String::as_str))
        .collect();
    let starts = std::iter::once(0.0).chain(intervals.iter().map(|interval| interval.ms / 1e3));
    let spans: Vec<(f64, f64, &ChoiceInterval)> = starts
        .zip(intervals)
        .map(|(start, interval)| (start, interval.ms / 1e3, interval))
        .collect();
    let area = |(i, name): (usize, &&str)| {
        let below = |interval: &ChoiceInterval, number: usize| {
            let shares = names
                .iter()
                .take(number)
                .filter_map(|name| interval.shares.get(*name));
            mbit(interval.link_bytes_per_s * shares.sum::<f64>())
        };
        // The share is constant over an interval.
        let points = spans.iter().flat_map(|(start, end, interval)| {
            let (low, high) = (below(interval, i), below(interval, i + 1));
            [(*start, low, high), (*end, low, high)]
        });
        Area {
            name: (*name).to_owned(),
            colour: i,
            points: points.collect(),
        }
    };
    let areas: Vec<Area> = names.iter().enumerate().map(area).collect();
    let end = spans
        .iter()
        .fold(total_ms / 1e3, |end, span| end.max(span.1));
    let link = link(row, end);
    let carried = intervals
        .iter()
        .map(|interval| mbit(interval.link_bytes_per_s));
    let made = link
        .iter()
        .flat_map(|line| line.points.iter().map(|point| point.1));
    lines(&Plot {
        id,
        title: &format!("What went by which method over time: {title}"),
        x: Axis::new("s since the request", std::iter::once(end), false),
        y: Axis::new("Mbit/s", carried.chain(made), false),
        areas: &areas,
        lines: link.as_slice(),
        markers: false,
    })
}

/// Returns a line with the configured rate of the link, in Mbit/s, up to time `end`; `None` without a limit.
fn link(row: &Row, end: f64) -> Option<Line> {
    let link = row.link()?;
    let mut rate = link.rate()? as f64 / 1e6;
    let mut points = vec![(0.0, rate)];
    for (at, bits) in link.changes() {
        let at = at.as_secs_f64().min(end);
        points.push((at, rate));
        if at < end {
            rate = *bits as f64 / 1e6;
            points.push((at, rate));
        }
    }
    points.push((end, rate));
    Some(Line {
        name: "the link's rate".to_owned(),
        colour: 6,
        dashed: true,
        bold: false,
        points,
    })
}

/// Returns a table with a line for each method that the run used.
fn used(methods: &[Used]) -> Grid {
    let header = ["method", "packets", "% of pages", "ratio", "core-s/GiB src"];
    let mut table = Grid::new(header, 0);
    let pages: u64 = methods.iter().map(|method| method.pages).sum();
    let gib = f64::from(1 << 30);
    let text = |quotient: f64, digits: usize| match quotient.is_finite() {
        true => format!("{quotient:.digits$}"),
        false => "-".to_owned(),
    };
    for method in methods {
        let level = method
            .level
            .map_or(String::new(), |level| format!(" {level}"));
        table.rows.push(vec![
            format!("{}{level}", method.name),
            method.packets.to_string(),
            text(method.pages as f64 * 100.0 / pages as f64, 1),
            text(method.bytes_in as f64 / method.bytes_out as f64, 2),
            text(method.core_seconds * gib / method.bytes_in as f64, 2),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::example;

    fn interval(ms: f64, rate: f64, shares: &[(&str, f64)]) -> ChoiceInterval {
        let shares = shares
            .iter()
            .map(|(name, share)| ((*name).to_owned(), *share));
        ChoiceInterval {
            ms,
            link_bytes_per_s: rate,
            shares: shares.collect(),
        }
    }

    /// The environment variable `HOTLIFT_KEEP_REPORT` names a folder in which the picture is kept for a manual check.
    #[test]
    fn methods_are_stacked_below_the_links_rate() {
        let mut row = example().row;
        row.link = Some("1gbit,200mbit@2s,1gbit@60s".to_owned());
        let intervals = [
            interval(1000.0, 1.2e8, &[("none", 0.75), ("zstd 1", 0.25)]),
            interval(2000.0, 1.1e8, &[("none", 0.5), ("zstd 1", 0.5)]),
            interval(2500.0, 8e7, &[("zstd 1", 1.0)]),
            interval(5000.0, 2.4e7, &[("zstd 1", 0.1), ("zstd 3", 0.9)]),
        ];
        let picture = stack(&row, &intervals, 5000.0, "p", "t").into_string();
        assert_eq!(picture.matches("class=\"area\"").count(), 3, "{picture}");
        assert_eq!(picture.matches("class=\"line\"").count(), 1);
        for name in ["none", "zstd 1", "zstd 3", "the link"] {
            assert!(picture.contains(name), "{name}");
        }
        assert!(!picture.contains("NaN") && !picture.contains("inf"));
        // A change of the rate after the end of the run is not drawn.
        let line = link(&row, 5.0).unwrap();
        assert_eq!(
            line.points,
            [
                (0.0, 1000.0),
                (2.0, 1000.0),
                (2.0, 200.0),
                (5.0, 200.0),
                (5.0, 200.0)
            ]
        );
        row.link = None;
        assert!(link(&row, 5.0).is_none());
        if let Some(keep) = std::env::var_os("HOTLIFT_KEEP_REPORT") {
            let style = include_str!("style.css");
            let page = format!(
                "<!DOCTYPE html><meta charset=utf-8><style>{style}</style><main>{picture}</main>"
            );
            std::fs::write(std::path::Path::new(&keep).join("choices.html"), page).unwrap();
        }
    }

    #[test]
    fn a_report_is_read_by_its_names() {
        let text =
            r#"{ "ms": 100.0, "link_bytes_per_s": 1e8, "shares": { "none": 0.4, "zstd 3": 0.6 } }"#;
        let read: ChoiceInterval = serde_json::from_str(text).unwrap();
        assert_eq!(
            read,
            interval(100.0, 1e8, &[("none", 0.4), ("zstd 3", 0.6)])
        );
        let text = r#"[{ "name": "zstd", "level": 3, "packets": 4, "pages": 512, "bytes_in": 2097152, "bytes_out": 1048576,
            "core_seconds": 0.01 }]"#;
        let methods: Vec<Used> = serde_json::from_str(text).unwrap();
        assert_eq!(
            used(&methods).rows[0],
            ["zstd 3", "4", "100.0", "2.00", "5.12"]
        );
        // An engine that reports no timeline.
        assert!(list::<ChoiceInterval>(&Completed::default(), "timeline").is_empty());
    }
}
