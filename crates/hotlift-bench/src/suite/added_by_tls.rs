//! Cost of TLS: figures of runs over TLS minus figures of the same runs without TLS. The cost of the cipher alone is
//! shown beside it.

use crate::certificates::{OPTION, wants_row};
use crate::figures::{DESTINATION_CPU, SOURCE_CPU, both_cpu};
use crate::record::{Completed, Record, Row};
use crate::stats;
use crate::table::{Grid, series};

/// Runs of one row over TLS, each with the run without TLS of the same repeat number.
type Pairs<'a> = [(&'a Record, &'a Completed, &'a Completed)];

/// Computes a figure of a pair of runs, with and without TLS; NaN where the figure has no meaning.
type Figure = fn(&Record, &Completed, &Completed) -> f64;

/// Columns of the table: heading and figure.
const COLUMNS: &[(&str, Figure)] = &[
    ("total ms", |_, with, without| {
        with.source.total_ms - without.source.total_ms
    }),
    ("total, times", |_, with, without| {
        with.source.total_ms / without.source.total_ms
    }),
    ("core-s/GiB, times", |_, with, without| {
        of(both_cpu, with) / of(both_cpu, without)
    }),
    ("core-s/GiB src", |_, with, without| {
        more(SOURCE_CPU.of, with, without)
    }),
    ("cipher src", |run, _, _| {
        run.machine.cipher.map_or(f64::NAN, |cipher| cipher.seal)
    }),
    ("core-s/GiB dst", |_, with, without| {
        more(DESTINATION_CPU.of, with, without)
    }),
    ("cipher dst", |run, _, _| {
        run.machine.cipher.map_or(f64::NAN, |cipher| cipher.open)
    }),
];

fn of(figure: fn(&Completed) -> Option<f64>, run: &Completed) -> f64 {
    figure(run).unwrap_or(f64::NAN)
}

fn more(figure: fn(&Completed) -> Option<f64>, with: &Completed, without: &Completed) -> f64 {
    of(figure, with) - of(figure, without)
}

/// Returns the table with its caption; `None` unless `records` contain runs over TLS.
pub fn table(records: &[Record]) -> Option<(String, Grid)> {
    let names = COLUMNS.iter().map(|(name, _)| *name);
    let mut table = Grid::new(["", ""].into_iter().chain(names), 1);
    for (row, who) in series(records)
        .into_iter()
        .filter(|(row, _)| wants_row(row))
    {
        let pairs = pairs(records, &row, &who);
        if pairs.is_empty() {
            continue;
        }
        let channels = format!("{}, {} channels", row.method_and_level(), row.channels);
        let figures = COLUMNS.iter().map(|(_, figure)| text(&pairs, *figure));
        table
            .rows
            .push([channels, who].into_iter().chain(figures).collect());
    }
    let caption = "TLS, more than without in the same turn; AES-128-GCM alone, over memory that is in no cache";
    (!table.rows.is_empty()).then_some((caption.to_owned(), table))
}

fn text(pairs: &Pairs<'_>, figure: Figure) -> String {
    stats::text(
        pairs
            .iter()
            .map(|(run, with, without)| figure(run, with, without)),
    )
}

/// Returns the runs of `row`, each with the run without TLS of the same repeat number.
fn pairs<'a>(
    records: &'a [Record],
    row: &Row,
    who: &str,
) -> Vec<(&'a Record, &'a Completed, &'a Completed)> {
    let plain = |row: &Row| {
        let mut row = row.clone();
        row.options.insert(OPTION.to_owned(), String::new());
        row
    };
    let without = plain(row);
    let runs = records
        .iter()
        .filter(|run| run.row == *row && run.program_name() == who);
    runs.filter_map(|run| {
        let other = records.iter().find(|other| {
            let same = other.repeat == run.repeat && other.series == run.series;
            same && other.row == without && other.program_name() == who
        })?;
        Some((run, run.completed()?, other.completed()?))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::super::{find, tests::cells};
    use crate::record::{CipherSpeed, Outcome, tests::example};

    #[test]
    fn the_cost_of_tls_is_shown_next_to_that_of_its_cipher() {
        let suite = find("tls").unwrap();
        let cells = cells(suite, &[]);
        let records = [(0, 2.0), (1, 3.0)].map(|(cell, cpu)| {
            let mut record = example();
            record.row = cells[cell].row().unwrap();
            record.machine.cipher = (cell == 1).then_some(CipherSpeed {
                seal: 0.81,
                open: 0.92,
            });
            if let Outcome::Completed(run) = &mut record.outcome {
                run.source.total_ms = cpu * 1e3;
                run.source.normal_pages = 1 << 18;
                run.source.side.core_s_per_gib = cpu;
                run.destination.side.core_s_per_gib = 2.0 * cpu;
            }
            record
        });
        let sheet = suite.sheet(&records);
        let (_, table) = sheet.tables.last().unwrap();
        let row = [
            "none, 2 channels",
            "Hotlift",
            "1000",
            "1.50",
            "1.50",
            "1.00",
            "0.81",
            "2.00",
            "0.92",
        ];
        assert_eq!(table.rows, [row.map(str::to_owned)]);
        assert_eq!(
            suite.sheet(&records[..1]).tables.len(),
            1,
            "no TLS, no table"
        );
    }
}
