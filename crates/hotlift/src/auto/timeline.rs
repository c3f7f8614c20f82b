//! Distribution of pages over the methods, in intervals of the migration.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::auto::channels::Auto;
use crate::auto::controller::Bottleneck;
use crate::figures::{MethodFigures, MethodMoment, ratio, to_f64};

/// Initial length of an interval of the timeline.
const FIRST_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum count of intervals. At the maximum, pairs of intervals are merged.
const MAX_INTERVALS: usize = 600;

/// Recent distribution of pages over the methods.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MethodsNow {
    /// True if channels wait for the wire, false if the wire waits for the CPUs.
    pub link_is_the_limit: bool,
    /// Fraction of the pages with content, 0 to 1, by method and level. The largest fraction is first.
    pub shares: Vec<(String, f64)>,
}

/// Writes the bottleneck and the distribution for an operator, for example "link is the limit: 80 % zstd".
impl std::fmt::Display for MethodsNow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let limit = match self.link_is_the_limit {
            true => "link is",
            false => "CPUs are",
        };
        write!(f, "{limit} the limit")?;
        // Fractions below half a percent are omitted.
        let shares = self.shares.iter().filter(|(_, share)| *share >= 0.005);
        for (index, (name, share)) in shares.enumerate() {
            let before = if index == 0 { ": " } else { ", " };
            write!(f, "{before}{:.0} % {name}", share * 100.0)?;
        }
        Ok(())
    }
}

/// Timeline of one migration: the distribution of pages in each interval.
#[derive(Debug)]
pub(crate) struct Timeline {
    length: Duration,
    /// Time of the end of the last interval, and the methods' statistics at that time.
    last: (Duration, Vec<MethodFigures>),
    moments: Vec<MethodMoment>,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        Self {
            length: FIRST_INTERVAL,
            last: (Duration::ZERO, Vec::new()),
            moments: Vec::new(),
        }
    }

    /// Records the state at `now`, which is the time since the start of the migration. Returns the distribution since the
    /// previous interval.
    pub(crate) fn poll(&mut self, auto: &Auto, now: Duration) -> MethodsNow {
        let figures = auto.figures();
        let mut shares: Vec<_> = shares_between(&self.last.1, &figures).into_iter().collect();
        if now.saturating_sub(self.last.0) >= self.length {
            self.moments.push(MethodMoment {
                ms: now.as_secs_f64() * 1e3,
                link_bytes_per_s: auto.link_bytes_per_second(),
                shares: shares.iter().cloned().collect(),
            });
            self.last = (now, figures);
            if self.moments.len() > MAX_INTERVALS {
                self.halve();
            }
        }
        shares.sort_by(|a, b| b.1.total_cmp(&a.1));
        MethodsNow {
            link_is_the_limit: auto.scarce() == Bottleneck::Link,
            shares,
        }
    }

    /// Merges each pair of adjacent intervals into one interval.
    fn halve(&mut self) {
        self.length *= 2;
        let pairs = self.moments.chunks(2);
        let joined = pairs.map(|pair| {
            let mut joined = pair.last().cloned().unwrap_or_default();
            for moment in &pair[..pair.len() - 1] {
                joined.link_bytes_per_s =
                    f64::midpoint(joined.link_bytes_per_s, moment.link_bytes_per_s);
                joined.shares.values_mut().for_each(|share| *share /= 2.0);
                for (name, share) in &moment.shares {
                    *joined.shares.entry(name.clone()).or_default() += share / 2.0;
                }
            }
            joined
        });
        self.moments = joined.collect();
    }

    pub(crate) fn moments(&self) -> Vec<MethodMoment> {
        self.moments.clone()
    }
}

/// Returns the fraction of the pages, by method, that were sent between the two readings of the statistics.
fn shares_between(before: &[MethodFigures], after: &[MethodFigures]) -> BTreeMap<String, f64> {
    let label_of = |figures: &MethodFigures| figures.label();
    let pages_before = |label: &str| {
        let row = before.iter().find(|row| label_of(row) == label);
        row.map_or(0, |row| row.pages)
    };
    let pages: Vec<_> = after
        .iter()
        .map(|row| (row.label(), row.pages - pages_before(&row.label())))
        .filter(|(_, pages)| *pages > 0)
        .collect();
    let all: u64 = pages.iter().map(|(_, pages)| pages).sum();
    pages
        .into_iter()
        .map(|(label, pages)| (label, ratio(to_f64(pages), to_f64(all))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(rows: &[(&str, Option<i8>, u64)]) -> Vec<MethodFigures> {
        let row = |(name, level, pages): &(&str, Option<i8>, u64)| MethodFigures {
            name: (*name).to_owned(),
            level: *level,
            pages: *pages,
            ..MethodFigures::default()
        };
        rows.iter().map(row).collect()
    }

    #[test]
    fn shares_cover_the_pages_since_the_last_sample() {
        let before = figures(&[("none", None, 100)]);
        let after = figures(&[
            ("none", None, 130),
            ("zstd", Some(3), 70),
            ("zstd", Some(-1), 0),
        ]);
        let shares = shares_between(&before, &after);
        assert_eq!(
            shares,
            [("none".to_owned(), 0.3), ("zstd 3".to_owned(), 0.7)].into()
        );
        let now = MethodsNow {
            link_is_the_limit: true,
            shares: vec![("zstd 3".to_owned(), 0.7), ("none".to_owned(), 0.3)],
        };
        assert_eq!(now.to_string(), "link is the limit: 70 % zstd 3, 30 % none");
    }

    #[test]
    fn a_long_migration_keeps_its_shape_with_half_the_samples() {
        let mut timeline = Timeline::new();
        for (ms, rate, name) in [
            (100.0, 10.0, "none"),
            (200.0, 30.0, "lz4"),
            (300.0, 50.0, "lz4"),
        ] {
            timeline.moments.push(MethodMoment {
                ms,
                link_bytes_per_s: rate,
                shares: [(name.to_owned(), 1.0)].into(),
            });
        }
        timeline.halve();
        let [first, last] = &timeline.moments[..] else {
            panic!("{:?}", timeline.moments);
        };
        assert_eq!((first.ms, first.link_bytes_per_s), (200.0, 20.0));
        assert_eq!(
            first.shares,
            [("none".to_owned(), 0.5), ("lz4".to_owned(), 0.5)].into()
        );
        assert_eq!((last.ms, last.link_bytes_per_s), (300.0, 50.0));
    }
}
