//! Changes during a run: the rate of the link, and a busy thread that occupies a core.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cell::Cell;
use crate::namespaces::Ends;
use crate::warn;

/// Loop steps of the busy thread between two checks of the stop flag: some tens of microseconds.
const STEPS: u64 = 1 << 16;

/// A change during a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// The new rate of the link, in bits per second.
    Rate(u64),
    /// A busy thread occupies a core until the run ends.
    Neighbour,
}

/// The changes planned for one run of a cell. On drop, cancels later changes, and the busy thread ends.
pub struct PlannedChanges {
    events: Vec<(Duration, Event)>,
    ends: Option<Ends>,
    under_way: Option<(Sender<()>, JoinHandle<()>)>,
}

impl PlannedChanges {
    /// Returns all planned changes of `cell`. `ends` are the ends of the link; `None` without a limited link.
    pub fn of(cell: &Cell, ends: Option<Ends>) -> Self {
        Self {
            events: events(cell),
            ends,
            under_way: None,
        }
    }

    /// Starts the clock of the changes. The request to migrate was made `elapsed` ago. Only the first call has an
    /// effect.
    pub fn begin(&mut self, elapsed: Duration) {
        if self.events.is_empty() || self.under_way.is_some() {
            return;
        }
        let start = Instant::now()
            .checked_sub(elapsed)
            .unwrap_or_else(Instant::now);
        let (stop, stopped) = channel();
        let (events, ends) = (self.events.clone(), self.ends.clone());
        let thread = thread::spawn(move || apply_events(&events, ends.as_ref(), start, &stopped));
        self.under_way = Some((stop, thread));
    }
}

impl Drop for PlannedChanges {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.under_way.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

/// Returns the changes of `cell` with their time after the request to migrate, ordered by time.
fn events(cell: &Cell) -> Vec<(Duration, Event)> {
    let changes = cell.link.iter().flat_map(|link| link.changes());
    let rates = changes.map(|(at, rate)| (*at, Event::Rate(*rate)));
    let neighbour = cell.neighbour.map(|at| (at, Event::Neighbour));
    let mut events: Vec<_> = rates.chain(neighbour).collect();
    events.sort_by_key(|(at, _)| *at);
    events
}

/// Applies each of `events` at its time after `start`. Ends early when the sender of `stopped` is dropped.
fn apply_events(
    events: &[(Duration, Event)],
    ends: Option<&Ends>,
    start: Instant,
    stopped: &Receiver<()>,
) {
    let is_wanted = AtomicBool::new(true);
    thread::scope(|scope| {
        for (at, event) in events {
            let left = (start + *at).saturating_duration_since(Instant::now());
            if stopped.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                break;
            }
            match (event, ends) {
                (Event::Rate(rate), Some(ends)) => {
                    if let Err(error) = ends.change(*rate) {
                        warn(error.line());
                    }
                }
                (Event::Rate(_), None) => {}
                (Event::Neighbour, _) => {
                    scope.spawn(|| take_a_core(&is_wanted));
                }
            }
        }
        let _ = stopped.recv();
        is_wanted.store(false, Ordering::Relaxed);
    });
}

/// Keeps the last core that this process may use busy until `is_wanted` is false.
fn take_a_core(is_wanted: &AtomicBool) {
    let last = sched_getaffinity(None).ok().and_then(|all| {
        let mut cores = (0..CpuSet::MAX_CPU).rev();
        cores.find(|core| all.is_set(*core))
    });
    if let Some(core) = last {
        let mut one = CpuSet::new();
        one.set(core);
        if let Err(error) = sched_setaffinity(None, &one) {
            warn(format!("the neighbour has no core of its own: {error}"));
        }
    }
    // Works instead of pausing: pause instructions show a hypervisor that the core is free.
    while is_wanted.load(Ordering::Relaxed) {
        for step in 0..STEPS {
            black_box(step);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::tests::example;

    #[test]
    fn changes_of_rates_and_the_neighbour_load_are_ordered_by_time() {
        let mut cell = example();
        cell.link = Some("1gbit,200mbit@1s,1gbit@3s".parse().unwrap());
        cell.neighbour = Some(Duration::from_secs(2));
        let seconds = |(at, event): &(Duration, Event)| (at.as_secs(), *event);
        assert_eq!(
            events(&cell).iter().map(seconds).collect::<Vec<_>>(),
            [
                (1, Event::Rate(200_000_000)),
                (2, Event::Neighbour),
                (3, Event::Rate(1_000_000_000)),
            ]
        );
    }

    #[test]
    fn the_neighbour_load_ends_with_its_run() {
        let mut cell = example();
        cell.neighbour = Some(Duration::ZERO);
        let mut during = PlannedChanges::of(&cell, None);
        during.begin(Duration::ZERO);
        during.begin(Duration::ZERO);
        let (_, thread) = during.under_way.as_ref().expect("it is under way");
        assert!(!thread.is_finished());
        // The drop would block forever if the busy thread kept running.
        drop(during);
    }
}
