//! Statistics of the work of a migration's method: done by an accelerator, or by the CPU.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hotlift_methods::{Jobs, RunsOn};

use crate::figures::JobFigures;

/// Counters of all channels of one side.
#[derive(Debug, Default)]
pub(crate) struct AcceleratorStats {
    hardware: AtomicU64,
    software: AtomicU64,
    retries: AtomicU64,
    raw_pages: AtomicU64,
    notes: Mutex<Notes>,
    /// Statistics of zero page detection, if devices had to do it.
    zero: Mutex<JobFigures>,
}

#[derive(Debug, Default)]
struct Notes {
    devices: BTreeSet<Arc<str>>,
    /// First reported reason why a channel works without its device. One is enough: a failed device fails for all channels.
    fallback: Option<Arc<str>>,
}

impl AcceleratorStats {
    /// Returns the statistics so far.
    pub(crate) fn read(&self) -> JobFigures {
        let notes = self.lock();
        JobFigures {
            hardware: self.hardware.load(Ordering::Relaxed),
            software: self.software.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            raw_pages: self.raw_pages.load(Ordering::Relaxed),
            devices: notes.devices.iter().map(ToString::to_string).collect(),
            fallback: notes.fallback.as_deref().map(str::to_owned),
        }
    }

    pub(crate) fn set_zero(&self, figures: JobFigures) {
        *self.zero.lock().unwrap_or_else(PoisonError::into_inner) = figures;
    }

    pub(crate) fn read_zero(&self) -> JobFigures {
        let zero = self.zero.lock().unwrap_or_else(PoisonError::into_inner);
        zero.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Job counts that one channel has already added to [`AcceleratorStats`].
#[derive(Debug, Default)]
pub(crate) struct ChannelStats {
    reported: Jobs,
    runs_on: RunsOn,
}

impl ChannelStats {
    /// Adds the increase of `jobs` since the previous call to `stats`.
    pub(crate) fn report(&mut self, stats: &AcceleratorStats, jobs: Jobs, runs_on: RunsOn) {
        if jobs != self.reported {
            let add = |counter: &AtomicU64, now: u64, before: u64| {
                counter.fetch_add(now - before, Ordering::Relaxed);
            };
            add(&stats.hardware, jobs.hardware, self.reported.hardware);
            add(&stats.software, jobs.software, self.reported.software);
            add(&stats.retries, jobs.retries, self.reported.retries);
            add(&stats.raw_pages, jobs.raw_pages, self.reported.raw_pages);
            self.reported = jobs;
        }
        if runs_on != self.runs_on {
            let mut notes = stats.lock();
            match &runs_on {
                RunsOn::Software => {}
                RunsOn::Fallback(why) => {
                    notes.fallback.get_or_insert_with(|| Arc::clone(why));
                }
                RunsOn::Hardware(device) => {
                    notes.devices.insert(Arc::clone(device));
                }
            }
            drop(notes);
            self.runs_on = runs_on;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_add_up_and_the_first_reason_stays() {
        let stats = AcceleratorStats::default();
        let (mut one, mut two) = (ChannelStats::default(), ChannelStats::default());
        let jobs = |hardware, software| Jobs {
            hardware,
            software,
            retries: 1,
            raw_pages: 2,
        };
        let device = || RunsOn::Hardware("a device".into());
        one.report(&stats, jobs(5, 0), device());
        one.report(&stats, jobs(7, 1), RunsOn::Fallback("it died".into()));
        two.report(&stats, jobs(1, 0), device());
        two.report(&stats, jobs(1, 4), RunsOn::Fallback("it hangs".into()));
        let expected = JobFigures {
            hardware: 8,
            software: 5,
            retries: 2,
            raw_pages: 4,
            devices: vec!["a device".to_owned()],
            fallback: Some("it died".to_owned()),
        };
        assert_eq!(stats.read(), expected);
    }
}
