//! Downtimes of the latest migrations, and their percentiles. No I/O, no clock.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Number of migrations whose downtimes are kept, for each direction.
const KEPT: usize = 100;

/// Percentiles of the downtimes of the latest migrations of one direction.
///
/// The downtimes are those that the relay of this host has measured ([`Snapshot::downtime`]), so the figures of source and
/// destination differ. Each percentile is the downtime of one of the migrations (nearest rank), without interpolation.
///
/// [`Snapshot::downtime`]: crate::snapshot::Snapshot::downtime
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DowntimeFigures {
    /// Number of migrations in the figures: the latest completed ones with a known downtime since the agent's start, at most
    /// 100.
    pub migrations: usize,
    /// Median, in seconds; `None` without migrations.
    pub p50_seconds: Option<f64>,
    /// 95th percentile, in seconds; `None` without migrations. With fewer than 20 migrations it is the maximum.
    pub p95_seconds: Option<f64>,
    /// Maximum, in seconds; `None` without migrations.
    pub max_seconds: Option<f64>,
}

/// Figures of both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Downtimes {
    /// Migrations that left this host.
    pub outgoing: DowntimeFigures,
    /// Migrations that came to this host.
    pub incoming: DowntimeFigures,
}

/// Downtimes of the latest migrations of one direction, oldest first.
#[derive(Debug, Clone, Default)]
pub struct LatestDowntimes(VecDeque<Duration>);

impl LatestDowntimes {
    /// Adds the downtime of a migration; drops the oldest downtime if there are too many.
    pub fn add(&mut self, downtime: Duration) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(downtime);
    }

    /// Returns the percentiles of the kept downtimes.
    #[must_use]
    pub fn figures(&self) -> DowntimeFigures {
        let mut sorted: Vec<_> = self.0.iter().collect();
        sorted.sort_unstable();
        let percentile = |percent: usize| {
            let rank = (sorted.len() * percent).div_ceil(100);
            let downtime = sorted.get(rank.checked_sub(1)?)?;
            Some(downtime.as_secs_f64())
        };
        DowntimeFigures {
            migrations: sorted.len(),
            p50_seconds: percentile(50),
            p95_seconds: percentile(95),
            max_seconds: percentile(100),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the figures of migrations with these downtimes, in milliseconds: their number, p50, p95 and maximum.
    fn figures(downtimes: impl IntoIterator<Item = u64>) -> (usize, [Option<f64>; 3]) {
        let mut latest = LatestDowntimes::default();
        for ms in downtimes {
            latest.add(Duration::from_millis(ms));
        }
        let figures = latest.figures();
        let percentiles = [
            figures.p50_seconds,
            figures.p95_seconds,
            figures.max_seconds,
        ];
        (figures.migrations, percentiles)
    }

    #[test]
    fn percentiles_are_downtimes_that_occurred() {
        assert_eq!(figures([]), (0, [None; 3]));
        assert_eq!(figures([30]), (1, [Some(0.03); 3]));
        let two = [Some(0.03), Some(0.5), Some(0.5)];
        assert_eq!(figures([500, 30]), (2, two));
        let three = [Some(0.04), Some(0.5), Some(0.5)];
        assert_eq!(figures([40, 500, 30]), (3, three));
        let twenty = [Some(0.01), Some(0.019), Some(0.02)];
        assert_eq!(figures((1..=20).rev()), (20, twenty));
        let hundred = [Some(0.05), Some(0.095), Some(0.1)];
        assert_eq!(figures(1..=100), (100, hundred));
    }

    #[test]
    fn only_the_latest_migrations_count() {
        let latest = [Some(0.95), Some(0.995), Some(1.0)];
        assert_eq!(figures(1..=1000), (KEPT, latest));
        let once_slow = [60_000].into_iter().chain(vec![20; KEPT]);
        assert_eq!(figures(once_slow), (KEPT, [Some(0.02); 3]));
    }
}
