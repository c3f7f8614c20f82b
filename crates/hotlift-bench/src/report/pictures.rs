//! The pictures of a report, each with the table that it was drawn from.

use hotlift_console::events::Moment;

use super::group::{Condition, Series, cpu, rate_text};
use super::svg::{Axis, Bar, HALF, Line, Part, WIDTH, bars, escape, legend, lines};
use super::tables;
use crate::figures::{self, Figure};
use crate::record::{Engine, Record};

/// Most rows of a chapter whose threads are drawn.
const MOST_ROWS_OF_THREADS: usize = 16;

/// Threads of less than this share of the busiest are put together.
const SMALL_THREAD: f64 = 0.01;

fn figure(caption: &str, picture: &str) -> String {
    format!("<figure><h3>{}</h3>{picture}</figure>", escape(caption))
}

/// Total time, downtime and CPU of one condition.
pub fn condition(condition: &Condition<'_>, records: &[Record], id: &str) -> String {
    let of = |figure: Figure, unit: f64| -> Vec<Bar> {
        let bar = |series: &Series<'_>| {
            let spread = series.spread(figure)?;
            Some(Bar {
                name: series.name.clone(),
                parts: vec![Part {
                    name: series.name.clone(),
                    value: spread.median / unit,
                    colour: engine_colour(series),
                }],
                spread: Some((spread.lowest / unit, spread.highest / unit)),
            })
        };
        condition.series.iter().filter_map(bar).collect()
    };
    let ([source, destination], of_what) = condition.cpu();
    let cpu: Vec<Bar> = condition
        .series
        .iter()
        .filter_map(|series| {
            let sides = [("source", source, 0), ("destination", destination, 1)];
            let parts = sides.map(|(side, figure, colour)| {
                Some(Part {
                    name: format!("{}, {side}", series.name),
                    value: series.spread(figure)?.median,
                    colour,
                })
            });
            Some(Bar {
                name: series.name.clone(),
                parts: parts.into_iter().collect::<Option<Vec<_>>>()?,
                spread: None,
            })
        })
        .collect();
    if cpu.is_empty() {
        return tables::problems(&condition.series);
    }
    let qemu = condition.series.iter();
    let qemu = match qemu.clone().any(|series| series.row.engine == Engine::Qemu) {
        true => legend(&[("Hotlift", 0), ("QEMU", 6)]),
        false => String::new(),
    };
    let times = [
        ("Total time, s", "s", figures::TOTAL_MS, 1e3, "total"),
        ("Downtime, ms", "ms", figures::DOWN_MS, 1.0, "down"),
    ];
    let times = times.map(|(caption, unit, what, scale, name)| {
        let picture = bars(
            &format!("{id}-{name}"),
            &format!("{caption}, by row"),
            unit,
            &of(what, scale),
            WIDTH,
        );
        figure(caption, &(qemu.clone() + &picture))
    });
    let cpu = legend(&[("source", 0), ("destination", 1)])
        + &bars(
            &format!("{id}-cpu"),
            "CPU seconds per GiB, by row",
            "core-s/GiB",
            &cpu,
            WIDTH,
        );
    [
        times.concat(),
        figure(&format!("CPU, core-s per {of_what}"), &cpu),
        tables::quotients(condition, records),
        tables::details("The figures", &tables::figures(&condition.series)),
        tables::problems(&condition.series),
    ]
    .concat()
}

/// QEMU's rows in one colour, ours in another.
fn engine_colour(series: &Series<'_>) -> usize {
    match series.row.engine {
        Engine::Hotlift => 0,
        Engine::Qemu => 6,
    }
}

/// Total time and CPU against the wire's rate, for each guest; `None` if nothing ran at two rates.
pub fn crossover(conditions: &[Condition<'_>], id: &str) -> Option<String> {
    let mut guests: Vec<Vec<&Condition<'_>>> = Vec::new();
    for condition in conditions {
        let same = |guest: &&mut Vec<&Condition<'_>>| guest[0].has_the_guest_of(condition);
        match guests.iter_mut().find(same) {
            Some(guest) => guest.push(condition),
            None => guests.push(vec![condition]),
        }
    }
    let text: String = guests
        .iter()
        .enumerate()
        .filter_map(|(i, guest)| crossover_of(guest, &format!("{id}-cross{i}")))
        .collect();
    (!text.is_empty()).then_some(text)
}

/// One way to migrate, at the rates at which it ran.
struct Way<'a> {
    name: &'a str,
    /// The same of all engines.
    method: &'a str,
    engine: Engine,
    points: Vec<(Option<f64>, &'a Series<'a>)>,
}

/// The ways of one guest that ran at more than one rate.
fn ways<'a>(guest: &[&'a Condition<'a>]) -> Vec<Way<'a>> {
    let mut ways: Vec<Way<'_>> = Vec::new();
    for condition in guest {
        let ran = condition.series.iter();
        for series in ran.filter(|series| !series.runs.is_empty()) {
            let point = (condition.rate(), series);
            match ways.iter_mut().find(|way| way.name == series.name) {
                Some(way) => way.points.push(point),
                None => ways.push(Way {
                    name: &series.name,
                    method: match series.row.engine {
                        Engine::Hotlift => &series.name,
                        Engine::Qemu => series.name[series.who.len()..].trim_start(),
                    },
                    engine: series.row.engine,
                    points: vec![point],
                }),
            }
        }
    }
    ways.retain(|way| way.points.len() > 1);
    ways
}

fn crossover_of(guest: &[&Condition<'_>], id: &str) -> Option<String> {
    let ways = ways(guest);
    if ways.is_empty() {
        return None;
    }
    let points = || ways.iter().flat_map(|way| &way.points);
    let fastest = points().filter_map(|(rate, _)| *rate).fold(0.0, f64::max);
    // A wire without limit stands to the right of all others.
    let slowest = points().filter_map(|(rate, _)| *rate);
    let (unit, bits) = match slowest.fold(f64::INFINITY, f64::min) * 8.0 >= 1e9 {
        true => ("wire, Gbit/s", 1e9),
        false => ("wire, Mbit/s", 1e6),
    };
    let place = |rate: Option<f64>| rate.unwrap_or(fastest.max(1e6) * 4.0) * 8.0 / bits;
    let mut x = Axis::new(unit, points().map(|(rate, _)| place(*rate)), true);
    if points().any(|(rate, _)| rate.is_none()) {
        let limit = place(None);
        x.ticks.retain(|tick| tick.0 < limit * 0.6);
        x.ticks.push((limit, "no limit".to_owned()));
    }
    let mut methods: Vec<&str> = ways.iter().map(|way| way.method).collect();
    methods.dedup();
    let ([source, destination], of_what) = cpu(points().flat_map(|(_, series)| series.completed()));
    let time = |series: &Series<'_>| Some(series.spread(figures::TOTAL_MS)?.median / 1e3);
    let cost = |series: &Series<'_>| {
        Some(series.spread(source)?.median + series.spread(destination)?.median)
    };
    let picture = |name: &str, title: &str, of: &dyn Fn(&Series<'_>) -> Option<f64>| {
        let line = |way: &Way<'_>| Line {
            name: way.name.to_owned(),
            colour: methods
                .iter()
                .position(|other| *other == way.method)
                .unwrap_or(0),
            dashed: way.engine == Engine::Qemu,
            points: way
                .points
                .iter()
                .filter_map(|(rate, series)| Some((place(*rate), of(series)?)))
                .collect(),
        };
        let all: Vec<Line> = ways.iter().map(line).collect();
        let values = all.iter().flat_map(|line| &line.points);
        let y = Axis::new(title, values.map(|point| point.1), true);
        let title_of_all = format!("{title}, against the wire's rate");
        let picture = lines(
            &format!("{id}-{name}"),
            &title_of_all,
            &x,
            &y,
            &all,
            true,
            &[],
        );
        figure(title, &picture)
    };
    let pictures = [
        picture("time", "Total time, s", &time),
        picture(
            "cpu",
            &format!("CPU of both sides, core-s per {of_what}"),
            &cost,
        ),
    ];
    let mut rates: Vec<Option<f64>> = guest.iter().map(|condition| condition.rate()).collect();
    rates.dedup();
    let mut header = vec!["row".to_owned()];
    header.extend(rates.iter().map(|rate| rate_text(*rate)));
    let rows = ways.iter().map(|way| {
        let mut row = vec![way.name.to_owned()];
        row.extend(rates.iter().map(|rate| {
            let at = way.points.iter().find(|(other, _)| other == rate);
            match at.and_then(|(_, series)| Some((time(series)?, cost(series)?))) {
                Some((time, cost)) => format!("{time:.2} s; {cost:.2} core-s/GiB"),
                None => "-".to_owned(),
            }
        }));
        row
    });
    let dashes = match ways.iter().any(|way| way.engine == Engine::Qemu) {
        true => ". Dashed: QEMU",
        false => "",
    };
    let guest = super::group::guest(&guest[0].series[0].row);
    Some(format!(
        "<p class=\"soft\">{}</p>{}{}",
        escape(&format!("{guest}{dashes}.")),
        pictures.concat(),
        tables::details("The figures", &tables::table(&header, rows, ""))
    ))
}

/// CPU by thread, of the run in the middle of each row, over the fastest wire of each guest.
pub fn threads(conditions: &[Condition<'_>], id: &str) -> Option<String> {
    let is_fastest = |condition: &&Condition<'_>| {
        let rate = |condition: &Condition<'_>| condition.rate().unwrap_or(f64::INFINITY);
        let mut same = conditions
            .iter()
            .filter(|other| other.has_the_guest_of(condition));
        same.all(|other| rate(other) <= rate(condition))
    };
    let mut text = String::new();
    let (mut drawn, mut left_out) = (0, 0);
    for condition in conditions.iter().filter(is_fastest) {
        let mut figures = String::new();
        for series in &condition.series {
            let Some(run) = series.typical() else {
                continue;
            };
            if drawn == MOST_ROWS_OF_THREADS {
                left_out += 1;
                continue;
            }
            drawn += 1;
            let sides = [(&run.source.side, 0), (&run.destination.side, 1)];
            let all = sides.iter().flat_map(|(side, colour)| {
                let threads = side.threads.iter();
                threads.map(move |thread| (thread, *colour))
            });
            let busy = all.clone().map(|(thread, _)| thread.cpu_s);
            let most = busy.fold(0.0, f64::max);
            let (large, small): (Vec<_>, Vec<_>) =
                all.partition(|(thread, _)| thread.cpu_s >= most * SMALL_THREAD && most > 0.0);
            let large = large.into_iter();
            let mut rows: Vec<Bar> = large
                .map(|(thread, colour)| bar(&thread.name, thread.cpu_s, colour))
                .collect();
            if !small.is_empty() {
                let sum = small.iter().map(|(thread, _)| thread.cpu_s).sum();
                let others = if small.len() == 1 { "other" } else { "others" };
                rows.push(bar(&format!("{} {others}", small.len()), sum, 6));
            }
            let title = format!("CPU ms by thread: {}. {}", series.name, condition.title);
            let picture = bars(&format!("{id}-threads{drawn}"), &title, "ms", &rows, HALF);
            let counts = tables::counts(run);
            figures.push_str(&format!(
                "<figure><h4>{}</h4>{picture}{counts}</figure>",
                escape(&series.name)
            ));
        }
        if !figures.is_empty() {
            text.push_str(&format!(
                "<h3>{}</h3><div class=\"pair\">{figures}</div>",
                escape(&condition.title)
            ));
        }
    }
    if left_out > 0 {
        text.push_str(&format!(
            "<p class=\"soft\">{left_out} rows more are in runs.jsonl.</p>"
        ));
    }
    (!text.is_empty()).then(|| legend(&[("source", 0), ("destination", 1)]) + &text)
}

fn bar(name: &str, seconds: f64, colour: usize) -> Bar {
    Bar {
        name: name.to_owned(),
        parts: vec![Part {
            name: name.to_owned(),
            value: seconds * 1e3,
            colour,
        }],
        spread: None,
    }
}

/// Round by round: Hotlift's migration with the most rounds.
pub fn timeline(records: &[Record], id: &str) -> Option<String> {
    let ours = |record: &&Record| record.row.engine == Engine::Hotlift;
    let runs = records
        .iter()
        .filter(ours)
        .filter_map(|record| Some((record, record.completed()?)));
    let (record, run) = runs
        .filter(|(_, run)| run.timeline.len() > 2)
        .max_by_key(|(_, run)| (run.source.rounds, run.timeline.len()))?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let seconds = |ms: f64| ms / 1e3;
    let end = seconds(run.source.total_ms.max(run.timeline.last()?.elapsed_ms));
    // While it is set up nothing is left that was ever there.
    let set_up = |moment: &&Moment| moment.remaining_bytes == 0;
    let moments: Vec<&Moment> = run.timeline.iter().skip_while(set_up).collect();
    let of = |name: &str, colour: usize, figure: fn(&Moment) -> u64| Line {
        name: name.to_owned(),
        colour,
        dashed: false,
        points: moments
            .iter()
            .map(|moment| (seconds(moment.elapsed_ms), mib(figure(moment))))
            .collect(),
    };
    let curves = [
        of("left in the round", 0, |moment| moment.remaining_bytes),
        of("on the wire so far", 1, |moment| moment.transferred_bytes),
    ];
    let mut x = Axis::new("s since the request", std::iter::once(end), false);
    x.ends_at(end);
    let points = curves.iter().flat_map(|line| &line.points);
    let y = Axis::new("MiB", points.map(|point| point.1), false);
    let rows = run.timeline.iter().map(|moment| {
        vec![
            format!("{:.0}", moment.elapsed_ms),
            moment.status.clone(),
            moment.round.to_string(),
            format!("{:.1}", mib(moment.remaining_bytes)),
            format!("{:.1}", mib(moment.transferred_bytes)),
            format!("{:.0}", moment.bytes_per_second * 8.0 / 1e6),
            format!("{:.0}", moment.pages_per_second),
            format!("{:.0}", moment.dirty_pages_per_second),
        ]
    });
    let header = [
        "ms",
        "status",
        "round",
        "MiB left",
        "MiB sent",
        "Mbit/s",
        "pages/s",
        "dirty pages/s",
    ]
    .map(str::to_owned);
    let title = format!(
        "{}, {}, wire: {}; {}; {} rounds, {:.2} s, downtime {:.0} ms",
        record.row.method_and_level(),
        crate::table::channels(&record.row),
        rate_text(super::group::rate(&record.row)),
        super::group::guest(&record.row),
        run.source.rounds,
        run.source.total_ms / 1e3,
        run.source.downtime_ms
    );
    Some(format!(
        "<p class=\"soft\">{}</p><figure>{}</figure>{}",
        escape(&title),
        lines(
            id,
            &format!("Pages left and bytes sent over time: {title}"),
            &x,
            &y,
            &curves,
            false,
            &rounds(&moments, end)
        ),
        tables::details("The moments", &tables::table(&header, rows, ""))
    ))
}

/// From, to and name of each round, in seconds.
fn rounds(moments: &[&Moment], end: f64) -> Vec<(f64, f64, String)> {
    let mut rounds: Vec<(f64, f64, String)> = Vec::new();
    for moment in moments {
        let at = moment.elapsed_ms / 1e3;
        let name = format!("round {}", moment.round);
        match rounds.last_mut() {
            Some(last) if last.2 == name => last.1 = at,
            last => {
                let from = last.map_or(0.0, |last| {
                    last.1 = at;
                    at
                });
                rounds.push((from, at, name));
            }
        }
    }
    if let Some(last) = rounds.last_mut() {
        last.1 = end;
    }
    rounds
}
