//! Controls the threads of vCPUs: runs, throttles and parks them. A parked thread waits and does not run the guest.

use hotlift_mem::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time that a throttled vCPU runs between two sleeps (QEMU's `CPU_THROTTLE_TIMESLICE_NS`).
const SLICE: Duration = Duration::from_millis(10);

/// Requested state of the vCPU threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VcpuGoal {
    /// Threads wait, parked.
    Pause,
    /// Threads run the guest.
    Run,
    /// Threads end.
    Stop,
}

#[derive(Debug)]
struct State {
    want: VcpuGoal,
    /// Kernel thread IDs of the started threads, by vCPU.
    threads: BTreeMap<u8, u32>,
    running: usize,
    /// Share of the time that running threads sleep, 0 to 99 %.
    throttle: u8,
}

/// State that the vCPU threads of a guest share with its commands. Threads start parked.
#[derive(Debug)]
pub(crate) struct Control {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of time slices that have ended.
    slices: AtomicU64,
    /// Time that threads have slept because of the throttle, in nanoseconds; the sum over all threads.
    slept: AtomicU64,
}

impl Control {
    pub fn new() -> Self {
        Self {
            state: Mutex::new(State {
                want: VcpuGoal::Pause,
                threads: BTreeMap::new(),
                running: 0,
                throttle: 0,
            }),
            changed: Condvar::new(),
            slices: AtomicU64::new(0),
            slept: AtomicU64::new(0),
        }
    }

    /// Sets the requested state of the threads, and calls `kick` under the lock of [`Control::park`]. So `kick` runs
    /// before or after each call of `ready`, never during it.
    pub fn want(&self, want: VcpuGoal, kick: impl FnOnce()) {
        let mut state = self.lock();
        state.want = want;
        kick();
        self.changed.notify_all();
    }

    /// Registers the calling thread as the thread of `vcpu`.
    pub fn started(&self, vcpu: u8) {
        let id = rustix::thread::gettid().as_raw_nonzero().get();
        self.lock().threads.insert(vcpu, id.cast_unsigned());
        self.changed.notify_all();
    }

    /// Waits until all `vcpus` threads have started, and returns their kernel thread IDs.
    pub fn threads(&self, vcpus: usize) -> Vec<u32> {
        let state = self
            .changed
            .wait_while(self.lock(), |state| state.threads.len() < vcpus)
            .unwrap_or_else(PoisonError::into_inner);
        state.threads.values().copied().collect()
    }

    /// Waits until every thread is parked.
    pub fn wait_until_parked(&self) {
        let state = self.lock();
        drop(
            self.changed
                .wait_while(state, |state| state.running > 0)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Waits until the calling, parked thread may run (`Some`) or must end (`None`). `ready` is called under the lock,
    /// together with the transition to running. The thread counts as running until the returned value is dropped.
    pub fn park(&self, ready: impl FnOnce()) -> Option<Running<'_>> {
        let state = self.lock();
        let mut state = self
            .changed
            .wait_while(state, |state| state.want == VcpuGoal::Pause)
            .unwrap_or_else(PoisonError::into_inner);
        if state.want == VcpuGoal::Stop {
            return None;
        }
        state.running += 1;
        ready();
        Some(Running(self))
    }

    /// Sleeps for `time` on a running thread. Returns early if the thread must stop.
    pub fn sleep(&self, time: Duration) {
        let state = self.lock();
        drop(
            self.changed
                .wait_timeout_while(state, time, |state| state.want == VcpuGoal::Run)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Sets the share of time that threads sleep, in percent, up to 99; 0 ends all sleep.
    pub fn throttle(&self, percent: u8) {
        self.lock().throttle = percent.min(99);
        self.changed.notify_all();
    }

    /// Ends one time slice after another until threads are no longer throttled. `kick` interrupts busy threads at each
    /// end.
    pub fn end_slices(&self, kick: impl Fn()) {
        loop {
            let percent = self.lock().throttle;
            if percent == 0 {
                return;
            }
            if self.is_unchanged_for(SLICE, percent) {
                self.slices.fetch_add(1, Ordering::Relaxed);
                kick();
                self.is_unchanged_for(sleep_after_slice(percent), percent);
            }
        }
    }

    /// Waits for `time`, and returns true if the throttle is still `percent`. Returns false as soon as the throttle
    /// changes.
    fn is_unchanged_for(&self, time: Duration, percent: u8) -> bool {
        let (_state, timeout) = self
            .changed
            .wait_timeout_while(self.lock(), time, |state| state.throttle == percent)
            .unwrap_or_else(PoisonError::into_inner);
        timeout.timed_out()
    }

    /// Returns the number of ended slices. When this number has increased, the caller must call [`Control::sleep_off`].
    pub fn slice(&self) -> u64 {
        self.slices.load(Ordering::Relaxed)
    }

    /// Sleeps after a slice has ended, for the share of time that the throttle requires. Returns early if the throttle
    /// changes or the thread must stop. Returns the time slept, which does not count as guest time.
    pub fn sleep_off(&self) -> Duration {
        let state = self.lock();
        let percent = state.throttle;
        let start = Instant::now();
        drop(
            self.changed
                .wait_timeout_while(state, sleep_after_slice(percent), |state| {
                    state.want == VcpuGoal::Run && state.throttle == percent
                })
                .unwrap_or_else(PoisonError::into_inner),
        );
        let slept = start.elapsed();
        let nanos = u64::try_from(slept.as_nanos()).unwrap_or(u64::MAX);
        self.slept.fetch_add(nanos, Ordering::Relaxed);
        slept
    }

    /// Returns the time that threads have slept because of the throttle; the sum over all threads.
    pub fn slept(&self) -> Duration {
        Duration::from_nanos(self.slept.load(Ordering::Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Returns the sleep after each slice for a throttle of `percent`.
fn sleep_after_slice(percent: u8) -> Duration {
    SLICE * u32::from(percent) / u32::from(100 - percent.min(99))
}

/// Marks the calling thread as running. The thread counts as parked again when this value is dropped, even in a panic.
pub(crate) struct Running<'a>(&'a Control);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_throttled_vcpu_sleeps_its_share_of_the_time() {
        for (percent, sleep) in [
            (0, 0),
            (20, 2500),
            (50, 10_000),
            (90, 90_000),
            (99, 990_000),
        ] {
            assert_eq!(sleep_after_slice(percent), Duration::from_micros(sleep));
        }
    }
}
