//! `legacy-rework`: what the threads of `compress` wait and fault, before and after its rework.

use std::collections::BTreeMap;

use hotlift_console::table::{align_with_words, new_table};
use hotlift_vmm::workload::Workload;

use super::{Block, Column, DOWN_MS, MBPS, NONE, Published, SOURCE_CPU, Sheet, Suite, TOTAL_MS};
use crate::record::{Completed, Record, ThreadCounts, whos};
use crate::stats;

const COLUMNS: &[Column] = &[TOTAL_MS, DOWN_MS, MBPS, SOURCE_CPU];

/// The published series.
pub static SUITE: Suite = Suite {
    name: "legacy-rework",
    source: "Xiao Guangrong: \"migration: improve and cleanup compression\", v2, 2018",
    machine: "an i7-4790 with 16 GB, one host, a guest of 8 vCPUs and 6 GB whose 8 threads write all of it \
              again and again, max-bandwidth 350 MB/s",
    differs: &[
        "before the rework the published bandwidth was 25 Mbit/s: a buffer was allocated and freed for \
         every page, and workers and guest met at the kernel's memory lock",
        "QEMU has the rework since 3.0; 2.11 (scripts/qemu-2.11) is from before, and boots no guest that \
         writes here: it has no PVH",
        "the published profiles (perf) are of kernel symbols; here the kernel's own counts of each thread: \
         page faults show allocation, waits show locks (futexes) and sockets",
        "the guest that writes does so at --rate to --working-set, so that the migration ends",
    ],
    ram_gib: 6,
    columns: COLUMNS,
    blocks: &[
        block(
            "writing guest",
            Workload::Random,
            &[Published(
                "published after the rework",
                &[],
                &[NONE, NONE, 50.0, NONE],
            )],
        ),
        block(
            "idle guest",
            Workload::Idle,
            &[Published("not published", &[], &[NONE; 4])],
        ),
    ],
    more: Some(waits),
};

const fn block(title: &'static str, workload: Workload, rows: &'static [Published]) -> Block {
    Block {
        title,
        method: "compress",
        options: &[("compress-level", "1"), ("max-bandwidth", "350M")],
        workload,
        zero_share: 0.1,
        zero_touched: false,
        rows,
    }
}

/// The threads of one side.
type Side = fn(&Completed) -> &[ThreadCounts];

const SOURCE: Side = |run| &run.source_threads;
const DESTINATION: Side = |run| &run.destination_threads;

/// Kinds of threads: their side, and the begins of their names in Hotlift and in QEMU, whose main thread
/// has one name on both sides.
const KINDS: &[(&str, Side, &[&str])] = &[
    ("compressing", SOURCE, &["compress"]),
    (
        "migration thread",
        SOURCE,
        &["mig/src/main", "live_migration"],
    ),
    ("decompressing", DESTINATION, &["decompress"]),
    (
        "destination's main",
        DESTINATION,
        &["mig/dst/main", "qemu-system"],
    ),
];

const PAGES_PER_GIB: f64 = 262_144.0;

/// A count: its name, and how it is read.
type Count = (&'static str, fn(&ThreadCounts) -> f64);

#[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
const COUNTS: &[Count] = &[
    ("waits", |thread| thread.waits as f64),
    ("preempted", |thread| thread.preempted as f64),
    ("page faults", |thread| thread.page_faults as f64),
    ("CPU s", |thread| thread.cpu_s),
];

/// Adds the counts of all threads of a kind together, per GiB of pages with content.
fn waits(records: &[Record], sheet: &mut Sheet) {
    let mut header = vec!["threads", ""];
    header.extend(COUNTS.iter().map(|(name, _)| *name));
    let mut table = new_table(&header);
    for block in SUITE.blocks {
        let runs: Vec<&Record> = records
            .iter()
            .filter(|run| run.row.guest.workload == block.workload.name())
            .collect();
        for (kind, side, begins) in KINDS {
            let mut name = format!("{}, {kind}", block.title);
            for who in whos(runs.iter().copied()) {
                let of_who = runs.iter().copied().filter(|run| run.who() == who);
                let sums = sums(of_who, *side, begins);
                if sums.is_empty() {
                    continue;
                }
                let mut row = vec![std::mem::take(&mut name), who];
                row.extend(
                    COUNTS.iter().map(|(count, _)| {
                        stats::text(sums.get(count).into_iter().flatten().copied())
                    }),
                );
                table.add_row(row);
            }
        }
    }
    align_with_words(&mut table, 1);
    let caption = "what the kernel counted, per GiB of pages with content".to_owned();
    sheet.tables.push((caption, table));
}

/// For each count its sum over the threads of a kind, a number a run.
fn sums<'a>(
    runs: impl Iterator<Item = &'a Record>,
    side: Side,
    begins: &[&str],
) -> BTreeMap<&'static str, Vec<f64>> {
    let mut sums: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for run in runs.filter_map(Record::completed) {
        let gib = gib(run);
        let threads: Vec<_> = side(run)
            .iter()
            .filter(|thread| begins.iter().any(|begin| thread.name.starts_with(begin)))
            .collect();
        if threads.is_empty() || gib <= 0.0 {
            continue;
        }
        for (name, count) in COUNTS {
            let sum: f64 = threads.iter().map(|thread| count(thread)).sum();
            sums.entry(name).or_default().push(sum / gib);
        }
    }
    sums
}

#[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
fn gib(run: &Completed) -> f64 {
    run.source.normal_pages as f64 / PAGES_PER_GIB
}

#[cfg(test)]
mod tests {
    use super::super::super::record::{Outcome, tests::example};
    use super::*;

    #[test]
    fn the_threads_of_a_kind_are_counted_together_by_gib() {
        let mut record = example();
        let thread = |name: &str, waits| ThreadCounts {
            name: name.to_owned(),
            waits,
            ..ThreadCounts::default()
        };
        let mut completed = Completed {
            source_threads: vec![
                thread("compress_0", 100),
                thread("compress_1", 50),
                thread("qemu-system-x86", 7),
            ],
            destination_threads: vec![thread("decompress_0", 30), thread("qemu-system-x86", 5)],
            ..Completed::default()
        };
        completed.source.normal_pages = 131_072;
        record.outcome = Outcome::Completed(Box::new(completed));
        let of = |kind: &str| {
            let (_, side, begins) = KINDS.iter().find(|(name, ..)| *name == kind).unwrap();
            sums(std::iter::once(&record), *side, begins)
        };
        assert_eq!(of("compressing")["waits"], [300.0]);
        assert_eq!(of("decompressing")["waits"], [60.0]);
        assert_eq!(of("destination's main")["waits"], [10.0]);
        assert!(of("migration thread").is_empty());
    }
}
