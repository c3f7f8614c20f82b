//! The pictures of a report, each with the table that it was drawn from.

use super::group::{Condition, Series, rate, rate_text};
use super::svg::{Axis, Bar, Line, Part, bands, bars, escape, legend, lines};
use super::tables;
use crate::bench::record::{Completed, Engine};

/// Most rows whose threads are drawn.
const MOST_ROWS_OF_THREADS: usize = 12;

/// Threads of less than this share of the busiest are put together.
const SMALL_THREAD: f64 = 0.01;

const TOTAL_S: fn(&Completed) -> f64 = |run| run.source.total_ms / 1e3;
const DOWNTIME_MS: fn(&Completed) -> f64 = |run| run.source.downtime_ms;
const CORE_S_PER_GIB: fn(&Completed) -> f64 =
    |run| run.source.side.core_s_per_gib + run.destination.side.core_s_per_gib;

/// Total time, downtime and CPU of one condition.
pub fn condition(condition: &Condition<'_>, id: &str) -> String {
    let of = |figure: fn(&Completed) -> f64| -> Vec<Bar> {
        let series = condition.series.iter().enumerate();
        series
            .filter_map(|(i, series)| {
                let spread = series.spread(figure)?;
                Some(Bar {
                    name: series.name(),
                    parts: vec![Part {
                        name: series.name(),
                        value: spread.median,
                        colour: engine_colour(series, i),
                    }],
                    spread: Some((spread.lowest, spread.highest)),
                })
            })
            .collect()
    };
    let cpu: Vec<Bar> = condition
        .series
        .iter()
        .filter_map(|series| {
            let source = series.spread(|run| run.source.side.core_s_per_gib)?;
            let destination = series.spread(|run| run.destination.side.core_s_per_gib)?;
            let sides = [
                ("source", source.median, 0),
                ("destination", destination.median, 1),
            ];
            Some(Bar {
                name: series.name(),
                parts: sides
                    .map(|(name, value, colour)| Part {
                        name: format!("{}, {name}", series.name()),
                        value,
                        colour,
                    })
                    .into(),
                spread: None,
            })
        })
        .collect();
    if cpu.is_empty() {
        return tables::problems(&condition.series);
    }
    let figure = |caption: &str, picture: String| {
        format!("<figure><h3>{}</h3>{picture}</figure>", escape(caption))
    };
    format!(
        "{}{}{}{}{}",
        figure(
            "Total time, s",
            bars(
                &format!("{id}-total"),
                "Total time by row",
                "s",
                &of(TOTAL_S)
            )
        ),
        figure(
            "Downtime, ms",
            bars(
                &format!("{id}-down"),
                "Downtime by row",
                "ms",
                &of(DOWNTIME_MS)
            )
        ),
        figure(
            "CPU per GiB of pages with content, core-s",
            legend(&[("source", 0), ("destination", 1)])
                + &bars(
                    &format!("{id}-cpu"),
                    "CPU seconds per GiB by row",
                    "core-s/GiB",
                    &cpu
                )
        ),
        tables::details("The figures", &tables::figures(&condition.series)),
        tables::problems(&condition.series),
    )
}

/// QEMU's rows in one colour, ours in another.
fn engine_colour(series: &Series<'_>, _: usize) -> usize {
    match series.row.engine {
        Engine::Hotlift => 0,
        Engine::Qemu => 6,
    }
}

/// Series that differ from each other in the wire's rate alone: the lines of the crossover.
struct OverRates<'a> {
    name: String,
    guest: String,
    points: Vec<(Option<f64>, &'a Series<'a>)>,
}

fn over_rates<'a>(conditions: &'a [Condition<'a>]) -> Vec<OverRates<'a>> {
    let mut all: Vec<OverRates<'_>> = Vec::new();
    for series in conditions.iter().flat_map(|condition| &condition.series) {
        if series.runs.is_empty() {
            continue;
        }
        let options: Vec<_> = series.row.options.iter().collect();
        let guest = format!("{:?} {options:?}", series.row.guest);
        let name = series.name();
        let point = (rate(series.row), series);
        match all
            .iter_mut()
            .find(|line| line.name == name && line.guest == guest)
        {
            Some(line) => line.points.push(point),
            None => all.push(OverRates {
                name,
                guest,
                points: vec![point],
            }),
        }
    }
    let by_rate = |rate: Option<f64>| rate.unwrap_or(f64::INFINITY);
    for line in &mut all {
        line.points
            .sort_by(|a, b| by_rate(a.0).total_cmp(&by_rate(b.0)));
    }
    all.retain(|line| line.points.len() > 1);
    all
}

/// Total time and CPU against the wire's rate; `None` if nothing ran at two rates.
pub fn crossover(conditions: &[Condition<'_>]) -> Option<String> {
    let all = over_rates(conditions);
    let mut guests: Vec<&String> = all.iter().map(|line| &line.guest).collect();
    guests.dedup();
    let mut text = String::new();
    for (i, guest) in guests.into_iter().enumerate() {
        let mine: Vec<_> = all.iter().filter(|line| line.guest == *guest).collect();
        text.push_str(&crossover_of(&mine, i));
    }
    (!text.is_empty()).then_some(text)
}

fn crossover_of(all: &[&OverRates<'_>], number: usize) -> String {
    let points = || all.iter().flat_map(|line| &line.points);
    let fastest = points().filter_map(|(rate, _)| *rate).fold(0.0, f64::max);
    // A wire without limit stands to the right of all others.
    let place = |rate: Option<f64>| rate.unwrap_or(fastest.max(1e6) * 4.0) * 8.0 / 1e6;
    let mut x = Axis::new("wire, Mbit/s", points().map(|(rate, _)| place(*rate)), true);
    if points().any(|(rate, _)| rate.is_none()) {
        let limit = place(None);
        x.ticks.retain(|tick| tick.0 < limit * 0.6);
        x.ticks.push((limit, "no limit".to_owned()));
    }
    let of = |figure: fn(&Completed) -> f64| -> Vec<Line> {
        let line = |line: &&OverRates<'_>| Line {
            name: line.name.clone(),
            points: line
                .points
                .iter()
                .filter_map(|(rate, series)| Some((place(*rate), series.spread(figure)?.median)))
                .collect(),
        };
        all.iter().map(line).collect()
    };
    let picture = |id: &str, title: &str, figure: fn(&Completed) -> f64| {
        let all = of(figure);
        let y = Axis::new(
            title,
            all.iter()
                .flat_map(|line| &line.points)
                .map(|point| point.1),
            true,
        );
        format!(
            "<figure><h3>{}</h3>{}</figure>",
            escape(title),
            lines(
                &format!("{id}-{number}"),
                &format!("{title}, against the wire's rate"),
                &x,
                &y,
                &all,
                true,
                ""
            )
        )
    };
    let mut rates: Vec<Option<f64>> = points().map(|(rate, _)| *rate).collect();
    rates.sort_by(|a, b| place(*a).total_cmp(&place(*b)));
    rates.dedup();
    let mut header = vec!["row".to_owned()];
    header.extend(rates.iter().map(|rate| rate_text(*rate)));
    let rows = all.iter().map(|line| {
        let mut row = vec![line.name.clone()];
        row.extend(rates.iter().map(|rate| {
            let at = line.points.iter().find(|(other, _)| other == rate);
            let text = |figure| at.and_then(|(_, series)| series.spread(figure));
            match (text(TOTAL_S), text(CORE_S_PER_GIB)) {
                (Some(time), Some(cpu)) => format!("{} s; {} core-s/GiB", time.text(), cpu.text()),
                _ => "-".to_owned(),
            }
        }));
        row
    });
    let guest = all.first().and_then(|line| line.points.first());
    let guest = guest.map_or(String::new(), |(_, series)| super::group::guest(series.row));
    format!(
        "<p class=\"soft\">{}</p>{}{}{}",
        escape(&guest),
        picture("cross-time", "Total time, s", TOTAL_S),
        picture(
            "cross-cpu",
            "Both sides' CPU, core-s per GiB",
            CORE_S_PER_GIB
        ),
        tables::details("The figures", &tables::table(&header, rows, ""))
    )
}

/// CPU by thread, of the run in the middle of each row.
pub fn threads(conditions: &[Condition<'_>]) -> Option<String> {
    let series = conditions.iter().flat_map(|condition| {
        condition
            .series
            .iter()
            .map(move |series| (condition, series))
    });
    let mut text = String::new();
    for (i, (condition, series)) in series
        .filter(|(_, series)| !series.runs.is_empty())
        .take(MOST_ROWS_OF_THREADS)
        .enumerate()
    {
        let Some(run) = series.typical() else {
            continue;
        };
        let sides = [(&run.source.side, 0), (&run.destination.side, 1)];
        let all = sides
            .iter()
            .flat_map(|(side, colour)| side.threads.iter().map(move |thread| (thread, *colour)));
        let most = all
            .clone()
            .map(|(thread, _)| thread.cpu_s)
            .fold(0.0, f64::max);
        let (large, small): (Vec<_>, Vec<_>) =
            all.partition(|(thread, _)| thread.cpu_s >= most * SMALL_THREAD && most > 0.0);
        let mut rows: Vec<Bar> = large
            .into_iter()
            .map(|(thread, colour)| bar(&thread.name, thread.cpu_s, colour))
            .collect();
        if !small.is_empty() {
            let sum = small.iter().map(|(thread, _)| thread.cpu_s).sum();
            rows.push(bar(&format!("{} others", small.len()), sum, 6));
        }
        if rows.is_empty() {
            continue;
        }
        let title = format!(
            "{}. {}. {}",
            series.name(),
            condition.title,
            condition.guest
        );
        text.push_str(&format!(
            "<figure><h3>{}</h3>{}</figure>",
            escape(&title),
            bars(
                &format!("threads-{i}"),
                &format!("CPU seconds by thread: {title}"),
                "s",
                &rows
            )
        ));
    }
    (!text.is_empty()).then(|| legend(&[("source", 0), ("destination", 1)]) + &text)
}

fn bar(name: &str, seconds: f64, colour: usize) -> Bar {
    Bar {
        name: name.to_owned(),
        parts: vec![Part {
            name: name.to_owned(),
            value: seconds,
            colour,
        }],
        spread: None,
    }
}

/// Round by round: the migration with the most rounds.
pub fn timeline(conditions: &[Condition<'_>]) -> Option<String> {
    let all = conditions.iter().flat_map(|condition| &condition.series);
    let runs = all.flat_map(|series| series.runs.iter().map(move |run| (series, run)));
    let (series, run) = runs
        .filter_map(|(series, run)| Some((series, run.completed()?)))
        .filter(|(_, run)| run.timeline.len() > 2)
        .max_by_key(|(_, run)| (run.source.rounds, run.timeline.len()))?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let seconds = |ms: f64| ms / 1e3;
    let end = seconds(run.source.total_ms.max(run.timeline.last()?.elapsed_ms));
    let of = |name: &str, figure: fn(&crate::bench::record::Moment) -> u64| Line {
        name: name.to_owned(),
        points: run
            .timeline
            .iter()
            .map(|moment| (seconds(moment.elapsed_ms), mib(figure(moment))))
            .collect(),
    };
    let curves = [
        of("left in the round", |moment| moment.remaining_bytes),
        of("on the wire so far", |moment| moment.transferred_bytes),
    ];
    let x = Axis::new("s since the request", [end].into_iter(), false);
    let y = Axis::new(
        "MiB",
        curves
            .iter()
            .flat_map(|line| &line.points)
            .map(|point| point.1),
        false,
    );
    let mut rounds: Vec<(f64, f64, String)> = Vec::new();
    for moment in &run.timeline {
        let at = seconds(moment.elapsed_ms);
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
        "{}, wire: {}; {} rounds, {:.2} s, downtime {:.0} ms",
        series.name(),
        rate_text(rate(series.row)),
        run.source.rounds,
        run.source.total_ms / 1e3,
        run.source.downtime_ms
    );
    Some(format!(
        "<p class=\"soft\">{}</p><figure>{}</figure>{}",
        escape(&title),
        lines(
            "timeline",
            &format!("Pages left and bytes sent over time: {title}"),
            &x,
            &y,
            &curves,
            false,
            &bands(&x, &rounds)
        ),
        tables::details("The moments", &tables::table(&header, rows, ""))
    ))
}
