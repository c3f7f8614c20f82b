//! The figures of a run that tables and pictures show, each with the case in which it means nothing.

use super::record::Completed;
use super::stats::{Spread, spread};

/// Below this share of pages with content the CPU goes into looking at pages rather than into sending them, and
/// seconds per GiB of content say nothing (31556 core-s/GiB of a guest that is all zero but for 3 pages).
const LITTLE_CONTENT: f64 = 0.01;

/// Bytes of a page over bytes of a GiB.
const GIB_PER_PAGE: f64 = 4096.0 / (1_u64 << 30) as f64;

/// A figure.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// The head of its column.
    pub name: &'static str,
    /// It; `None` where it means nothing.
    pub of: fn(&Completed) -> Option<f64>,
    /// Whether Hotlift / QEMU means something.
    pub compares: bool,
}

const fn figure(name: &'static str, of: fn(&Completed) -> Option<f64>, compares: bool) -> Figure {
    Figure { name, of, compares }
}

/// From the request to migrate until the destination runs the guest.
pub const TOTAL_MS: Figure = figure("total ms", |run| Some(run.source.total_ms), true);
/// While the guest stood still.
pub const DOWN_MS: Figure = figure("down ms", |run| Some(run.source.downtime_ms), true);
/// Passes over the dirty pages.
pub const ROUNDS: Figure = figure("rounds", |run| Some(run.source.rounds as f64), false);
/// On the wire.
pub const MBPS: Figure = figure("Mbit/s", |run| told(run.source.throughput_mbps), false);
/// Settled, zero ones among them.
pub const PAGES_PER_SECOND: Figure =
    figure("pages/s", |run| Some(run.source.pages_per_second), false);
/// Bytes of pages with content over bytes sent.
pub const RATIO: Figure = figure("ratio", |run| told(run.source.ratio), true);
/// Sent.
pub const BYTES: Figure = figure(
    "bytes sent",
    |run| told(run.source.transferred_bytes as f64),
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
/// CPU of both sides per GiB of pages with content.
pub fn both_cpu(run: &Completed) -> Option<f64> {
    let source = (SOURCE_CPU.of)(run)?;
    Some(source + (DESTINATION_CPU.of)(run)?)
}

/// Source's CPU per GiB of all pages, where nearly none has content.
pub const SOURCE_CPU_OF_ALL: Figure = figure(
    "core-s/GiB of all pages src",
    |run| of_all(run, run.source.side.cpu_s),
    true,
);
/// The destination's.
pub const DESTINATION_CPU_OF_ALL: Figure = figure(
    "core-s/GiB of all pages dst",
    |run| of_all(run, run.destination.side.cpu_s),
    true,
);

/// Every figure of a full table.
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
    /// Of several runs; `None` if it means nothing for one of them.
    pub fn spread<'a>(&self, runs: impl IntoIterator<Item = &'a Completed>) -> Option<Spread> {
        spread(
            runs.into_iter()
                .map(|run| (self.of)(run).unwrap_or(f64::NAN)),
        )
    }

    /// The same as text; "n/a" if it means nothing, "-" if nothing ran.
    pub fn text<'a>(&self, runs: impl IntoIterator<Item = &'a Completed>) -> String {
        let runs: Vec<_> = runs.into_iter().collect();
        match self.spread(runs.iter().copied()) {
            _ if runs.is_empty() => "-".to_owned(),
            None => "n/a".to_owned(),
            Some(spread) => spread.text(),
        }
    }

    /// The spread of its quotients, Hotlift by QEMU; `None` where they would mean nothing.
    pub fn quotients(&self, pairs: &[(&Completed, &Completed)]) -> Option<Spread> {
        let of = |(ours, theirs): &(&Completed, &Completed)| {
            let quotient = (self.of)(ours).zip((self.of)(theirs));
            quotient.map_or(f64::NAN, |(ours, theirs)| ours / theirs)
        };
        spread(pairs.iter().map(of))
    }

    /// The same as text; empty of a figure that is not compared.
    pub fn quotient(&self, pairs: &[(&Completed, &Completed)]) -> String {
        match self.quotients(pairs) {
            _ if !self.compares => String::new(),
            None => "-".to_owned(),
            Some(spread) => spread.text(),
        }
    }
}

/// Those of `figures` that mean something for at least one of `runs`; all, if there are no runs.
pub fn meant(figures: &[Figure], runs: &[&Completed]) -> Vec<Figure> {
    let mut meant = figures.to_vec();
    meant.retain(|figure| runs.is_empty() || runs.iter().any(|run| (figure.of)(run).is_some()));
    meant
}

/// Whether more than nearly no page had content.
pub fn has_content(run: &Completed) -> bool {
    let (normal, zero) = (run.source.normal_pages as f64, run.source.zero_pages as f64);
    normal >= LITTLE_CONTENT * (normal + zero)
}

fn of_all(run: &Completed, cpu_s: f64) -> Option<f64> {
    let pages = (run.source.normal_pages + run.source.zero_pages) as f64;
    (!has_content(run)).then(|| cpu_s / (pages * GIB_PER_PAGE))
}

/// What a side does not tell is 0.
fn told(figure: f64) -> Option<f64> {
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
    fn cpu_is_per_gib_of_content_and_of_all_pages_where_there_is_next_to_none() {
        let (full, empty) = (run(1 << 18, 0, 2.0), run(3, 1 << 18, 0.5));
        assert_eq!(SOURCE_CPU.text([&full]), "2.00");
        assert_eq!(SOURCE_CPU.text([&empty]), "n/a");
        assert_eq!(SOURCE_CPU_OF_ALL.text([&empty]), "0.50");
        assert_eq!(SOURCE_CPU_OF_ALL.text([&full]), "n/a");
        assert_eq!(SOURCE_CPU.text([]), "-");
        let names = |runs: &[&Completed]| {
            let both = [SOURCE_CPU, SOURCE_CPU_OF_ALL];
            meant(&both, runs)
                .iter()
                .map(|one| one.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&[&full]), ["core-s/GiB src"]);
        assert_eq!(names(&[&empty]), ["core-s/GiB of all pages src"]);
        assert_eq!(names(&[&full, &empty]).len(), 2);
        // A quotient of figures of which one means nothing means nothing.
        assert_eq!(SOURCE_CPU.quotient(&[(&full, &empty)]), "-");
        assert_eq!(SOURCE_CPU.quotient(&[(&full, &full)]), "1.00");
    }
}
