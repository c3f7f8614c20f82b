//! The pictures of a report. Each picture has a table of its values.

use maud::{Markup, html};

use super::group::{self, Condition, Series, cpu};
use super::plot::{Axis, Bar, Line, Part, Plot, bars, legend, lines};
use super::tables;
use crate::best_fixed::AUTO;
use crate::figures::{self, Figure};
use crate::record::{Engine, Record};
use crate::stats::rate_text;
use crate::table::Grid;

/// Names and colour numbers of the programs and of both sides of a migration.
const ENGINES: [(&str, usize); 3] = [("Hotlift", 0), ("QEMU", 6), ("QEMU through relays", 2)];
const SIDES: [(&str, usize); 2] = [("source", 0), ("destination", 1)];

/// Draws total time, downtime and CPU of one condition, and adds the quotients Hotlift / QEMU and all figures as
/// tables.
pub fn condition(condition: &Condition<'_>, records: &[Record]) -> Markup {
    let ([source, destination], of_what) = condition.cpu();
    let bar = |series: &Series<'_>, parts: &[(&str, Figure, usize)], unit: f64| {
        let part = |(side, figure, colour): &(&str, Figure, usize)| {
            Some(Part {
                name: format!("{}{side}", series.name),
                value: series.spread(*figure)?.median / unit,
                colour: *colour,
            })
        };
        let spread = match parts {
            [(_, figure, _)] => series.spread(*figure),
            _ => None,
        };
        Some(Bar {
            name: series.name.clone(),
            parts: parts.iter().map(part).collect::<Option<Vec<_>>>()?,
            spread: spread.map(|spread| (spread.lowest / unit, spread.highest / unit)),
        })
    };
    let all = condition
        .series
        .iter()
        .filter(|series| !series.runs.is_empty());
    let times = [
        ("Total time, s", "s", figures::TOTAL_MS, 1e3),
        ("Downtime, ms", "ms", figures::DOWN_MS, 1.0),
    ];
    let times = times.map(|(title, unit, figure, scale)| {
        let engine = |series: &Series<'_>| ENGINES[series.row.engine as usize].1;
        let bar = |series| bar(series, &[("", figure, engine(series))], scale);
        bars(
            title,
            unit,
            &all.clone().filter_map(bar).collect::<Vec<_>>(),
        )
    });
    let sides = [
        (", source", source, SIDES[0].1),
        (", destination", destination, SIDES[1].1),
    ];
    let cpu: Vec<Bar> = all
        .clone()
        .filter_map(|series| bar(series, &sides, 1.0))
        .collect();
    let has_qemu = all.clone().any(|series| series.row.engine == Engine::Qemu);
    html! {
        @if !cpu.is_empty() {
            div.pair {
                @for times in times {
                    figure { @if has_qemu { (legend(&ENGINES)) } (times) }
                }
                figure {
                    (legend(&SIDES))
                    (bars(&format!("CPU, core-s per {of_what}"), "core-s/GiB", &cpu))
                }
            }
            (tables::quotients(condition, records))
            (tables::details("The figures", &tables::figures(&condition.series)))
        }
    }
}

/// One program with one set of migration options, with its runs at several link rates.
pub struct MigrationVariant<'a> {
    /// Name that distinguishes this variant from the others.
    pub name: &'a str,
    /// Name of the compression method, the same for all engines.
    method: &'a str,
    /// Program that migrated the guest.
    pub engine: Engine,
    /// True for method `auto`; its line is drawn last.
    is_auto: bool,
    /// Runs by link rate in bytes per second; the rate is `None` without a limit.
    pub points: Vec<(Option<f64>, &'a Series<'a>)>,
}

/// Comparison of migration variants for one guest over several link rates: at some rates another variant is faster.
pub struct Crossover<'a> {
    guest: String,
    /// Variants that ran at two link rates or more.
    pub variants: Vec<MigrationVariant<'a>>,
    /// Link rates in bytes per second, the slowest first; `None` is no limit.
    pub rates: Vec<Option<f64>>,
}

/// Returns a crossover for each guest that was migrated over several links. The guest with the most links comes first.
pub fn crossovers<'a>(conditions: &'a [Condition<'a>]) -> Vec<Crossover<'a>> {
    let mut guests: Vec<Vec<&Condition<'_>>> = Vec::new();
    // A condition whose rate changes during the run has no single rate, so it cannot be drawn.
    for condition in conditions.iter().filter(|condition| condition.is_steady()) {
        let same = |guest: &&mut Vec<&Condition<'_>>| guest[0].has_the_guest_of(condition);
        match guests.iter_mut().find(same) {
            Some(guest) => guest.push(condition),
            None => guests.push(vec![condition]),
        }
    }
    let mut all: Vec<_> = guests.iter().map(|guest| crossover(guest)).collect();
    all.retain(|crossover| !crossover.variants.is_empty());
    all.sort_by_key(|crossover| std::cmp::Reverse(crossover.rates.len()));
    all
}

fn crossover<'a>(guest: &[&'a Condition<'a>]) -> Crossover<'a> {
    let mut variants: Vec<MigrationVariant<'_>> = Vec::new();
    for condition in guest {
        let ran = condition.series.iter();
        for series in ran.filter(|series| !series.runs.is_empty()) {
            let point = (condition.rate(), series);
            match variants.iter_mut().find(|way| way.name == series.name) {
                Some(way) => way.points.push(point),
                None => variants.push(MigrationVariant {
                    name: &series.name,
                    method: match series.row.engine {
                        Engine::Hotlift => &series.name,
                        _ => series.name[series.program.len()..].trim_start(),
                    },
                    engine: series.row.engine,
                    is_auto: series.row.method == AUTO,
                    points: vec![point],
                }),
            }
        }
    }
    variants.retain(|way| way.points.len() > 1);
    // The last line is drawn on top of the others.
    variants.sort_by_key(|way| way.is_auto);
    let mut rates: Vec<_> = guest.iter().map(|condition| condition.rate()).collect();
    rates.dedup();
    Crossover {
        guest: group::guest(&guest[0].series[0].row),
        variants,
        rates,
    }
}

/// Returns the median of the total time, in seconds; `None` without completed runs.
pub fn seconds(series: &Series<'_>) -> Option<f64> {
    Some(series.spread(figures::TOTAL_MS)?.median / 1e3)
}

impl Crossover<'_> {
    /// Draws total time and CPU against the link's rate.
    pub fn picture(&self, id: &str) -> Markup {
        let points = || self.variants.iter().flat_map(|way| &way.points);
        let rates = || points().filter_map(|(rate, _)| *rate);
        let (slowest, fastest) = (
            rates().fold(f64::INFINITY, f64::min),
            rates().fold(0.0, f64::max),
        );
        let (unit, bits) = match slowest * 8.0 >= 1e9 {
            true => ("wire, Gbit/s", 1e9),
            false => ("wire, Mbit/s", 1e6),
        };
        // A link without a limit is drawn to the right of all limited links.
        let place = |rate: Option<f64>| rate.unwrap_or(fastest.max(1e6) * 4.0) * 8.0 / bits;
        let x = || {
            let mut x = Axis::new(unit, points().map(|(rate, _)| place(*rate)), true);
            if points().any(|(rate, _)| rate.is_none()) {
                let limit = place(None);
                x.ticks.retain(|tick| tick.0 < limit * 0.6);
                x.ticks.push((limit, "no limit".to_owned()));
            }
            x
        };
        let mut methods: Vec<&str> = self.variants.iter().map(|way| way.method).collect();
        methods.dedup();
        let ([source, destination], of_what) =
            cpu(points().flat_map(|(_, series)| series.completed()));
        let cost = |series: &Series<'_>| {
            Some(series.spread(source)?.median + series.spread(destination)?.median)
        };
        let picture = |name: &str, title: &str, of: &dyn Fn(&Series<'_>) -> Option<f64>| {
            let line = |way: &MigrationVariant<'_>| {
                let points = way.points.iter();
                Line {
                    name: way.name.to_owned(),
                    colour: methods
                        .iter()
                        .position(|method| *method == way.method)
                        .unwrap_or(0),
                    dashed: way.engine == Engine::Qemu,
                    bold: way.is_auto,
                    points: points
                        .filter_map(|(rate, series)| Some((place(*rate), of(series)?)))
                        .collect(),
                }
            };
            let all: Vec<Line> = self.variants.iter().map(line).collect();
            let values = all.iter().flat_map(|line| &line.points);
            lines(&Plot {
                id: &format!("{id}-{name}"),
                title: &format!("{title}, against the wire's rate"),
                x: x(),
                y: Axis::new(title, values.map(|point| point.1), true),
                areas: &[],
                lines: &all,
                markers: true,
            })
        };
        let dashes = match self.variants.iter().any(|way| way.engine == Engine::Qemu) {
            true => "; dashed: QEMU",
            false => "",
        };
        html! {
            figure {
                figcaption { (self.guest) "; medians" (dashes) }
                (picture("time", "total time, s", &seconds))
                (picture("cpu", &format!("CPU of both sides, core-s per {of_what}"), &cost))
            }
            (tables::details("The figures", &tables::of(&self.table(&cost))))
        }
    }

    fn table(&self, cost: &dyn Fn(&Series<'_>) -> Option<f64>) -> Grid {
        let rates: Vec<String> = self.rates.iter().map(|rate| rate_text(*rate)).collect();
        let names = rates.iter().map(String::as_str);
        let mut table = Grid::new(["row"].into_iter().chain(names), 0);
        for way in &self.variants {
            let at = |rate: &Option<f64>| {
                let (_, series) = way.points.iter().find(|(other, _)| other == rate)?;
                Some(format!(
                    "{:.2} s; {:.2} core-s/GiB",
                    seconds(series)?,
                    cost(series)?
                ))
            };
            let cells = self
                .rates
                .iter()
                .map(|rate| at(rate).unwrap_or_else(|| "-".to_owned()));
            table
                .rows
                .push(std::iter::once(way.name.to_owned()).chain(cells).collect());
        }
        table
    }
}
