//! The figures of a run for tables and pictures, each with the case in which it has no meaning.

use super::record::Completed;
use super::stats::{Spread, spread};

/// Below this share of pages with content, the CPU time goes into checking pages rather than into sending them. Seconds
/// per GiB of content then mean nothing (31556 core-s/GiB of a guest with 3 pages that are not zero).
const LITTLE_CONTENT: f64 = 0.01;

/// GiB of one page.
const GIB_PER_PAGE: f64 = 4096.0 / (1_u64 << 30) as f64;

/// A figure.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// Heading of its column.
    pub name: &'static str,
    /// Returns its value; `None` where it has no meaning.
    pub of: fn(&Completed) -> Option<f64>,
    /// True if the quotient Hotlift / QEMU has a meaning.
    pub compares: bool,
}

const fn figure(name: &'static str, of: fn(&Completed) -> Option<f64>, compares: bool) -> Figure {
    Figure { name, of, compares }
}

/// Time from the request to migrate until the destination runs the guest.
pub const TOTAL_MS: Figure = figure("total ms", |run| Some(run.source.total_ms), true);
/// Time during which the guest is paused.
pub const DOWN_MS: Figure = figure("down ms", |run| Some(run.source.downtime_ms), true);
/// Passes over the dirty pages.
pub const ROUNDS: Figure = figure("rounds", |run| Some(run.source.rounds as f64), false);
/// Throughput on the wire.
pub const MBPS: Figure = figure("Mbit/s", |run| reported(run.source.throughput_mbps), false);
/// Settled pages, zero pages included.
pub const PAGES_PER_SECOND: Figure =
    figure("pages/s", |run| Some(run.source.pages_per_second), false);
/// Bytes of pages with content over bytes sent.
pub const RATIO: Figure = figure("ratio", |run| reported(run.source.ratio), true);
/// Bytes sent.
pub const BYTES: Figure = figure(
    "bytes sent",
    |run| reported(run.source.transferred_bytes as f64),
    true,
);
/// Source's CPU over total time.
pub const SOURCE_PERCENT: Figure =
    figure("CPU % src", |run| Some(run.source.side.cpu_percent), false);
/// Destination's CPU over total time.
pub const DESTINATION_PERCENT: Figure = figure(
    "CPU % dst",
    |run| Some(run.destination.side.cpu_percent),
    false,
);
/// Source's CPU per GiB of pages with content.
pub const SOURCE_CPU: Figure = figure(
    "core-s/GiB src",
    |run| has_content(run).then_some(run.source.side.core_s_per_gib),
    true,
);
/// Destination's CPU per GiB of pages with content.
pub const DESTINATION_CPU: Figure = figure(
    "core-s/GiB dst",
    |run| has_content(run).then_some(run.destination.side.core_s_per_gib),
    true,
);
/// Returns the CPU time of both sides per GiB of pages with content.
pub fn both_cpu(run: &Completed) -> Option<f64> {
    let source = (SOURCE_CPU.of)(run)?;
    Some(source + (DESTINATION_CPU.of)(run)?)
}

/// Source's CPU per GiB of all pages, where almost none has content.
pub const SOURCE_CPU_OF_ALL: Figure = figure(
    "core-s/GiB of all pages src",
    |run| of_all(run, run.source.side.cpu_s),
    true,
);
/// Destination's CPU per GiB of all pages, where almost none has content.
pub const DESTINATION_CPU_OF_ALL: Figure = figure(
    "core-s/GiB of all pages dst",
    |run| of_all(run, run.destination.side.cpu_s),
    true,
);

/// All figures of a full table.
pub const ALL: &[Figure] = &[
    TOTAL_MS,
    DOWN_MS,
    ROUNDS,
    MBPS,
    PAGES_PER_SECOND,
    RATIO,
    SOURCE_PERCENT,
    DESTINATION_PERCENT,
    SOURCE_CPU,
    DESTINATION_CPU,
    SOURCE_CPU_OF_ALL,
    DESTINATION_CPU_OF_ALL,
];

impl Figure {
    /// Returns the spread over several runs; `None` if it has no meaning for one of them.
    pub fn spread<'a>(&self, runs: impl IntoIterator<Item = &'a Completed>) -> Option<Spread> {
        spread(
            runs.into_iter()
                .map(|run| (self.of)(run).unwrap_or(f64::NAN)),
        )
    }

    /// Returns the spread as text; "n/a" if it has no meaning, "-" without runs.
    pub fn text<'a>(&self, runs: impl IntoIterator<Item = &'a Completed>) -> String {
        let runs: Vec<_> = runs.into_iter().collect();
        match self.spread(runs.iter().copied()) {
            _ if runs.is_empty() => "-".to_owned(),
            None => "n/a".to_owned(),
            Some(spread) => spread.text(),
        }
    }

    /// Returns the spread of the quotients Hotlift / QEMU; `None` if one has no meaning.
    pub fn quotients(&self, pairs: &[(&Completed, &Completed)]) -> Option<Spread> {
        let of = |(ours, theirs): &(&Completed, &Completed)| {
            let quotient = (self.of)(ours).zip((self.of)(theirs));
            quotient.map_or(f64::NAN, |(ours, theirs)| ours / theirs)
        };
        spread(pairs.iter().map(of))
    }

    /// Returns the spread of the quotients as text; empty for a figure that is not compared.
    pub fn quotient(&self, pairs: &[(&Completed, &Completed)]) -> String {
        match self.quotients(pairs) {
            _ if !self.compares => String::new(),
            None => "-".to_owned(),
            Some(spread) => spread.text(),
        }
    }
}

/// Returns those of `figures` that have a meaning for at least one of `runs`; all figures without runs.
pub fn meaningful(figures: &[Figure], runs: &[&Completed]) -> Vec<Figure> {
    let mut meant = figures.to_vec();
    meant.retain(|figure| runs.is_empty() || runs.iter().any(|run| (figure.of)(run).is_some()));
    meant
}

/// Returns true if at least `LITTLE_CONTENT` of the pages had content.
pub fn has_content(run: &Completed) -> bool {
    let (normal, zero) = (run.source.normal_pages as f64, run.source.zero_pages as f64);
    normal >= LITTLE_CONTENT * (normal + zero)
}

fn of_all(run: &Completed, cpu_s: f64) -> Option<f64> {
    let pages = (run.source.normal_pages + run.source.zero_pages) as f64;
    (!has_content(run)).then(|| cpu_s / (pages * GIB_PER_PAGE))
}

/// Returns `None` for 0: a side that does not report a figure has 0.
fn reported(figure: f64) -> Option<f64> {
    (figure > 0.0).then_some(figure)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(normal: u64, zero: u64, cpu_s: f64) -> Completed {
        let mut run = Completed::default();
        run.source.normal_pages = normal;
        run.source.zero_pages = zero;
        run.source.side.cpu_s = cpu_s;
        run.source.side.core_s_per_gib = cpu_s / (normal as f64 * GIB_PER_PAGE);
        run
    }

    #[test]
    fn cpu_time_is_per_gib_of_content_or_of_all_pages_if_almost_all_are_zero() {
        let (full, empty) = (run(1 << 18, 0, 2.0), run(3, 1 << 18, 0.5));
        assert_eq!(SOURCE_CPU.text([&full]), "2.00");
        assert_eq!(SOURCE_CPU.text([&empty]), "n/a");
        assert_eq!(SOURCE_CPU_OF_ALL.text([&empty]), "0.50");
        assert_eq!(SOURCE_CPU_OF_ALL.text([&full]), "n/a");
        assert_eq!(SOURCE_CPU.text([]), "-");
        let names = |runs: &[&Completed]| {
            let both = [SOURCE_CPU, SOURCE_CPU_OF_ALL];
            meaningful(&both, runs)
                .iter()
                .map(|one| one.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&[&full]), ["core-s/GiB src"]);
        assert_eq!(names(&[&empty]), ["core-s/GiB of all pages src"]);
        assert_eq!(names(&[&full, &empty]).len(), 2);
        // A quotient has no meaning if one of its figures has none.
        assert_eq!(SOURCE_CPU.quotient(&[(&full, &empty)]), "-");
        assert_eq!(SOURCE_CPU.quotient(&[(&full, &full)]), "1.00");
    }
}
