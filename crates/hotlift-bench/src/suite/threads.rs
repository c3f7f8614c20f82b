//! CPU time by thread, published and measured, with zero pages detected by the CPU and by DSA.

use super::load::ThreadTable;
use super::{has_zero_share, is_simulated};
use crate::record::{Engine, Record};
use crate::stats::{self, plain};
use crate::table::Grid;

/// Name of the thread that runs only when DSA detects zero pages.
const COMPLETION: &str = "dsa_completion";

/// Heading of the column that DSA is compared with: zero page detection by the CPU.
const BY_CPU: &str = "Hotlift, CPU";

/// Heading of the column for detection by DSA. It excludes simulated devices, which save no CPU time, and QEMU, which
/// detects zero pages by the CPU.
const BY_DSA: &str = "Hotlift, DSA";

/// Heading of QEMU's column.
pub const BY_QEMU: &str = "QEMU, CPU";

/// A column of the table: its heading, and the runs it is computed from.
struct Column<'a> {
    name: &'static str,
    runs: Vec<&'a Record>,
}

/// Message for a table without the DSA column, because this machine has no DSA device.
pub const NO_DEVICE: &str = "no DSA device here, so the CPU's column stands alone: see 'hotlift accel'; a simulated one is \
     --with accel-path=dsa-model:";

/// Returns true if a run used a DSA device, real or simulated.
pub fn has_device(records: &[Record]) -> bool {
    let mut options = records.iter().map(|run| &run.row.options);
    options.any(|options| options.contains_key("accel-path"))
}

/// Returns the tables, each with its caption.
pub fn tables(tables: &[ThreadTable], records: &[Record]) -> impl Iterator<Item = (String, Grid)> {
    tables.iter().map(|published| {
        let caption = format!("{}, CPU ms by thread", published.title);
        (caption, table(published, records))
    })
}

fn table(published: &ThreadTable, records: &[Record]) -> Grid {
    let columns = columns(published, records);
    let names = columns.iter().map(|column| column.name);
    let header = ["thread", "published, CPU", "published, DSA"];
    let mut table = Grid::new(header.into_iter().chain(names), 0);
    let mut add = |name: &str, cpu: String, dsa: String, ours: &dyn Fn(&Column<'_>) -> String| {
        let mut row = vec![name.to_owned(), cpu, dsa];
        row.extend(columns.iter().map(ours));
        table.rows.push(row);
    };
    for row in &published.rows {
        let ours = |column: &Column<'_>| column.text(|thread| thread == row.name);
        add(&row.name, plain(row.cpu), plain(row.dsa), &ours);
    }
    let cpu: f64 = published.rows.iter().filter_map(|row| row.cpu).sum();
    let dsa: f64 = published.rows.iter().filter_map(|row| row.dsa).sum();
    add(
        "sum of the rows",
        format!("{cpu:.0}"),
        format!("{dsa:.0}"),
        &|column| column.text(is_counted),
    );
    let saving = |baseline: f64, with: f64| format!("{:.0} %", (1.0 - with / baseline) * 100.0);
    let baseline = columns.iter().find(|column| column.name == BY_CPU);
    let baseline = baseline.and_then(|column| column.median(is_counted));
    let ours = |column: &Column<'_>| match (column.name, baseline, column.median(is_counted)) {
        (BY_DSA, Some(baseline), Some(ours)) if baseline > 0.0 => saving(baseline, ours),
        _ => String::new(),
    };
    add("saving", String::new(), saving(cpu, dsa), &ours);
    add("not in the sum", plain(None), plain(None), &|column| {
        column.text(|thread| !is_counted(thread))
    });
    table
}

fn columns<'a>(published: &ThreadTable, records: &'a [Record]) -> Vec<Column<'a>> {
    let of = |name: &'static str, is: fn(&Record) -> bool| {
        let runs: Vec<&Record> = records
            .iter()
            .filter(|run| has_zero_share(&run.row, published.zero_share))
            .filter(|run| run.completed().is_some() && is(run))
            .collect();
        (!runs.is_empty()).then_some(Column { name, runs })
    };
    let columns = [
        of(BY_CPU, |run| {
            run.row.engine == Engine::Hotlift && !run.row.options.contains_key("accel-path")
        }),
        of(BY_DSA, |run| {
            run.row.options.contains_key("accel-path") && !is_simulated(&run.row)
        }),
        of("Hotlift, simulated DSA", |run| is_simulated(&run.row)),
        of(BY_QEMU, |run| run.row.engine == Engine::Qemu),
    ];
    columns.into_iter().flatten().collect()
}

impl Column<'_> {
    /// Returns the CPU time in ms of the threads that `is` selects by name, one sum for each run.
    fn runtimes(&self, is: impl Fn(&str) -> bool) -> Vec<f64> {
        let of = |run: &&Record| {
            let threads = &run.completed()?.source.side.threads;
            let mut found = threads
                .iter()
                .filter(|thread| is(&published_name(&thread.name)))
                .peekable();
            found.peek()?;
            Some(found.map(|thread| thread.cpu_s * 1e3).sum::<f64>())
        };
        self.runs.iter().filter_map(of).collect()
    }

    fn text(&self, is: impl Fn(&str) -> bool) -> String {
        stats::text(self.runtimes(is))
    }

    fn median(&self, is: impl Fn(&str) -> bool) -> Option<f64> {
        stats::spread(self.runtimes(is)).map(|spread| spread.median)
    }
}

/// Returns the name that the published table has for a thread; without one, the thread's own name.
fn published_name(name: &str) -> String {
    match name.strip_prefix("mig/src/send_") {
        Some(number) => format!("multifdsend_{number}"),
        None if name == "mig/src/main" => "live_migration".to_owned(),
        None => name.to_owned(),
    }
}

/// Returns true for threads that the published totals include. These totals differ by up to 6 ms from the sum of their
/// rows.
fn is_counted(name: &str) -> bool {
    name == "live_migration" || name == COMPLETION || name.starts_with("multifdsend_")
}

#[cfg(test)]
mod tests {
    use hotlift::figures::ThreadCpu;

    use super::super::find;
    use super::*;
    use crate::record::tests::example;
    use crate::record::{Completed, Outcome};

    #[test]
    fn published_totals_and_savings_follow_from_the_published_threads() {
        let text = find("dsa").unwrap().sheet(&[]).to_string();
        for words in [
            "41928",
            "32574",
            "22 %",
            "11160",
            "8706",
            "22 %",
            "no DSA device here",
        ] {
            assert!(text.contains(words), "no {words} in\n{text}");
        }
    }

    #[test]
    fn hotlifts_threads_are_shown_next_to_the_published_ones_and_add_up() {
        let mut record = example();
        record.row.method = "none".to_owned();
        record.row.guest.zero_share = Some(0.5);
        let thread = |name: &str, cpu_s| ThreadCpu {
            name: name.to_owned(),
            cpu_s,
        };
        let mut completed = Completed::default();
        completed.source.side.threads = vec![
            thread("mig/src/main", 0.010),
            thread("mig/src/send_0", 0.250),
            thread("mig/src/return", 0.001),
        ];
        record.outcome = Outcome::Completed(Box::new(completed.clone()));
        let mut simulated = record.clone();
        simulated.row.options = [("accel-path".to_owned(), "dsa-model:".to_owned())].into();
        completed.source.side.threads[1].cpu_s = 0.120;
        simulated.outcome = Outcome::Completed(Box::new(completed));
        let text = find("dsa").unwrap().sheet(&[record, simulated]).to_string();
        for words in ["Hotlift, simulated DSA", "260", "130"] {
            assert!(text.contains(words), "no {words} in\n{text}");
        }
        assert!(!text.contains("no DSA device"), "{text}");
    }

    #[test]
    fn savings_are_computed_for_devices_only_against_hotlift_on_the_cpu() {
        let run = |cpu_s, change: fn(&mut Record)| {
            let mut record = example();
            record.row.method = "none".to_owned();
            record.row.guest.zero_share = Some(0.5);
            let mut completed = Completed::default();
            completed.source.side.threads = vec![ThreadCpu {
                name: "mig/src/send_0".to_owned(),
                cpu_s,
            }];
            record.outcome = Outcome::Completed(Box::new(completed));
            change(&mut record);
            record
        };
        let by = |path: &str| [("accel-path".to_owned(), path.to_owned())].into();
        let qemu = run(0.050, |record| record.row.engine = Engine::Qemu);
        let cpu = run(0.100, |_| ());
        let mut dsa = run(0.030, |_| ());
        dsa.row.options = by("dsa:/dev/dsa/wq0.0");
        let mut simulated = run(0.020, |_| ());
        simulated.row.options = by("dsa-model:");
        let savings = |records: &[Record]| {
            let table = table(&find("dsa").unwrap().threads[0], records);
            let line = table.rows.iter().find(|row| row[0] == "saving");
            let cells = line.expect("a line").iter();
            let cells: Vec<_> = cells.filter(|cell| cell.ends_with('%')).cloned().collect();
            cells.join(", ")
        };
        let all = [cpu.clone(), dsa.clone(), simulated, qemu.clone()];
        assert_eq!(savings(&all), "22 %, 70 %");
        assert_eq!(savings(&[cpu, qemu.clone()]), "22 %");
        assert_eq!(savings(&[dsa, qemu]), "22 %");
    }
}
