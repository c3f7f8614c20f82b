//! The figures of a run for tables and pictures. A figure has no value for runs where it would be meaningless.

use super::record::Completed;
use super::stats::{Spread, spread};

/// Minimum share of pages with content (0 to 1) for figures per GiB of content. Below it, most CPU time is spent on
/// zero page detection, and such figures mean nothing: a guest with 3 non-zero pages measured 31556 core-s/GiB.
const LITTLE_CONTENT: f64 = 0.01;

/// Size of one page, in GiB.
const GIB_PER_PAGE: f64 = 4096.0 / (1_u64 << 30) as f64;

/// A figure of a run, such as the total time.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// Heading of the figure's column.
    pub name: &'static str,
    /// Computes the figure for a run; `None` if the figure has no meaning for the run.
    pub of: fn(&Completed) -> Option<f64>,
    /// True if tables show the quotient Hotlift / QEMU of this figure.
    pub compares: bool,
}

const fn figure(name: &'static str, of: fn(&Completed) -> Option<f64>, compares: bool) -> Figure {
    Figure { name, of, compares }
}

/// Time from the request to migrate until the destination runs the guest, in ms.
pub const TOTAL_MS: Figure = figure("total ms", |run| Some(run.source.total_ms), true);
/// Time during which the guest is paused, in ms.
pub const DOWN_MS: Figure = figure("down ms", |run| Some(run.source.downtime_ms), true);
/// Number of passes over the dirty pages.
pub const ROUNDS: Figure = figure("rounds", |run| Some(run.source.rounds as f64), false);
/// Throughput on the wire, in Mbit/s.
pub const MBPS: Figure = figure("Mbit/s", |run| reported(run.source.throughput_mbps), false);
/// Pages sent per second, zero pages included.
pub const PAGES_PER_SECOND: Figure =
    figure("pages/s", |run| Some(run.source.pages_per_second), false);
/// Compression ratio: bytes of pages with content, divided by bytes sent.
pub const RATIO: Figure = figure("ratio", |run| reported(run.source.ratio), true);
/// Bytes sent on the wire.
pub const BYTES: Figure = figure(
    "bytes sent",
    |run| reported(run.source.transferred_bytes as f64),
    true,
);
/// CPU use of the source: CPU time divided by total time, in percent of a core.
pub const SOURCE_PERCENT: Figure =
    figure("CPU % src", |run| Some(run.source.side.cpu_percent), false);
/// CPU use of the destination: CPU time divided by total time, in percent of a core.
pub const DESTINATION_PERCENT: Figure = figure(
    "CPU % dst",
    |run| Some(run.destination.side.cpu_percent),
    false,
);
/// CPU time of the source per GiB of pages with content.
pub const SOURCE_CPU: Figure = figure(
    "core-s/GiB src",
    |run| has_content(run).then_some(run.source.side.core_s_per_gib),
    true,
);
/// CPU time of the destination per GiB of pages with content.
pub const DESTINATION_CPU: Figure = figure(
    "core-s/GiB dst",
    |run| has_content(run).then_some(run.destination.side.core_s_per_gib),
    true,
);
/// Returns the CPU time of source and destination together, per GiB of pages with content.
pub fn both_cpu(run: &Completed) -> Option<f64> {
    let source = (SOURCE_CPU.of)(run)?;
    Some(source + (DESTINATION_CPU.of)(run)?)
}

/// CPU time of the source per GiB of all pages, for guests whose pages are almost all zero.
pub const SOURCE_CPU_OF_ALL: Figure = figure(
    "core-s/GiB of all pages src",
    |run| of_all(run, run.source.side.cpu_s),
    true,
);
/// CPU time of the destination per GiB of all pages, for guests whose pages are almost all zero.
pub const DESTINATION_CPU_OF_ALL: Figure = figure(
    "core-s/GiB of all pages dst",
    |run| of_all(run, run.destination.side.cpu_s),
    true,
);

/// All figures, in the order of a full table.
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
    /// Returns the spread of the figure over several runs; `None` if one of the runs has no value.
    pub fn spread<'a>(&self, runs: impl IntoIterator<Item = &'a Completed>) -> Option<Spread> {
        spread(
            runs.into_iter()
                .map(|run| (self.of)(run).unwrap_or(f64::NAN)),
        )
    }

    /// Returns the spread as text; "n/a" if a run has no value, "-" without runs.
    pub fn text<'a>(&self, runs: impl IntoIterator<Item = &'a Completed>) -> String {
        let runs: Vec<_> = runs.into_iter().collect();
        match self.spread(runs.iter().copied()) {
            _ if runs.is_empty() => "-".to_owned(),
            None => "n/a".to_owned(),
            Some(spread) => spread.text(),
        }
    }

    /// Returns the spread of the quotients Hotlift / QEMU of `pairs`; `None` if a quotient has no value.
    pub fn quotients(&self, pairs: &[(&Completed, &Completed)]) -> Option<Spread> {
        let of = |(ours, theirs): &(&Completed, &Completed)| {
            let quotient = (self.of)(ours).zip((self.of)(theirs));
            quotient.map_or(f64::NAN, |(ours, theirs)| ours / theirs)
        };
        spread(pairs.iter().map(of))
    }

    /// Returns the spread of the quotients as text; empty for a figure that is not compared with QEMU.
    pub fn quotient(&self, pairs: &[(&Completed, &Completed)]) -> String {
        match self.quotients(pairs) {
            _ if !self.compares => String::new(),
            None => "-".to_owned(),
            Some(spread) => spread.text(),
        }
    }
}

/// Returns the entries of `figures` that have a value for at least one of `runs`. Without runs, returns all.
pub fn meaningful(figures: &[Figure], runs: &[&Completed]) -> Vec<Figure> {
    let mut meant = figures.to_vec();
    meant.retain(|figure| runs.is_empty() || runs.iter().any(|run| (figure.of)(run).is_some()));
    meant
}

/// Returns true if the share of pages with content is at least `LITTLE_CONTENT`.
pub fn has_content(run: &Completed) -> bool {
    let (normal, zero) = (run.source.normal_pages as f64, run.source.zero_pages as f64);
    normal >= LITTLE_CONTENT * (normal + zero)
}

fn of_all(run: &Completed, cpu_s: f64) -> Option<f64> {
    let pages = (run.source.normal_pages + run.source.zero_pages) as f64;
    (!has_content(run)).then(|| cpu_s / (pages * GIB_PER_PAGE))
}

/// Returns `figure`, or `None` for 0: a process that does not report a figure leaves it at 0.
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
        // If a figure has no value, its quotient has none either.
        assert_eq!(SOURCE_CPU.quotient(&[(&full, &empty)]), "-");
        assert_eq!(SOURCE_CPU.quotient(&[(&full, &full)]), "1.00");
    }
}
