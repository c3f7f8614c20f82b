//! Runs the cells in random order, the requested number of times, and keeps the record of each run when it ends.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime};

use hotlift_command::events::ProgressSnapshot;
use hotlift_command::pair::ProcessPlace;
use hotlift_terminal::output;
use hotlift_terminal::progress::{self, bytes};
use hotlift_terminal::signals::Interrupt;

use super::built_in;
use super::cell::Cell;
use super::certificates::{self, Certificates};
use super::command::Hotlift;
use super::journal::Journal;
use super::machine;
use super::namespaces::NamespacePair;
use super::planned_changes::PlannedChanges;
use super::qemu::Program;
use super::record::{CipherSpeed, Engine, Machine, Outcome, Record, Row};
use super::remote_host::RemoteHost;
use super::table::Labels;
use crate::error::BenchError;

/// State that all runs of one call of `hotlift-bench` share.
pub struct Bench<'a> {
    /// The `hotlift` command to measure.
    pub hotlift: Hotlift,
    /// "matrix", or the name of the suite.
    pub suite: String,
    /// Seed of the random order.
    pub seed: u64,
    /// Number of runs of each cell.
    pub repeats: u32,
    /// Time limit of one run.
    pub limit: Duration,
    /// Names and values of the TLS options that both sides use.
    pub security: Vec<(String, String)>,
    /// The two network namespaces for cells with a limited link; `None` if no cell has a limited link.
    pub joined: Option<NamespacePair>,
    /// The destination host; `None` if the destination is on this host.
    pub remote: Option<RemoteHost>,
    /// The QEMU for cells whose engine is QEMU; `None` if no cell uses QEMU.
    pub qemu: Option<Program>,
    /// The TLS certificates for cells that use TLS; `None` if no cell uses TLS.
    pub certificates: Option<Certificates>,
    /// The file that each record is appended to.
    pub journal: Journal,
    /// Signals that end the bench.
    pub interrupt: &'a Interrupt,
}

impl Bench<'_> {
    /// Runs every cell `repeats` times. If a run fails, prints a warning and continues with the next run. After a
    /// signal, discards the current run and returns the records of the completed runs.
    ///
    /// # Errors
    /// If no process can be started.
    pub fn run(&mut self, cells: &[Cell]) -> Result<Vec<Record>, BenchError> {
        let series = now();
        let rows: Vec<Row> = cells.iter().map(Cell::row).collect::<Result<_, _>>()?;
        let labels = Labels::of(&rows);
        let mut random = fastrand::Rng::with_seed(self.seed);
        let mut display = Display::new(cells.len(), self.repeats);
        let mut printed: BTreeMap<usize, String> = BTreeMap::new();
        let mut records = Vec::new();
        for repeat in 1..=self.repeats {
            for index in order(&rows, &mut random) {
                let label = labels.text(&rows[index], rows[index].program_name());
                display.begin(index, &label);
                let time = now();
                let machine = self.machine(&cells[index]);
                let started = Instant::now();
                let mut during = self.prepare(&cells[index])?;
                let outcome = self.run_cell(&cells[index], &mut |moment| {
                    during.begin(Duration::from_secs_f64(moment.elapsed_ms.max(0.0) / 1e3));
                    display.moment(moment);
                })?;
                drop(during);
                if self.interrupt.is_raised() {
                    display.clear();
                    return Ok(records);
                }
                display.end(index, started.elapsed(), &outcome);
                if let Outcome::Failed { error: why } | Outcome::Skipped { reason: why } = &outcome
                    && printed.get(&index) != Some(why)
                {
                    super::warn(format!("{label}: {why}"));
                    printed.insert(index, why.clone());
                }
                let record = Record {
                    suite: self.suite.clone(),
                    series: series.clone(),
                    number: u32::try_from(records.len() + 1).unwrap_or(u32::MAX),
                    repeat,
                    time,
                    row: rows[index].clone(),
                    machine,
                    outcome,
                };
                self.journal.keep(&record);
                records.push(record);
            }
        }
        display.clear();
        Ok(records)
    }

    fn machine(&self, cell: &Cell) -> Machine {
        let mut versions = BTreeMap::from([("hotlift".to_owned(), self.hotlift.version.clone())]);
        if cell.engine != Engine::Hotlift
            && let Some(program) = &self.qemu
        {
            versions.insert("qemu".to_owned(), program.version.clone());
        }
        if cell.engine != Engine::Qemu
            && let Ok(options) = cell.migration.options()
        {
            versions.insert("method".to_owned(), options.stream.library());
        }
        let cipher = certificates::wants(&cell.migration).then(CipherSpeed::measure);
        Machine {
            cipher: cipher.flatten(),
            ..machine::current_state(versions, self.remote.as_ref().map(RemoteHost::name))
        }
    }

    /// Shapes the link of `cell` for the start of a run. Returns the changes planned for the run.
    fn prepare(&self, cell: &Cell) -> Result<PlannedChanges, BenchError> {
        let ends = self.joined.as_ref().map(NamespacePair::ends);
        if let (Some(ends), Some(link)) = (&ends, &cell.link) {
            ends.shape(link)?;
        }
        Ok(PlannedChanges::of(cell, ends))
    }

    /// Returns the place where both sides of `cell` run: two namespaces, or this host.
    fn place(&self, cell: &Cell) -> ProcessPlace {
        let joined = self.joined.as_ref().filter(|_| cell.link.is_some());
        let program = self.hotlift.path.clone();
        ProcessPlace {
            security: self.security.clone(),
            ..match joined {
                Some(joined) => joined.place(program),
                None => ProcessPlace::new(program),
            }
        }
    }

    fn run_cell(
        &self,
        cell: &Cell,
        report: &mut dyn FnMut(&ProgressSnapshot),
    ) -> Result<Outcome, BenchError> {
        let (needed, free) = (cell.memory(self.remote.is_none()), machine::available());
        if needed > free {
            return Ok(Outcome::Skipped {
                reason: format!(
                    "it needs {} of memory, and {} are free: give a smaller --ram",
                    bytes(needed),
                    bytes(free)
                ),
            });
        }
        let certificates = self.certificates.as_ref();
        let certificates = certificates.filter(|_| certificates::wants(&cell.migration));
        if certificates.is_some() && self.remote.is_some() {
            return Ok(Outcome::Skipped {
                reason: "its certificates are for this host alone: leave them out, and give --tls DIR on both hosts"
                    .to_owned(),
            });
        }
        if cell.link.is_some() && self.remote.is_some() {
            return Ok(Outcome::Skipped {
                reason: "its link is made on one host: leave out --to".to_owned(),
            });
        }
        let place = &self.place(cell);
        match (cell.engine, &self.qemu) {
            (Engine::Hotlift, _) => built_in::run(
                &certificates.map_or_else(|| cell.clone(), |some| some.fill_in(cell)),
                place,
                self.remote.as_ref(),
                self.limit,
                self.interrupt,
                report,
            ),
            (_, Some(program)) => Ok(program.run(
                cell,
                place,
                certificates,
                self.limit,
                self.interrupt,
                report,
            )),
            (_, None) => Ok(Outcome::Skipped {
                reason: "no QEMU was given: use --with-qemu".to_owned(),
            }),
        }
    }
}

/// Returns the order in which `rows` run in one repeat. Rows of the same guest over the same link follow each other,
/// because reports compare them: a drift of the machine then affects all equally. The order of these groups, and the
/// order within a group, are random, so that drift favours no row.
fn order(rows: &[Row], random: &mut fastrand::Rng) -> Vec<usize> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (i, row) in rows.iter().enumerate() {
        match groups
            .iter_mut()
            .find(|group| rows[group[0]].is_comparable(row))
        {
            Some(group) => group.push(i),
            None => groups.push(vec![i]),
        }
    }
    random.shuffle(&mut groups);
    for group in &mut groups {
        random.shuffle(group);
    }
    groups.concat()
}

/// Returns the present time: UTC, in the format of RFC 3339.
fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// Progress output of the bench. On a terminal, one line is rewritten; elsewhere, each run prints a line.
struct Display {
    terminal: bool,
    cells: usize,
    runs: usize,
    done: usize,
    /// Durations of the completed runs, by index of the cell.
    took: BTreeMap<usize, Vec<Duration>>,
    /// Number of remaining runs, by index of the cell.
    left: Vec<u32>,
    label: String,
    words: String,
}

impl Display {
    fn new(cells: usize, repeats: u32) -> Self {
        let left = vec![repeats; cells];
        Self {
            terminal: std::io::stderr().is_terminal(),
            cells,
            runs: left.iter().map(|&left| left as usize).sum(),
            done: 0,
            took: BTreeMap::new(),
            left,
            label: String::new(),
            words: String::new(),
        }
    }

    fn begin(&mut self, cell: usize, label: &str) {
        self.left[cell] = self.left[cell].saturating_sub(1);
        self.label = label.to_owned();
        self.words = "begins".to_owned();
        self.show();
    }

    fn moment(&mut self, moment: &ProgressSnapshot) {
        self.words = format!(
            "round {}, {} to go",
            moment.round,
            bytes(moment.remaining_bytes)
        );
        self.show();
    }

    fn show(&self) {
        if self.terminal {
            output::progress(&progress::rewritten(&self.line()));
        }
    }

    fn end(&mut self, cell: usize, took: Duration, outcome: &Outcome) {
        self.done += 1;
        self.took.entry(cell).or_default().push(took);
        self.words = match outcome {
            Outcome::Completed(completed) => format!(
                "{:.0} ms, CPU {:.2} + {:.2} s",
                completed.source.total_ms,
                completed.source.side.cpu_s,
                completed.destination.side.cpu_s
            ),
            Outcome::Failed { .. } => "failed".to_owned(),
            Outcome::Skipped { .. } => "skipped".to_owned(),
        };
        if self.terminal {
            self.clear();
        } else {
            output::progress(&format!("{}\n", self.line()));
        }
    }

    fn clear(&self) {
        if self.terminal {
            output::progress("\r\x1b[K");
        }
    }

    fn line(&self) -> String {
        let number = (self.done + 1).min(self.runs);
        let number = if self.terminal { number } else { self.done };
        format!(
            "[{number}/{}] {}: {}; {}",
            self.runs,
            self.label,
            self.words,
            self.time_left()
        )
    }

    /// Estimates the remaining time from the mean duration of each cell's runs. Cells without runs use the mean of all
    /// runs.
    fn time_left(&self) -> String {
        let all: Vec<Duration> = self.took.values().flatten().copied().collect();
        let Some(mean) = mean_of(&all) else {
            return format!("{} cells, time left unknown", self.cells);
        };
        let left: Duration = self
            .left
            .iter()
            .enumerate()
            .map(|(cell, &left)| {
                let took = self.took.get(&cell).and_then(|took| mean_of(took));
                took.unwrap_or(mean) * left
            })
            .sum();
        let rounded = Duration::from_secs((left + Duration::from_millis(500)).as_secs());
        format!("{} left", humantime::format_duration(rounded))
    }
}

fn mean_of(times: &[Duration]) -> Option<Duration> {
    let number = u32::try_from(times.len())
        .ok()
        .filter(|&number| number > 0)?;
    Some(times.iter().sum::<Duration>() / number)
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::example;
    use super::*;

    #[test]
    fn compared_rows_run_one_after_the_other_in_random_order() {
        let row = |rate: u64, method: usize| Row {
            link: Some(format!("{rate}gbit")),
            method: method.to_string(),
            ..example().row
        };
        let rows: Vec<Row> = (0..4)
            .flat_map(|method| [1, 2, 3].map(|rate| row(rate, method)))
            .collect();
        let mut random = fastrand::Rng::with_seed(1);
        let orders = [(); 2].map(|()| order(&rows, &mut random));
        assert_ne!(orders[0], orders[1]);
        for order in orders {
            for group in order.chunks(4) {
                assert!(group.iter().all(|i| rows[*i].link == rows[group[0]].link));
            }
            let mut all = order;
            all.sort_unstable();
            assert!(all.into_iter().eq(0..12));
        }
    }

    #[test]
    fn the_remaining_time_is_estimated_from_earlier_runs_of_each_cell() {
        let mut display = Display::new(2, 2);
        display.begin(0, "a");
        assert!(display.time_left().contains("unknown"));
        let outcome = Outcome::Completed(Box::default());
        display.end(0, Duration::from_secs(10), &outcome);
        assert_eq!(display.time_left(), "30s left");
        display.begin(1, "b");
        display.end(1, Duration::from_secs(2), &outcome);
        assert_eq!(display.time_left(), "12s left");
    }
}
