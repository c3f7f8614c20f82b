//! Runs put together: repeats of one row, rows that differ in the method alone.

use crate::bench::record::{Completed, Engine, Outcome, Record, Row};
use crate::bench::stats::{Spread, spread};

/// All runs of one row.
pub struct Series<'a> {
    /// What they share.
    pub row: &'a Row,
    /// The runs that completed, in their order.
    pub runs: Vec<&'a Record>,
    /// Why others did not.
    pub problems: Vec<&'a str>,
}

/// Rows of the same work over the same link.
pub struct Condition<'a> {
    /// The wire, and options that are not the default's.
    pub title: String,
    /// The guest, in words.
    pub guest: String,
    /// A row each.
    pub series: Vec<Series<'a>>,
}

impl Series<'_> {
    /// "zstd 1, 2 ch", with QEMU's name before it if it was QEMU's.
    pub fn name(&self) -> String {
        let engine = match self.row.engine {
            Engine::Hotlift => "",
            Engine::Qemu => "QEMU ",
        };
        let channels = match self.row.channels {
            0 => "no multifd".to_owned(),
            channels => format!("{channels} ch"),
        };
        let mut name = format!("{engine}{}, {channels}", self.row.method_and_level());
        if !["multifd", ""].contains(&self.row.zero_page_detection.as_str()) {
            name.push_str(&format!(", zero pages: {}", self.row.zero_page_detection));
        }
        name
    }

    /// Of all runs that completed.
    pub fn spread(&self, of: fn(&Completed) -> f64) -> Option<Spread> {
        spread(self.runs.iter().filter_map(|run| run.completed()).map(of))
    }

    /// The run in the middle by total time.
    pub fn typical(&self) -> Option<&Completed> {
        let mut runs: Vec<_> = self.runs.iter().filter_map(|run| run.completed()).collect();
        runs.sort_by(|a, b| a.source.total_ms.total_cmp(&b.source.total_ms));
        runs.get(runs.len() / 2).copied()
    }
}

/// The link's rate in bytes a second; `None` without limit.
pub fn rate(row: &Row) -> Option<f64> {
    let link = row.link.as_deref().and_then(|link| {
        let rate = link.split(',').next()?;
        crate::advise::parse_rate(rate).ok()
    });
    match (link, row.max_bandwidth) {
        (link, 0) => link,
        (link, limit) => Some(link.map_or(limit as f64, |link| link.min(limit as f64))),
    }
}

/// "1.00 Gbit/s", or "no limit".
pub fn rate_text(rate: Option<f64>) -> String {
    match rate.map(|bytes| bytes * 8.0) {
        None => "no limit".to_owned(),
        Some(bits) if bits >= 1e9 => format!("{} Gbit/s", short(bits / 1e9)),
        Some(bits) => format!("{} Mbit/s", short(bits / 1e6)),
    }
}

/// At most two places, none that are zero.
pub fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The records by row, in the order in which rows first come.
pub fn series(records: &[Record]) -> Vec<Series<'_>> {
    let mut all: Vec<(&str, Series<'_>)> = Vec::new();
    for record in records {
        let at = all
            .iter()
            .position(|(suite, series)| *suite == record.suite && *series.row == record.row);
        let at = at.unwrap_or_else(|| {
            let series = Series {
                row: &record.row,
                runs: Vec::new(),
                problems: Vec::new(),
            };
            all.push((&record.suite, series));
            all.len() - 1
        });
        let series = &mut all[at].1;
        match &record.outcome {
            Outcome::Completed(_) => series.runs.push(record),
            Outcome::Failed { error } => series.problems.push(error),
            Outcome::Skipped { reason } => series.problems.push(reason),
        }
    }
    all.into_iter().map(|(_, series)| series).collect()
}

/// The guest of a row, in words.
pub fn guest(row: &Row) -> String {
    let guest = &row.guest;
    let zero = match guest.zero_touched {
        true => "zero, written once",
        false => "zero",
    };
    let work = match guest.workload.as_str() {
        "idle" => "idle".to_owned(),
        name => format!(
            "{name} at {} pages/s in {}",
            guest.rate,
            crate::progress::bytes(guest.working_set)
        ),
    };
    format!(
        "{} guest, {} vCPU, {} of RAM filled with {}, {:.0} % {zero}, {work}",
        guest.kind,
        guest.vcpus,
        crate::progress::bytes(guest.ram_bytes),
        fill(&guest.fill),
        guest.zero_share * 100.0,
    )
}

/// What RAM was filled with, in words.
pub fn fill(fill: &str) -> &str {
    match fill {
        "generated" => "a generated mix",
        folder => folder,
    }
}

/// What is alike in rows that are compared: all but engine, method, level, channels and zero pages. A QEMU's guest is
/// of another kind than Hotlift's, and that alone makes no other work.
fn work(row: &Row) -> (String, String, String) {
    let mut row = row.clone();
    row.guest.kind = String::new();
    let link = row.link.clone().unwrap_or_default();
    let options: Vec<String> = row
        .options
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let bandwidth = format!("{} {link}", row.max_bandwidth);
    (format!("{:?}", row.guest), bandwidth, options.join(" "))
}

/// Series of the same work together.
pub fn conditions(series: Vec<Series<'_>>) -> Vec<Condition<'_>> {
    let mut all: Vec<((String, String, String), Condition<'_>)> = Vec::new();
    for series in series {
        let key = work(series.row);
        match all.iter_mut().find(|(other, _)| *other == key) {
            Some((_, condition)) => condition.series.push(series),
            None => {
                let options = match key.2.is_empty() {
                    true => String::new(),
                    false => format!(", {}", key.2),
                };
                let title = format!("Wire: {}{options}", rate_text(rate(series.row)));
                let condition = Condition {
                    title,
                    guest: guest(series.row),
                    series: vec![series],
                };
                all.push((key, condition));
            }
        }
    }
    all.into_iter().map(|(_, condition)| condition).collect()
}
