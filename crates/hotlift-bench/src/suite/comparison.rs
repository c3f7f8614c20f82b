//! Compares a published table with Hotlift's figures.

use std::fmt::{self, Display, Formatter};

use hotlift_command::args::Fill;
use hotlift_terminal::progress::bytes;

use super::load::{Block, DEVICES, Published, Suite};
use super::{added_by_tls, counts, is_of, is_simulated, threads};
use crate::best_fixed;
use crate::record::{Record, Row};
use crate::stats::{self, plain};
use crate::table::{Grid, Labels, is_the_same_work, pairs, series};

/// A published table with Hotlift's figures next to the published figures.
pub struct ComparisonTable {
    /// Author, place, date and machine of the publication. For Hotlift's own tables, the subject.
    pub heading: String,
    /// Conclusions, one per line; empty for a published table.
    pub conclusions: Vec<String>,
    /// Differences of Hotlift's runs from the published measurement, one per line.
    pub differs: Vec<String>,
    /// The tables, each with its caption.
    pub tables: Vec<(String, Grid)>,
}

impl Display for ComparisonTable {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.heading)?;
        for line in &self.conclusions {
            writeln!(f, "{line}")?;
        }
        if !self.differs.is_empty() {
            writeln!(f, "here:")?;
        }
        for line in &self.differs {
            writeln!(f, "- {line}")?;
        }
        for (caption, table) in &self.tables {
            writeln!(f, "{caption}\n{table}")?;
        }
        Ok(())
    }
}

impl Suite {
    /// Returns the table: published figures, Hotlift's figures next to each, and the differences of the measurement.
    pub fn sheet(&self, records: &[Record]) -> ComparisonTable {
        let columns = self.columns.iter().map(|column| column.name);
        let mut shown = Grid::new(["", ""].into_iter().chain(columns), 1);
        for (block, row) in self.rows() {
            let mut name = format!("{}, {}", block.title, row.name);
            let mut line = |who: String, figures: Vec<String>| {
                let mut cells = vec![std::mem::take(&mut name), who];
                cells.extend(figures);
                shown.rows.push(cells);
            };
            let ours = self.ours(block, row, records);
            if !row.published.is_empty() || ours.is_empty() {
                let figure = |i| plain(row.published.get(i).copied());
                let figures = (0..self.columns.len()).map(figure);
                line("published".to_owned(), figures.collect());
            }
            for (who, figures) in ours {
                line(who, figures);
            }
        }
        let mut sheet = ComparisonTable {
            heading: match &self.machine {
                Some(machine) => format!("published: {}; on {machine}", self.source),
                None => self.source.clone(),
            },
            differs: self.differences(records),
            conclusions: best_fixed::conclusions(records),
            tables: vec![("medians (lowest–highest)".to_owned(), shown)],
        };
        if !self.sweeps.is_empty() {
            let caption = "total seconds, medians; schedule: that of fixed methods which is the best afterwards, where link or \
                           cores change on the way";
            sheet.tables = vec![(caption.to_owned(), best_fixed::table(records))];
        }
        sheet.tables.extend(threads::tables(&self.threads, records));
        if !self.threads.is_empty() && !threads::has_device(records) {
            sheet.differs.push(threads::NO_DEVICE.to_owned());
        }
        sheet.tables.extend(added_by_tls::table(records));
        sheet.tables.extend(counts::table(self, records));
        sheet
    }

    /// Returns the lines below a published row: Hotlift, each QEMU, and the quotient Hotlift / QEMU. There is one set
    /// of lines for each setting that the published row does not define.
    fn ours(
        &self,
        block: &Block,
        published: &Published,
        records: &[Record],
    ) -> Vec<(String, Vec<String>)> {
        let of = |record: &&Record| is_of(block, published, &record.row);
        let runs: Vec<&Record> = records.iter().filter(of).collect();
        let series = series(runs.iter().copied());
        let rows: Vec<Row> = series.iter().map(|(row, _)| row.clone()).collect();
        let labels = Labels::of(&rows);
        let mut lines = Vec::new();
        for (row, who) in &series {
            let of = |run: &&Record| run.row == *row && run.program_name() == *who;
            let mine: Vec<&Record> = runs.iter().copied().filter(of).collect();
            let completed: Vec<_> = mine
                .iter()
                .filter_map(|run| Some((*run, run.completed()?)))
                .collect();
            let mut name = vec![who.clone()];
            name.extend(is_simulated(row).then(|| "simulated device".to_owned()));
            name.extend(labels.differing_options(row));
            let figures = match completed.is_empty() {
                true => {
                    let mut figures = vec!["not run".to_owned()];
                    figures.resize(self.columns.len(), String::new());
                    figures
                }
                false => self
                    .columns
                    .iter()
                    .map(|column| {
                        stats::text(completed.iter().map(|(run, one)| (column.figure)(run, one)))
                    })
                    .collect(),
            };
            lines.push((name.join(", "), figures));
            let beside = |run: &&&Record| is_the_same_work(&run.row, row);
            let (Some(ours), Some(theirs)) = (runs.iter().find(beside), mine.first()) else {
                continue;
            };
            let pairs = pairs(runs.iter().copied(), &ours.row, (row, who));
            if pairs.is_empty() {
                continue;
            }
            let figures = self.columns.iter().map(|column| {
                stats::text(
                    pairs
                        .iter()
                        .map(|(a, b)| (column.figure)(ours, a) / (column.figure)(theirs, b)),
                )
            });
            lines.push((format!("Hotlift / {who}"), figures.collect()));
        }
        lines
    }

    fn differences(&self, records: &[Record]) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(record) = records.first() {
            let (machine, guest) = (&record.machine, &record.row.guest);
            let fill = records.iter().find(|run| run.row.guest.fill != "zero");
            lines.push(format!(
                "{} with {} cores; both sides {}",
                machine.cpu,
                machine.cores,
                match (&machine.destination, &record.row.link) {
                    (None, Some(_)) if !self.sweeps.is_empty() =>
                        "on it, over the link that a row names".to_owned(),
                    (Some(host), _) => format!("on two hosts ({host})"),
                    (None, Some(link)) => format!("on it, over a link of {link}"),
                    (None, None) => "on it, over loopback".to_owned(),
                }
            ));
            if self.sweeps.is_empty() {
                lines.push(format!(
                    "a guest of {}{}, {} vCPU, filled with {}",
                    bytes(guest.ram_bytes),
                    match guest.ram_bytes == self.ram_gib << 30 {
                        true => String::new(),
                        false => format!(" instead of {} GiB", self.ram_gib),
                    },
                    guest.vcpus,
                    Fill::words(fill.map_or("zero", |run| &run.row.guest.fill))
                ));
            }
            if let Some(channels) = records.iter().map(|run| run.row.channels).max()
                && usize::from(channels) > machine.cores
            {
                lines.push(format!(
                    "up to {channels} channels share {} cores with both sides: more of them gain nothing",
                    machine.cores
                ));
            }
        }
        lines.extend(self.differs.iter().cloned());
        let is_run = |(block, row): (&Block, &Published)| {
            records.iter().any(|run| is_of(block, row, &run.row))
        };
        let missing: Vec<_> = self.rows().filter(|row| !is_run(*row)).collect();
        if !records.is_empty() && !missing.is_empty() {
            lines.push(match missing.iter().all(needs_device) {
                true => "rows without a line of ours need an accelerator that this host does not have: see \
                         'hotlift accel'"
                    .to_owned(),
                false => format!("{} rows were not run", missing.len()),
            });
        }
        if records.iter().any(|run| is_simulated(&run.row)) {
            lines.push(
                "the DSA device is simulated: its figures do not apply to a real one".to_owned(),
            );
        }
        lines
    }
}

/// Returns true if the options of a row require an accelerator device.
fn needs_device((block, row): &(&Block, &Published)) -> bool {
    let mut options = block.options_of(row);
    options.any(|(name, value)| (name, value) == ("accelerator", "required") || value == DEVICES)
}

#[cfg(test)]
mod tests {
    use super::super::{find, tests::cells};

    #[test]
    fn skipped_rows_are_counted_unless_all_need_a_device() {
        let iaa = find("iaa").unwrap();
        let cells = cells(iaa, &[]);
        let mut record = crate::record::tests::example();
        record.row = cells[0].row().unwrap();
        let output = iaa.differences(&[record]).join("\n");
        assert!(output.contains("rows were not run") && !output.contains("need an accelerator"));
    }
}
