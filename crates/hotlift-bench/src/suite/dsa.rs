//! `dsa`: zero pages by DSA, with the per-thread CPU table.

use comfy_table::Table;
use hotlift_console::table::{align, new_table};
use hotlift_vmm::workload::Workload;

use super::{
    Block, Column, DEVICES, DOWN_MS, MBPS, Published, RAM_KB, Sheet, Suite, TOTAL_MS,
    TRANSFERRED_KB,
};
use super::{has_zero_share, is_simulated, plain};
use crate::record::{Engine, Record};
use crate::stats;

const COLUMNS: &[Column] = &[TOTAL_MS, DOWN_MS, MBPS, TRANSFERRED_KB, RAM_KB];

/// The published series.
pub static SUITE: Suite = Suite {
    name: "dsa",
    source: "Yichen Wang, Hao Xiang: \"Use Intel DSA accelerator to offload zero page checking in \
             multifd live migration\", v7, 2024",
    machine: "two Xeon Platinum 8457C with 192 CPUs, one DSA device, 8 channels over TCP, a guest of \
              100 GB that does not write",
    differs: &[
        "50 % zero pages are pages that hold nothing; the published run sent half of the zero pages \
         as if they had content (multifd-normal-page-ratio)",
        "all zero pages were written once, so that they exist",
    ],
    ram_gib: 100,
    columns: COLUMNS,
    blocks: &[
        Block {
            title: "50 % zero pages",
            method: "none",
            options: &[("multifd-channels", "8"), ("max-bandwidth", "0")],
            workload: Workload::Idle,
            zero_share: 0.5,
            zero_touched: true,
            rows: &[
                Published(
                    "CPU",
                    &[("zero-page-detection", "multifd")],
                    &[10343.0, 161.0, 41007.0, 51_583_797.0, 102_400_520.0],
                ),
                Published(
                    "DSA",
                    &[
                        ("zero-page-detection", "dsa-accel"),
                        ("accel-path", DEVICES),
                    ],
                    &[9535.0, 135.0, 46554.4, 53_947_545.0, 102_400_520.0],
                ),
            ],
        },
        Block {
            title: "100 % zero pages",
            method: "none",
            options: &[("multifd-channels", "8"), ("max-bandwidth", "0")],
            workload: Workload::Idle,
            zero_share: 1.0,
            zero_touched: true,
            rows: &[
                Published(
                    "CPU",
                    &[("zero-page-detection", "multifd")],
                    &[4867.0, 20.0, 1.51, 565.0, 102_400_520.0],
                ),
                Published(
                    "DSA",
                    &[
                        ("zero-page-detection", "dsa-accel"),
                        ("accel-path", DEVICES),
                    ],
                    &[3888.0, 18.0, 1.89, 565.0, 102_400_520.0],
                ),
            ],
        },
    ],
    more: Some(threads),
};

/// The published runtime of each thread, in ms: by CPU, by DSA.
struct Scenario {
    title: &'static str,
    zero_share: f64,
    runtime: &'static [(&'static str, f64, f64)],
}

const COMPLETION: &str = "dsa_completion";

static SCENARIOS: [Scenario; 2] = [
    Scenario {
        title: "50 % zero pages",
        zero_share: 0.5,
        runtime: &[
            ("live_migration", 5657.58, 6129.168),
            ("multifdsend_0", 3931.563, 2954.717),
            ("multifdsend_1", 4405.273, 2766.359),
            ("multifdsend_2", 3941.968, 2853.519),
            ("multifdsend_3", 5032.975, 2740.717),
            ("multifdsend_4", 4533.865, 2824.169),
            ("multifdsend_5", 4530.461, 2966.908),
            ("multifdsend_6", 5171.916, 2611.137),
            ("multifdsend_7", 4722.769, 3114.732),
            (COMPLETION, f64::NAN, 3612.564),
        ],
    },
    Scenario {
        title: "100 % zero pages",
        zero_share: 1.0,
        runtime: &[
            ("live_migration", 4860.718, 3846.976),
            ("multifdsend_0", 748.875, 191.880),
            ("multifdsend_1", 898.498, 166.331),
            ("multifdsend_2", 787.456, 168.528),
            ("multifdsend_3", 764.537, 197.831),
            ("multifdsend_4", 785.687, 169.580),
            ("multifdsend_5", 756.941, 167.984),
            ("multifdsend_6", 774.084, 198.042),
            ("multifdsend_7", 782.900, 170.624),
            (COMPLETION, f64::NAN, 3428.669),
        ],
    },
];

/// DSA's work queues of this host, as `accel-path` takes them; empty if there are none.
pub fn devices() -> String {
    let queues = std::fs::read_dir("/dev/dsa")
        .into_iter()
        .flatten()
        .flatten();
    let mut paths: Vec<String> = queues
        .map(|queue| format!("dsa:{}", queue.path().display()))
        .collect();
    paths.sort();
    paths.join(" ")
}

/// The column that a device's is compared with.
const BY_CPU: &str = "Hotlift, CPU";

/// The device's column. A simulated device saves nothing, and a QEMU's CPU is no device's.
const BY_DSA: &str = "Hotlift, DSA";

/// A column of the per-thread table: the runs that it is of.
struct Side<'a> {
    name: &'static str,
    runs: Vec<&'a Record>,
}

/// Adds the per-thread tables, and the line that says why a column is missing.
fn threads(records: &[Record], sheet: &mut Sheet) {
    for scenario in &SCENARIOS {
        let caption = format!("{}, CPU ms by thread", scenario.title);
        sheet.tables.push((caption, table(scenario, records)));
    }
    let by_device = |run: &Record| run.row.options.contains_key("accel-path");
    if !records.iter().any(by_device) {
        sheet.differs.push(
            "no DSA device here, so the CPU's column stands alone: see 'hotlift accel'; a simulated one is \
             --with accel-path=dsa-model:"
                .to_owned(),
        );
    }
}

fn table(scenario: &Scenario, records: &[Record]) -> Table {
    let sides = sides(scenario, records);
    let mut header = vec!["thread", "published, CPU", "published, DSA"];
    header.extend(sides.iter().map(|side| side.name));
    let mut table = new_table(&header);
    for (name, cpu, dsa) in scenario.runtime {
        let mut row = vec![(*name).to_owned(), plain(*cpu), plain(*dsa)];
        row.extend(sides.iter().map(|side| side.text(|thread| thread == *name)));
        table.add_row(row);
    }
    let published = |of: fn(&(&str, f64, f64)) -> f64| {
        scenario
            .runtime
            .iter()
            .map(of)
            .filter(|ms| ms.is_finite())
            .sum::<f64>()
    };
    let (cpu, dsa) = (published(|row| row.1), published(|row| row.2));
    let mut total = vec![
        "sum of the rows".to_owned(),
        format!("{cpu:.0}"),
        format!("{dsa:.0}"),
    ];
    total.extend(sides.iter().map(|side| side.text(is_counted)));
    table.add_row(total);
    let saving = |baseline: f64, with: f64| format!("{:.0} %", (1.0 - with / baseline) * 100.0);
    let mut savings = vec!["saving".to_owned(), String::new(), saving(cpu, dsa)];
    let baseline = sides.iter().find(|side| side.name == BY_CPU);
    let baseline = baseline.and_then(|side| side.median(is_counted));
    savings.extend(sides.iter().map(
        |side| match (side.name, baseline, side.median(is_counted)) {
            (BY_DSA, Some(baseline), Some(ours)) if baseline > 0.0 => saving(baseline, ours),
            _ => String::new(),
        },
    ));
    table.add_row(savings);
    let mut others = vec!["not in the sum".to_owned(), "-".to_owned(), "-".to_owned()];
    others.extend(
        sides
            .iter()
            .map(|side| side.text(|thread| !is_counted(thread))),
    );
    table.add_row(others);
    align(&mut table);
    table
}

fn sides<'a>(scenario: &Scenario, records: &'a [Record]) -> Vec<Side<'a>> {
    let of = |name: &'static str, is: fn(&Record) -> bool| {
        let runs: Vec<&Record> = records
            .iter()
            .filter(|run| has_zero_share(&run.row, scenario.zero_share))
            .filter(|run| run.completed().is_some() && is(run))
            .collect();
        (!runs.is_empty()).then_some(Side { name, runs })
    };
    let sides = [
        of(BY_CPU, |run| {
            run.row.engine == Engine::Hotlift && !run.row.options.contains_key("accel-path")
        }),
        of(BY_DSA, |run| {
            run.row.options.contains_key("accel-path") && !is_simulated(&run.row)
        }),
        of("Hotlift, simulated DSA", |run| is_simulated(&run.row)),
        of("QEMU, CPU", |run| run.row.engine == Engine::Qemu),
    ];
    sides.into_iter().flatten().collect()
}

impl Side<'_> {
    /// CPU ms of the threads that `is` says, a number a run.
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

/// A thread's name in the published table, where it has one.
fn published_name(name: &str) -> String {
    match name.strip_prefix("mig/src/send_") {
        Some(number) => format!("multifdsend_{number}"),
        None if name == "mig/src/main" => "live_migration".to_owned(),
        None => name.to_owned(),
    }
}

/// What the published totals add up; they differ by up to 6 ms from the sum of their own rows.
fn is_counted(name: &str) -> bool {
    name == "live_migration" || name == COMPLETION || name.starts_with("multifdsend_")
}

#[cfg(test)]
mod tests {
    use hotlift::figures::ThreadCpu;

    use super::super::super::record::tests::example;
    use super::super::super::record::{Completed, Outcome};
    use super::*;

    #[test]
    fn the_published_totals_and_savings_come_out_of_the_published_threads() {
        let text = SUITE.sheet(&[]).to_string();
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
    fn our_threads_stand_beside_theirs_and_add_up() {
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
        let text = SUITE.sheet(&[record, simulated]).to_string();
        for words in ["Hotlift, simulated DSA", "260", "130"] {
            assert!(text.contains(words), "no {words} in\n{text}");
        }
        assert!(!text.contains("no DSA device"), "{text}");
    }

    #[test]
    fn only_a_device_saves_and_only_what_the_cpu_of_hotlift_takes() {
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
            let text = table(&SCENARIOS[0], records).to_string();
            let line = text.lines().find(|line| line.contains("saving"));
            let cells = line.expect("a line").split(['│', '┆']).map(str::trim);
            let cells: Vec<_> = cells.filter(|cell| cell.ends_with('%')).collect();
            cells.join(", ")
        };
        let all = [cpu.clone(), dsa.clone(), simulated, qemu.clone()];
        assert_eq!(savings(&all), "22 %, 70 %");
        assert_eq!(savings(&[cpu, qemu.clone()]), "22 %");
        assert_eq!(savings(&[dsa, qemu]), "22 %");
    }
}
