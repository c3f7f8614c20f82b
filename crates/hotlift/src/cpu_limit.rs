//! `cpu-limit`: one budget of CPU time for all channel threads of one side (source or destination).
//!
//! After each packet, a thread adds its CPU time to a common schedule, and sleeps until the end of the scheduled time. So the
//! limit is kept on average, for cheap and for expensive packets. The limit's number of cores is also the maximum number of
//! threads that encode or decode at once. Otherwise the threads of many channels would use up the budget at the same moment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hotlift_mem::thread_cpu_time;

use crate::life::Life;
use crate::lock::lock;
use crate::schedule::{Schedule, nanos_over, rescaled};

/// CPU budget of all channel threads together.
#[derive(Debug)]
pub(crate) struct CpuBudget {
    /// Thousandths of a core; 0 is unlimited.
    limit: AtomicU64,
    /// CPU time that each thread has used, in nanoseconds, by its name.
    used: Mutex<Vec<(String, Arc<AtomicU64>)>>,
    /// Schedule of the recorded CPU time. It ends when this time is used up at the rate of `limit`.
    schedule: Schedule,
    /// Number of threads that encode or decode.
    at_work: Mutex<u64>,
    changed: Condvar,
}

/// Guard of a thread that encodes or decodes. Another thread may begin once the guard is dropped.
#[derive(Debug)]
pub(crate) struct WorkingThread<'a> {
    budget: &'a CpuBudget,
    /// Time that the thread had to wait before it could begin.
    pub waited: Duration,
}

impl Drop for WorkingThread<'_> {
    fn drop(&mut self) {
        *lock(&self.budget.at_work) -= 1;
        self.budget.changed.notify_one();
    }
}

impl CpuBudget {
    pub(crate) fn new(thousandths: u64) -> Self {
        Self {
            limit: AtomicU64::new(thousandths),
            used: Mutex::default(),
            schedule: Schedule::default(),
            at_work: Mutex::new(0),
            changed: Condvar::new(),
        }
    }

    /// Waits until the number of threads that encode or decode is below the limit's number of cores. Returns `None` without a
    /// limit.
    pub(crate) fn at_work(&self) -> Option<WorkingThread<'_>> {
        let threads = || match self.limit.load(Ordering::Relaxed) {
            0 => u64::MAX,
            limit => limit.div_ceil(1000),
        };
        if threads() == u64::MAX {
            return None;
        }
        let since = Instant::now();
        let mut at_work = self
            .changed
            .wait_while(lock(&self.at_work), |at_work| *at_work >= threads())
            .unwrap_or_else(PoisonError::into_inner);
        *at_work += 1;
        Some(WorkingThread {
            budget: self,
            waited: since.elapsed(),
        })
    }

    /// Changes the limit, in thousandths of a core; 0 is unlimited. CPU time that is already scheduled is rescaled to the new
    /// limit.
    pub(crate) fn set_limit(&self, thousandths: u64) {
        let mut booked_until = self.schedule.lock();
        let before = self.limit.swap(thousandths, Ordering::Relaxed);
        if before != thousandths {
            let is_limited = before > 0 && thousandths > 0;
            let now = Instant::now();
            *booked_until = booked_until
                .filter(|_| is_limited)
                .map(|until| rescaled(until, now, before, thousandths));
            // Locked once before the notification: a thread that has read the old limit and does not wait yet would miss it.
            drop(lock(&self.at_work));
            self.changed.notify_all();
        }
    }

    /// Returns the CPU time that each thread has used.
    pub(crate) fn used(&self) -> Vec<(String, Duration)> {
        let used = lock(&self.used);
        let time = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Ordering::Relaxed));
        used.iter()
            .map(|(name, nanos)| (name.clone(), time(nanos)))
            .collect()
    }

    /// Returns the CPU time counter of the calling thread. Threads with the same name have the same counter.
    fn of_this_thread(&self) -> Arc<AtomicU64> {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default();
        let mut used = lock(&self.used);
        if let Some((_, nanos)) = used.iter().find(|(other, _)| other == name) {
            return Arc::clone(nanos);
        }
        let nanos = Arc::default();
        used.push((name.to_owned(), Arc::clone(&nanos)));
        nanos
    }

    fn is_limited(&self) -> bool {
        self.limit.load(Ordering::Relaxed) > 0
    }

    /// Adds `cpu` to the schedule at `now`. Returns the time until which the thread must sleep; `None` if it need not sleep.
    fn reserve(&self, cpu: Duration, now: Instant) -> Option<Instant> {
        let time = || match self.limit.load(Ordering::Relaxed) {
            0 => None,
            limit => Some(nanos_over(cpu.as_nanos() * 1000, limit)),
        };
        let end = self.schedule.reserve(time, now)?.end;
        (end > now).then_some(end)
    }
}

/// Record of one thread's CPU time in a budget.
#[derive(Debug)]
pub(crate) struct CpuShare<'a> {
    budget: &'a CpuBudget,
    /// CPU time of the thread at the last record, and its counter in the budget; `None` before the first call of
    /// [`CpuShare::spend`].
    booked: Option<(Duration, Arc<AtomicU64>)>,
}

impl<'a> CpuShare<'a> {
    /// Creates the record for the thread that calls [`CpuShare::spend`].
    pub(crate) fn new(budget: &'a CpuBudget) -> Self {
        Self {
            budget,
            booked: None,
        }
    }

    /// Records the CPU time of the thread since the last call, and sleeps if the budget is exceeded. Returns the time slept.
    pub(crate) fn spend(&mut self, life: &Life) -> Duration {
        let used = thread_cpu_time();
        let Some((before, count)) = &mut self.booked else {
            self.booked = Some((used, self.budget.of_this_thread()));
            return Duration::ZERO;
        };
        let spent = used.saturating_sub(std::mem::replace(before, used));
        let nanos = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX);
        count.fetch_add(nanos, Ordering::Relaxed);
        if !self.budget.is_limited() {
            return Duration::ZERO;
        }
        let now = Instant::now();
        let Some(until) = self.budget.reserve(spent, now) else {
            return Duration::ZERO;
        };
        life.sleep_while(until, || self.budget.is_limited());
        now.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_threads_work_than_the_limit_has_cores() {
        for (limit, most) in [(500, 1), (1000, 1), (1001, 2)] {
            let budget = CpuBudget::new(limit);
            let (now, seen) = (AtomicU64::new(0), AtomicU64::new(0));
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for _ in 0..200 {
                            let at_work = budget.at_work();
                            seen.fetch_max(
                                now.fetch_add(1, Ordering::Relaxed) + 1,
                                Ordering::Relaxed,
                            );
                            std::thread::yield_now();
                            now.fetch_sub(1, Ordering::Relaxed);
                            drop(at_work);
                        }
                    });
                }
            });
            let seen = seen.into_inner();
            assert!(
                seen <= most,
                "{seen} threads with {limit} thousandths of a core"
            );
        }
        assert!(CpuBudget::new(0).at_work().is_none());
    }

    #[test]
    fn threads_together_use_what_the_limit_allows_over_any_second() {
        let budget = CpuBudget::new(500);
        let start = Instant::now();
        let mut threads = [start; 3];
        let mut used = Vec::new();
        for step in 0..3000_u64 {
            // The thread that is free first works next; some packets cost more, and some threads idle at times.
            let Some(thread) = threads.iter_mut().min() else {
                continue;
            };
            *thread += Duration::from_millis(u64::from(step % 100 == 0) * 50);
            let cpu = Duration::from_micros(200 + step % 7 * 900);
            let now = *thread + cpu;
            used.push((now, cpu));
            *thread = budget.reserve(cpu, now).unwrap_or(now);
        }
        let second = Duration::from_secs(1);
        for (end, _) in used.iter().filter(|(at, _)| *at > start + second) {
            let within = used
                .iter()
                .filter(|(at, _)| *at > *end - second && at <= end);
            let cpu: Duration = within.map(|(_, cpu)| *cpu).sum();
            assert!(cpu <= Duration::from_millis(525), "{cpu:?} before {end:?}");
        }
        let all: Duration = used.iter().map(|(_, cpu)| *cpu).sum();
        let lasted = threads.into_iter().max().unwrap() - start;
        assert!(all > lasted.mul_f64(0.4), "{all:?} of {lasted:?}");
    }

    #[test]
    fn each_threads_time_is_counted_by_its_name() {
        let budget = CpuBudget::new(0);
        // The second "a" takes the place of the first, as after a lost connection.
        for name in ["a", "b", "a"] {
            std::thread::scope(|scope| {
                let named = std::thread::Builder::new().name(name.to_owned());
                let spends = named.spawn_scoped(scope, || {
                    let mut share = CpuShare::new(&budget);
                    share.spend(&Life::default());
                    let before = thread_cpu_time();
                    while thread_cpu_time() == before {
                        std::hint::spin_loop();
                    }
                    share.spend(&Life::default());
                });
                spends.unwrap().join().unwrap();
            });
        }
        let used = budget.used();
        let names: Vec<_> = used.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert!(used.iter().all(|(_, time)| !time.is_zero()), "{used:?}");
    }

    #[test]
    fn a_removed_limit_delays_no_thread() {
        let budget = CpuBudget::new(1);
        let now = Instant::now();
        assert!(budget.reserve(Duration::from_secs(1), now).is_some());
        budget.set_limit(0);
        assert_eq!(budget.reserve(Duration::from_secs(1), now), None);
        let mut share = CpuShare::new(&budget);
        assert_eq!(share.spend(&Life::default()), Duration::ZERO);
    }
}
