//! The table of a matrix: a line a row, and Hotlift beside QEMU.

use super::record::{Completed, Engine, Outcome, Record, Row};
use super::stats;
use crate::progress::bytes;
use crate::report::{align, new_table};

/// Names rows by what tells them apart.
pub struct Labels {
    differs: Vec<bool>,
}

impl Labels {
    /// For rows that stand together.
    pub fn of(rows: &[Row]) -> Self {
        let parts: Vec<Vec<Option<String>>> = rows.iter().map(parts).collect();
        let differs = (0..parts.first().map_or(0, Vec::len))
            .map(|part| {
                let mut said = parts.iter().filter_map(|row| row[part].as_ref());
                said.next()
                    .is_some_and(|first| said.any(|other| other != first))
            })
            .collect();
        Self { differs }
    }

    /// The name of one of them: its method, and all that is not the same everywhere.
    pub fn text(&self, row: &Row) -> String {
        let mut words = vec![row.method_and_level()];
        if row.engine == Engine::Qemu {
            words.insert(0, "QEMU".to_owned());
        }
        let parts = parts(row).into_iter().zip(&self.differs);
        words.extend(
            parts.filter_map(|(part, differs)| part.filter(|part| *differs && !part.is_empty())),
        );
        words.join(" ")
    }
}

/// What may tell a row apart, beside engine, method and level; `None` where it means nothing.
fn parts(row: &Row) -> Vec<Option<String>> {
    let guest = &row.guest;
    let options: Vec<_> = row
        .options
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let bandwidth = match row.max_bandwidth {
        0 => "unlimited".to_owned(),
        limit => format!("{}/s", bytes(limit)),
    };
    let link = row.link.as_ref().map(|link| format!("link {link}"));
    let touched = match guest.zero_touched {
        true => "zero pages written once",
        false => "",
    };
    let writes = guest.workload != "idle";
    vec![
        format!("{} ch", row.channels),
        format!("zero pages: {}", row.zero_page_detection),
        bandwidth,
        link.unwrap_or_default(),
        guest.kind.clone(),
        format!("{} vCPU", guest.vcpus),
        bytes(guest.ram_bytes),
        guest.fill.clone(),
        format!("{:.0} % zero", guest.zero_share * 100.0),
        touched.to_owned(),
        guest.workload.clone(),
        options.join(" "),
    ]
    .into_iter()
    .map(Some)
    .chain([
        writes.then(|| format!("{} pages/s", guest.rate)),
        writes.then(|| format!("in {}", bytes(guest.working_set))),
    ])
    .collect()
}

/// A column: its name, what it shows, and whether a quotient of it means something.
type Column = (&'static str, fn(&Completed) -> f64, bool);

const COLUMNS: &[Column] = &[
    ("total ms", |run| run.source.total_ms, true),
    ("down ms", |run| run.source.downtime_ms, true),
    ("Mbit/s", |run| run.source.throughput_mbps, false),
    ("pages/s", |run| run.source.pages_per_second, false),
    ("ratio", |run| run.source.ratio, true),
    ("core-s/GiB src", |run| run.source.side.core_s_per_gib, true),
    (
        "core-s/GiB dst",
        |run| run.destination.side.core_s_per_gib,
        true,
    ),
];

/// The table of `records`: median (lowest–highest) a row.
pub fn matrix(records: &[Record]) -> String {
    let rows = rows(records);
    let labels = Labels::of(&rows);
    let mut header = vec!["", "runs"];
    header.extend(COLUMNS.iter().map(|(name, ..)| *name));
    header.push("verified");
    let mut table = new_table(&header);
    for row in &rows {
        let runs: Vec<&Record> = records.iter().filter(|run| run.row == *row).collect();
        let completed: Vec<&Completed> = runs.iter().filter_map(|run| run.completed()).collect();
        let mut line = vec![labels.text(row), completed.len().to_string()];
        line.extend(
            COLUMNS
                .iter()
                .map(|(_, figure, _)| stats::text(completed.iter().map(|run| figure(run)))),
        );
        line.push(verified(&runs));
        table.add_row(line);
        if row.engine == Engine::Hotlift
            && let Some(theirs) = rows.iter().find(|other| is_the_same_work(row, other))
        {
            let pairs = pairs(records, row, theirs);
            let mut line = vec!["  Hotlift / QEMU".to_owned(), pairs.len().to_string()];
            line.extend(COLUMNS.iter().map(|(_, figure, divide)| {
                if *divide {
                    quotient(&pairs, figure)
                } else {
                    String::new()
                }
            }));
            line.push(String::new());
            table.add_row(line);
        }
    }
    align(&mut table);
    format!("median (lowest–highest)\n{table}")
}

/// Rows of `records`, sorted.
fn rows(records: &[Record]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for record in records {
        if !rows.contains(&record.row) {
            rows.push(record.row.clone());
        }
    }
    // The order of the runs was random.
    let key = |row: &Row| {
        (
            row.guest.workload.clone(),
            row.guest.fill.clone(),
            row.max_bandwidth,
            row.channels,
            row.method.clone(),
            row.level,
            row.engine == Engine::Qemu,
        )
    };
    rows.sort_by_key(key);
    rows
}

/// True if `theirs` is what QEMU did of the work of `ours`.
pub fn is_the_same_work(ours: &Row, theirs: &Row) -> bool {
    let mut same = theirs.clone();
    same.engine = ours.engine;
    same.guest.kind.clone_from(&ours.guest.kind);
    theirs.engine == Engine::Qemu && same == *ours
}

/// Runs of the two rows with the same repeat: neighbours in time.
pub fn pairs<'a>(
    records: impl IntoIterator<Item = &'a Record>,
    ours: &Row,
    theirs: &Row,
) -> Vec<(&'a Completed, &'a Completed)> {
    let records: Vec<&Record> = records.into_iter().collect();
    let of_ours = records.iter().filter(|run| run.row == *ours);
    of_ours
        .filter_map(|run| {
            let other = records.iter().find(|other| {
                other.row == *theirs && other.repeat == run.repeat && other.series == run.series
            })?;
            Some((run.completed()?, other.completed()?))
        })
        .collect()
}

/// The spread of a figure's quotients, Hotlift by QEMU.
pub fn quotient(pairs: &[(&Completed, &Completed)], figure: &fn(&Completed) -> f64) -> String {
    stats::text(
        pairs
            .iter()
            .map(|(ours, theirs)| figure(ours) / figure(theirs)),
    )
}

fn verified(runs: &[&Record]) -> String {
    let said: Vec<&str> = runs
        .iter()
        .map(|run| match &run.outcome {
            Outcome::Completed(completed) => match completed.verified {
                Some(true) => "yes",
                Some(false) => "NO",
                None => "-",
            },
            Outcome::Failed { .. } => "failed",
            Outcome::Skipped { .. } => "skipped",
        })
        .collect();
    match said.iter().find(|word| **word != "yes") {
        None => "yes".to_owned(),
        Some(worst) if said.iter().all(|word| word == worst) => (*worst).to_owned(),
        Some(worst) => {
            let number = said.iter().filter(|word| *word == worst).count();
            format!("{number} {worst}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::example;
    use super::*;

    fn run(engine: Engine, repeat: u32, total_ms: f64) -> Record {
        let mut record = example();
        record.row.engine = engine;
        record.repeat = repeat;
        let mut completed = Completed {
            verified: Some(true),
            ..Completed::default()
        };
        completed.source.total_ms = total_ms;
        record.outcome = Outcome::Completed(Box::new(completed));
        record
    }

    #[test]
    fn a_label_says_all_that_differs_and_no_rate_of_an_idle_guest() {
        let row = example().row;
        let other = |change: fn(&mut Row)| {
            let mut other = row.clone();
            change(&mut other);
            let rows = [row.clone(), other.clone()];
            Labels::of(&rows).text(&other)
        };
        let link = other(|row| row.link = Some("1gbit".to_owned()));
        assert!(link.contains("link 1gbit"), "{link}");
        let touched = other(|row| row.guest.zero_touched = !row.guest.zero_touched);
        assert!(touched.contains("written once") != row.guest.zero_touched);
        let mut rows = [(); 3].map(|()| row.clone());
        for (row, (workload, rate)) in
            rows.iter_mut()
                .zip([("random", 7), ("random", 8), ("idle", 0)])
        {
            row.guest.workload = workload.to_owned();
            row.guest.rate = rate;
        }
        let texts = rows.each_ref().map(|row| Labels::of(&rows).text(row));
        assert!(texts[1].contains("8 pages/s") && !texts[2].contains("pages/s"));
        let texts = Labels::of(&rows[1..]).text(&rows[1]);
        assert!(
            !texts.contains("pages/s"),
            "the only one that writes: {texts}"
        );
    }

    #[test]
    fn rows_have_medians_and_quotients_of_runs_with_the_same_repeat() {
        let mut runs = vec![
            run(Engine::Hotlift, 1, 100.0),
            run(Engine::Qemu, 1, 200.0),
            run(Engine::Hotlift, 2, 300.0),
            run(Engine::Qemu, 2, 300.0),
        ];
        let mut failed = run(Engine::Qemu, 3, 0.0);
        failed.outcome = Outcome::Failed {
            error: "no".to_owned(),
        };
        runs.push(failed);
        let text = matrix(&runs);
        for words in [
            "200 (100–300)",
            "250 (200–300)",
            "0.75 (0.50–1.00)",
            "1 failed",
        ] {
            assert!(text.contains(words), "no {words} in\n{text}");
        }
        assert!(!text.contains("2 ch"), "the same everywhere:\n{text}");
    }
}
