//! Compares method `auto` with the fixed methods. The comparison is with the fastest fixed method, and with the best
//! schedule of fixed methods where the link or the cores change during a run. A schedule uses one fixed method for each
//! phase between two changes; its time is computed after the runs.

use std::collections::BTreeSet;

use super::record::{Completed, Record, Row};
use super::stats::{self, Spread, number, spread};
use super::table::{Grid, Labels, series};

/// Name of method `auto`, which selects the compression method of each packet.
pub const AUTO: &str = "auto";

/// Upper limit of the quotient auto / best fixed method for "equally fast". Repeated runs with equal settings differ by
/// as much on an idle machine.
const AS_FAST: f64 = 1.03;

/// Upper limit of the quotient auto / best fixed method for "faster".
const FASTER: f64 = 0.95;

/// The completed runs of one row with one fixed method.
struct MethodRuns<'a> {
    /// The method and the level: "zstd 3".
    name: String,
    runs: Vec<(&'a Record, &'a Completed)>,
}

/// Rows that differ only in their method.
struct Comparison<'a> {
    /// The row of one of the compared runs.
    row: Row,
    fixed: Vec<MethodRuns<'a>>,
    auto: Option<MethodRuns<'a>>,
}

impl<'a> MethodRuns<'a> {
    /// Median of the total time, in seconds.
    fn seconds(&self) -> Option<f64> {
        Some(spread(self.runs.iter().map(|(_, run)| run.source.total_ms))?.median / 1e3)
    }

    /// Returns this method's run with the same repeat number as `record`; `None` if that run did not complete.
    fn run_with_same_repeat(&self, record: &Record) -> Option<&'a Completed> {
        let same = |run: &Record| run.repeat == record.repeat && run.series == record.series;
        let (_, run) = self.runs.iter().find(|(run, _)| same(run))?;
        Some(run)
    }
}

/// Returns the comparisons in `records` that have at least two fixed methods.
fn comparisons(records: &[Record]) -> Vec<Comparison<'_>> {
    let mut all: Vec<(String, Comparison<'_>)> = Vec::new();
    for (row, who) in series(records) {
        let runs = records
            .iter()
            .filter(|run| run.row == row && run.program_name() == who);
        let way = MethodRuns {
            name: row.method_and_level(),
            runs: runs
                .filter_map(|run| Some((run, run.completed()?)))
                .collect(),
        };
        if way.runs.is_empty() {
            continue;
        }
        let is_it = |(whose, comparison): &(String, Comparison<'_>)| {
            let other = &comparison.row;
            let how = |row: &Row| {
                (
                    row.channels,
                    row.zero_page_detection.clone(),
                    row.options.clone(),
                )
            };
            *whose == who && other.is_comparable(&row) && how(other) == how(&row)
        };
        let place = all.iter().position(is_it).unwrap_or_else(|| {
            let empty = Comparison {
                row: row.clone(),
                fixed: Vec::new(),
                auto: None,
            };
            all.push((who.clone(), empty));
            all.len() - 1
        });
        let comparison = &mut all[place].1;
        match row.method == AUTO {
            true => comparison.auto = Some(way),
            false => comparison.fixed.push(way),
        }
    }
    let all = all.into_iter().map(|(_, comparison)| comparison);
    all.filter(|comparison| comparison.fixed.len() > 1)
        .collect()
}

impl Comparison<'_> {
    /// Returns the fixed method with the lowest median of total times, and that median in seconds; `None` without runs.
    fn best(&self) -> Option<(&MethodRuns<'_>, f64)> {
        let all = self
            .fixed
            .iter()
            .filter_map(|way| Some((way, way.seconds()?)));
        all.min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Returns the spread of the quotient auto / best fixed method, of total times of runs with the same repeat number.
    fn by_best(&self) -> Option<Spread> {
        let (best, _) = self.best()?;
        let runs = self.auto.iter().flat_map(|auto| &auto.runs);
        spread(runs.filter_map(|(record, run)| {
            Some(run.source.total_ms / best.run_with_same_repeat(record)?.source.total_ms)
        }))
    }

    /// Returns the spread of the best schedule's total time, in seconds; `None` if nothing changes during the run.
    fn schedule(&self) -> Option<Spread> {
        let turns = self.fixed.first().into_iter().flat_map(|way| &way.runs);
        spread(turns.filter_map(|(record, _)| Some(self.schedule_of(record)? / 1e3)))
    }

    /// Returns the spread of the quotient auto / best schedule, of total times of runs with the same repeat number.
    fn by_schedule(&self) -> Option<Spread> {
        let runs = self.auto.iter().flat_map(|auto| &auto.runs);
        spread(
            runs.filter_map(|(record, run)| Some(run.source.total_ms / self.schedule_of(record)?)),
        )
    }

    /// Returns the total time in ms of the best schedule, computed from fixed runs with the repeat number of `record`.
    fn schedule_of(&self, record: &Record) -> Option<f64> {
        let starts = phases(&self.row)?;
        let runs = self
            .fixed
            .iter()
            .filter_map(|way| way.run_with_same_repeat(record));
        best_schedule(&starts, &runs.collect::<Vec<_>>())
    }
}

/// Returns 0 and the times in ms at which link or cores change; `None` if nothing changes.
fn phases(row: &Row) -> Option<Vec<f64>> {
    let link = row.link();
    let rates = link
        .iter()
        .flat_map(|link| link.changes())
        .map(|(at, _)| *at);
    let neighbour = row.neighbour.as_ref();
    let neighbour = neighbour.and_then(|at| humantime::parse_duration(at).ok());
    let changes: BTreeSet<_> = rates.chain(neighbour).collect();
    let starts = std::iter::once(0.0).chain(changes.iter().map(|at| at.as_secs_f64() * 1e3));
    (!changes.is_empty()).then(|| starts.collect())
}

/// Returns the total time in ms of the best schedule of fixed methods; `None` without runs.
///
/// In the schedule, each phase begins at one of `starts` and uses the method that settles pages fastest in that phase.
/// A page is settled when it was sent with content or as a zero page. `runs` has one run per method, over the same
/// link.
///
/// Progress of a run is a share of that run's own pages. Every run takes at least as long as the schedule, and contains
/// all phases that the schedule needs.
fn best_schedule(starts: &[f64], runs: &[&Completed]) -> Option<f64> {
    if runs.is_empty() {
        return None;
    }
    let mut left = 1.0;
    for (i, &start) in starts.iter().enumerate() {
        let end = starts.get(i + 1).copied().unwrap_or(f64::INFINITY);
        let rates = runs.iter().filter_map(|run| {
            let end = end.min(run.source.total_ms);
            (end > start).then(|| (settled(run, end) - settled(run, start)) / (end - start))
        });
        let rate = rates.fold(0.0, f64::max);
        if rate <= 0.0 {
            continue;
        }
        if rate * (end - start) >= left {
            return Some(start + left / rate);
        }
        left -= rate * (end - start);
    }
    // Rounding left a small remainder.
    let totals = runs.iter().map(|run| run.source.total_ms);
    Some(totals.fold(f64::INFINITY, f64::min))
}

/// Returns the share (0 to 1) of the run's pages that were settled `ms` milliseconds after its start. Settled pages
/// were sent with content or as zero pages.
fn settled(run: &Completed, ms: f64) -> f64 {
    let all = (run.source.normal_pages + run.source.zero_pages) as f64;
    let (mut at, mut pages) = (0.0, 0.0);
    for moment in &run.timeline {
        let after = pages + moment.pages_per_second * (moment.elapsed_ms - at).max(0.0) / 1e3;
        if moment.elapsed_ms >= ms {
            return between((at, pages), (moment.elapsed_ms, after), ms) / all;
        }
        (at, pages) = (moment.elapsed_ms.max(at), after.min(all));
    }
    (between((at, pages), (run.source.total_ms, all), ms) / all).min(1.0)
}

/// Returns the value at `x` on the line through two points.
fn between((x0, y0): (f64, f64), (x1, y1): (f64, f64), x: f64) -> f64 {
    match x1 > x0 {
        true => y0 + (y1 - y0) * (x - x0) / (x1 - x0),
        false => y1,
    }
}

/// Returns the comparisons for which the quotient exists, each with the median of the quotient.
fn by<'c, 'a>(
    all: &'c [Comparison<'a>],
    quotient: fn(&Comparison<'a>) -> Option<Spread>,
) -> Vec<(f64, &'c Comparison<'a>)> {
    let one = |one: &'c Comparison<'a>| Some((quotient(one)?.median, one));
    all.iter().filter_map(one).collect()
}

/// Returns the conclusions from the comparisons, a sentence each; none if no run used `auto`.
pub fn conclusions(records: &[Record]) -> Vec<String> {
    let all = comparisons(records);
    let labels = labels(&all);
    let by_best = by(&all, Comparison::by_best);
    let by_schedule = by(&all, Comparison::by_schedule);
    let worst = |quotients: &[(f64, &Comparison<'_>)]| {
        let (quotient, one) = quotients.iter().max_by(|a, b| a.0.total_cmp(&b.0))?;
        let best = one.best().map_or("", |(way, _)| way.name.as_str());
        let place = labels.circumstances(&one.row);
        Some(format!(
            "the worst is {}, {place}, where {best} is the best",
            number(*quotient)
        ))
    };
    let number_of = |is: fn(f64) -> bool| by_best.iter().filter(|one| is(one.0)).count();
    let best = worst(&by_best).map(|worst| {
        format!(
            "{AUTO} takes at most {AS_FAST} of the best fixed method's time in {} of {} cells, and less than {FASTER} in {}; \
             {worst}",
            number_of(|quotient| quotient <= AS_FAST),
            by_best.len(),
            number_of(|quotient| quotient < FASTER),
        )
    });
    let schedule = worst(&by_schedule).map(|worst| {
        let text = stats::text(by_schedule.iter().map(|one| one.0));
        format!(
            "where link or cores change on the way, {AUTO} takes {text} of the best schedule of fixed methods afterwards; {worst}"
        )
    });
    best.into_iter().chain(schedule).collect()
}

/// Returns the comparisons in `records` as a table; it has no rows without comparisons.
pub fn table(records: &[Record]) -> Grid {
    let all = comparisons(records);
    let labels = labels(&all);
    let mut methods: Vec<&str> = Vec::new();
    for way in all.iter().flat_map(|one| &one.fixed) {
        if !methods.contains(&way.name.as_str()) {
            methods.push(&way.name);
        }
    }
    let others = [
        AUTO,
        "best fixed",
        "auto / best",
        "schedule",
        "auto / schedule",
    ];
    let header = std::iter::once("")
        .chain(methods.iter().copied())
        .chain(others);
    let mut table = Grid::new(header, 0);
    let seconds = |way: Option<&MethodRuns<'_>>| {
        way.and_then(MethodRuns::seconds)
            .map_or("-".to_owned(), number)
    };
    let text = |spread: Option<Spread>| spread.map_or("-".to_owned(), |spread| spread.text());
    for one in &all {
        let mut row = vec![labels.circumstances(&one.row)];
        let of = |name: &&str| seconds(one.fixed.iter().find(|way| way.name == **name));
        row.extend(methods.iter().map(of));
        row.push(seconds(one.auto.as_ref()));
        row.push(
            one.best()
                .map_or("-".to_owned(), |(way, _)| way.name.clone()),
        );
        row.extend([one.by_best(), one.schedule(), one.by_schedule()].map(text));
        table.rows.push(row);
    }
    table
}

fn labels(all: &[Comparison<'_>]) -> Labels {
    let rows: Vec<Row> = all.iter().map(|one| one.row.clone()).collect();
    Labels::of(&rows)
}

#[cfg(test)]
pub mod tests {
    use hotlift_command::events::ProgressSnapshot;

    use super::*;
    use crate::record::{Outcome, tests::example};

    /// Returns a run that settles 1000 pages. `rates` has pairs: a time in ms, and the pages per second from that time
    /// on.
    fn run(rates: &[(f64, f64)]) -> Completed {
        let mut run = Completed::default();
        run.source.normal_pages = 1000;
        let (mut at, mut pages) = (0.0, 0.0);
        while pages < 1000.0 {
            let (_, rate) = rates.iter().rfind(|(from, _)| *from <= at).unwrap();
            at += 100.0;
            pages += rate / 10.0;
            run.timeline.push(ProgressSnapshot {
                elapsed_ms: at,
                status: "active".to_owned(),
                round: 1,
                remaining_bytes: 0,
                transferred_bytes: 0,
                bytes_per_second: 0.0,
                pages_per_second: *rate,
                dirty_pages_per_second: 0.0,
            });
        }
        run.source.total_ms = at;
        run
    }

    fn record(method: &str, link: &str, repeat: u32, run: Completed) -> Record {
        let mut record = example();
        record.repeat = repeat;
        record.row.method = method.to_owned();
        record.row.level = None;
        record.row.link = Some(link.to_owned());
        record.outcome = Outcome::Completed(Box::new(run));
        record
    }

    #[test]
    fn the_best_schedule_uses_the_fastest_method_of_each_phase() {
        // One method is fast until 1 s, the other after it: 400 pages, and 600 at 300 a second.
        let (one, other) = (
            run(&[(0.0, 400.0), (1000.0, 100.0)]),
            run(&[(0.0, 100.0), (1000.0, 300.0)]),
        );
        let of = |starts: &[f64], runs: &[&Completed]| best_schedule(starts, runs).unwrap();
        assert!((of(&[0.0, 1000.0], &[&one, &other]) - 3000.0).abs() < 1.0);
        // The schedule of a single method takes as long as its run; between two moments the count is interpolated.
        assert!((of(&[0.0, 1050.0], &[&one]) - one.source.total_ms).abs() < 1.0);
        // A phase after the end changes nothing.
        assert!((of(&[0.0, 1000.0, 60_000.0], &[&one, &other]) - 3000.0).abs() < 1.0);
        assert!(best_schedule(&[0.0], &[]).is_none());
    }

    #[test]
    fn phases_follow_changes_of_the_link_and_of_the_neighbour_load() {
        let mut row = example().row;
        assert_eq!(phases(&row), None);
        row.neighbour = Some("2s".to_owned());
        assert_eq!(phases(&row), Some(vec![0.0, 2000.0]));
        row.link = Some("1gbit,200mbit@500ms,1gbit@2s".to_owned());
        assert_eq!(phases(&row), Some(vec![0.0, 500.0, 2000.0]));
    }

    /// Returns records of two links: `auto` is as fast as the best method over one link, and slower over the other
    /// link.
    pub fn records() -> Vec<Record> {
        let steady = |rate| run(&[(0.0, rate)]);
        let mut records = Vec::new();
        for repeat in 1..=2 {
            for (method, slow, fast) in [
                ("none", 100.0, 1000.0),
                ("zstd", 200.0, 500.0),
                (AUTO, 200.0, 800.0),
            ] {
                records.push(record(method, "1gbit", repeat, steady(slow)));
                records.push(record(method, "10gbit", repeat, steady(fast)));
            }
        }
        records
    }

    #[test]
    fn auto_is_compared_with_the_best_fixed_method_of_each_cell() {
        let records = records();
        let lines = conclusions(&records);
        assert_eq!(lines.len(), 1, "nothing changes on the way: {lines:?}");
        for words in [
            "in 1 of 2 cells",
            "less than 0.95 in 0",
            "the worst is 1.30, link 10gbit, where none is",
        ] {
            assert!(lines[0].contains(words), "no {words} in {lines:?}");
        }
        let table = table(&records);
        assert_eq!(table.header[1..4], ["none", "zstd", AUTO]);
        assert_eq!(
            table.rows[0],
            [
                "link 1gbit",
                "10.0",
                "5.00",
                "5.00",
                "zstd",
                "1.00",
                "-",
                "-"
            ]
        );
        let fixed: Vec<Record> = records
            .into_iter()
            .filter(|run| run.row.method != AUTO)
            .collect();
        assert!(conclusions(&fixed).is_empty());
    }

    #[test]
    fn cells_with_changes_are_compared_with_the_best_schedule() {
        let link = "1gbit,10gbit@1s";
        let records = [
            record("zstd", link, 1, run(&[(0.0, 400.0), (1000.0, 100.0)])),
            record("none", link, 1, run(&[(0.0, 100.0), (1000.0, 300.0)])),
            record(AUTO, link, 1, run(&[(0.0, 400.0), (1000.0, 200.0)])),
        ];
        let lines = conclusions(&records);
        // 4 s instead of 3.
        assert!(
            lines[1].contains("takes 1.33 of the best schedule"),
            "{lines:?}"
        );
        assert_eq!(table(&records).rows[0][6..], ["3.00", "1.33"]);
    }
}
