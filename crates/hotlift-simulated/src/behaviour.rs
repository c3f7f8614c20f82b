//! Configured behaviour of the simulated devices, and counts of their jobs.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Environment variable with the initial behaviour, in the format of [`hotlift_simulate`].
pub const VARIABLE: &str = "HOTLIFT_SIMULATED";

/// Behaviour of the device. Numbers count jobs of all queues together, from the moment the behaviour was set; 0 means never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Behaviour {
    /// `absent=1`: there is no device.
    pub absent: bool,
    /// `latency=N`: a job takes that many microseconds.
    pub latency_us: u64,
    /// `depth=N`: maximum jobs in flight; the device answers further submissions with "busy". 0 means no limit.
    pub depth: u64,
    /// `busy=N`: the device answers every Nth submission with "busy".
    pub busy_every: u64,
    /// `fault=N`: every Nth job ends with a page fault on its output.
    pub fault_every: u64,
    /// `error=N`: every Nth job ends with an error.
    pub error_every: u64,
    /// `wrong=N`: every Nth job reports success, with output that is too short.
    pub wrong_every: u64,
    /// `die=N`: from the Nth job on, every call fails.
    pub die_at: u64,
    /// `hang=N`: from the Nth job on, no job ends.
    pub hang_at: u64,
}

static BEHAVIOUR: Mutex<Option<Behaviour>> = Mutex::new(None);
/// Counts of accepted jobs and of submissions.
static JOBS: AtomicU64 = AtomicU64::new(0);
static SUBMISSIONS: AtomicU64 = AtomicU64::new(0);
/// End times of the jobs in the device's queue; `None` for jobs that never end.
static QUEUE: Mutex<Vec<Option<Instant>>> = Mutex::new(Vec::new());

impl Behaviour {
    /// Parses `key=number` pairs separated by spaces or commas; `None` for an unknown key or an invalid number.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut behaviour = Self::default();
        for pair in text.split([' ', ',']).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=')?;
            let value: u64 = value.parse().ok()?;
            *match key {
                "absent" => {
                    behaviour.absent = value != 0;
                    continue;
                }
                "latency" => &mut behaviour.latency_us,
                "depth" => &mut behaviour.depth,
                "busy" => &mut behaviour.busy_every,
                "fault" => &mut behaviour.fault_every,
                "error" => &mut behaviour.error_every,
                "wrong" => &mut behaviour.wrong_every,
                "die" => &mut behaviour.die_at,
                "hang" => &mut behaviour.hang_at,
                _ => return None,
            } = value;
        }
        Some(behaviour)
    }

    /// Returns the current behaviour. Until [`hotlift_simulate`] is called, it is that of [`VARIABLE`]; an invalid value makes
    /// the device absent.
    #[must_use]
    pub fn now() -> Self {
        *lock().get_or_insert_with(|| {
            let text = std::env::var(VARIABLE).unwrap_or_default();
            Self::parse(&text).unwrap_or(Self {
                absent: true,
                ..Self::default()
            })
        })
    }

    /// Returns true if the device has died: every call must fail.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.die_at != 0 && JOBS.load(Ordering::Relaxed) >= self.die_at
    }

    /// Adds a job to the device's queue. Returns the job's result and end time; `None` if the device is busy. A hanging job
    /// stays in the queue until the behaviour is set again.
    pub fn admit(&self) -> Option<(Fate, Instant)> {
        let busy = self.submission_is_busy();
        let now = Instant::now();
        let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
        queue.retain(|end| end.is_none_or(|end| end > now));
        let depth = usize::try_from(self.depth).unwrap_or(usize::MAX);
        if busy || depth != 0 && queue.len() >= depth {
            return None;
        }
        let fate = self.next_job();
        let end = now + Duration::from_micros(self.latency_us);
        queue.push((fate != Fate::Hangs).then_some(end));
        Some((fate, end))
    }

    /// Counts a submission. Returns true if the device must answer "busy".
    pub fn submission_is_busy(&self) -> bool {
        let number = SUBMISSIONS.fetch_add(1, Ordering::Relaxed) + 1;
        every(self.busy_every, number)
    }

    /// Counts an accepted job, and returns its result.
    pub fn next_job(&self) -> Fate {
        let number = JOBS.fetch_add(1, Ordering::Relaxed) + 1;
        let from = |first: u64| first != 0 && number >= first;
        if from(self.hang_at) {
            Fate::Hangs
        } else if from(self.die_at) {
            Fate::Dies
        } else if every(self.error_every, number) {
            Fate::Fails
        } else if every(self.fault_every, number) {
            Fate::Faults
        } else if every(self.wrong_every, number) {
            Fate::IsWrong
        } else {
            Fate::Succeeds
        }
    }
}

/// Result of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The job succeeds.
    Succeeds,
    /// The job ends with a page fault on its output.
    Faults,
    /// The job ends with an error.
    Fails,
    /// The job wrongly reports success.
    IsWrong,
    /// The device is gone: this job and all later ones fail.
    Dies,
    /// The job never ends.
    Hangs,
}

fn every(n: u64, number: u64) -> bool {
    n != 0 && number.is_multiple_of(n)
}

fn lock() -> MutexGuard<'static, Option<Behaviour>> {
    BEHAVIOUR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the behaviour and resets all counts. Returns 0, or -1 if `text` is invalid.
///
/// # Safety
///
/// `text` must be a string that ends with a NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotlift_simulate(text: *const c_char) -> c_int {
    // SAFETY: guaranteed by the caller.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let Some(behaviour) = Behaviour::parse(&text) else {
        return -1;
    };
    JOBS.store(0, Ordering::Relaxed);
    SUBMISSIONS.store(0, Ordering::Relaxed);
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner).clear();
    *lock() = Some(behaviour);
    0
}

/// Returns the count of jobs accepted since the behaviour was set.
#[unsafe(no_mangle)]
pub extern "C" fn hotlift_simulated_jobs() -> u64 {
    JOBS.load(Ordering::Relaxed)
}
