//! The kernel's counts for each kind of thread: waits, page faults, CPU time.

use super::load::{Kind, Side, Suite};
use crate::record::{Completed, Record, ThreadCounts, program_names};
use crate::stats;
use crate::table::Grid;

const PAGES_PER_GIB: f64 = 262_144.0;

/// A count: its name, and the function that reads it.
pub type Count = (&'static str, fn(&ThreadCounts) -> f64);

/// All counts, in the order of the columns.
#[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
pub const COUNTS: &[Count] = &[
    ("waits", |thread| thread.waits as f64),
    ("preempted", |thread| thread.preempted as f64),
    ("page faults", |thread| thread.page_faults as f64),
    ("CPU s", |thread| thread.cpu_s),
];

/// Returns a table of the counts per GiB of pages with content, summed over the threads of each kind. `None` if the
/// suite defines no kinds.
pub fn table(suite: &Suite, records: &[Record]) -> Option<(String, Grid)> {
    let names = COUNTS.iter().map(|(name, _)| *name);
    let mut table = Grid::new(["threads", ""].into_iter().chain(names), 1);
    for block in &suite.blocks {
        let runs: Vec<&Record> = records
            .iter()
            .filter(|run| run.row.guest.workload == block.workload.name())
            .collect();
        for kind in &suite.kinds {
            let mut name = format!("{}, {}", block.title, kind.name);
            for who in program_names(runs.iter().copied()) {
                let of_who = runs.iter().copied().filter(|run| run.program_name() == who);
                let sums = sums(of_who, kind);
                if sums.is_empty() {
                    continue;
                }
                let mut row = vec![std::mem::take(&mut name), who];
                let counts = 0..COUNTS.len();
                row.extend(counts.map(|count| stats::text(sums.iter().map(|run| run[count]))));
                table.rows.push(row);
            }
        }
    }
    let caption = "what the kernel counted, per GiB of pages with content".to_owned();
    (!suite.kinds.is_empty()).then_some((caption, table))
}

/// Returns the sum of each count over the threads of `kind`, for each run that has such threads.
fn sums<'a>(runs: impl Iterator<Item = &'a Record>, kind: &Kind) -> Vec<[f64; COUNTS.len()]> {
    let of = |run: &Completed| {
        let threads = match kind.side {
            Side::Source => &run.source_threads,
            Side::Destination => &run.destination_threads,
        };
        let is = |thread: &&ThreadCounts| {
            kind.begins
                .iter()
                .any(|begin| thread.name.starts_with(begin))
        };
        let threads: Vec<_> = threads.iter().filter(is).collect();
        let gib = gib(run);
        let sum = |count: usize| {
            threads
                .iter()
                .map(|thread| (COUNTS[count].1)(thread))
                .sum::<f64>()
                / gib
        };
        (!threads.is_empty() && gib > 0.0).then(|| std::array::from_fn(sum))
    };
    runs.filter_map(|run| of(run.completed()?)).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
fn gib(run: &Completed) -> f64 {
    run.source.normal_pages as f64 / PAGES_PER_GIB
}

#[cfg(test)]
mod tests {
    use super::super::find;
    use super::*;
    use crate::record::{Outcome, tests::example};

    #[test]
    fn threads_of_one_kind_are_summed_per_gib() {
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
        let waits = |name: &str| {
            let kinds = &find("legacy-rework").unwrap().kinds;
            let kind = kinds.iter().find(|kind| kind.name == name).unwrap();
            let sums = sums(std::iter::once(&record), kind);
            sums.iter().map(|run| run[0]).collect::<Vec<_>>()
        };
        assert_eq!(waits("compressing"), [300.0]);
        assert_eq!(waits("decompressing"), [60.0]);
        assert_eq!(waits("destination's main"), [10.0]);
        assert!(waits("migration thread").is_empty());
    }
}
