//! What the simulated device was told to do, and what it was asked to do.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Environment variable with the behaviour at the start, as [`hotlift_simulate`] takes it.
pub const VARIABLE: &str = "HOTLIFT_SIMULATED";

/// How the device behaves. Numbers count jobs over all queues, from when the behaviour was set; 0
/// means never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Behaviour {
    /// `absent=1`: there is no device.
    pub absent: bool,
    /// `latency=N`: a job takes that many microseconds.
    pub latency_us: u64,
    /// `depth=N`: jobs that may be in flight; a submission beyond them is answered busy. 0 is without
    /// limit.
    pub depth: u64,
    /// `busy=N`: every Nth submission is answered busy.
    pub busy_every: u64,
    /// `fault=N`: every Nth job ends with a page fault on its output.
    pub fault_every: u64,
    /// `error=N`: every Nth job ends with an error.
    pub error_every: u64,
    /// `wrong=N`: every Nth job says that it succeeded, with output that is too short.
    pub wrong_every: u64,
    /// `die=N`: from the Nth job on every call fails.
    pub die_at: u64,
    /// `hang=N`: from the Nth job on no job ends.
    pub hang_at: u64,
}

static BEHAVIOUR: Mutex<Option<Behaviour>> = Mutex::new(None);
/// Jobs that were accepted, and submissions that were made.
static JOBS: AtomicU64 = AtomicU64::new(0);
static SUBMISSIONS: AtomicU64 = AtomicU64::new(0);
/// When the jobs of [`Behaviour::admit`] end; `None` for those that never do.
static QUEUE: Mutex<Vec<Option<Instant>>> = Mutex::new(Vec::new());

impl Behaviour {
    /// Parses `key=number` pairs with spaces or commas between; `None` if one is none of the above.
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

    /// The present behaviour; at first that of the environment, an unreadable one of which is a device
    /// that is absent.
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

    /// True if the device has died: every call fails.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.die_at != 0 && JOBS.load(Ordering::Relaxed) >= self.die_at
    }

    /// Enters a job into the device's queue: what becomes of it and when, or `None` if the answer is
    /// busy. One that hangs stays in the queue until the behaviour is set again.
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

    /// Counts a submission; true if it is one to be answered busy.
    pub fn submission_is_busy(&self) -> bool {
        let number = SUBMISSIONS.fetch_add(1, Ordering::Relaxed) + 1;
        every(self.busy_every, number)
    }

    /// Counts a job that was accepted, and tells what becomes of it.
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

/// What becomes of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It does what it should.
    Succeeds,
    /// It ends with a page fault on its output.
    Faults,
    /// It ends with an error.
    Fails,
    /// It says that it succeeded, and did not.
    IsWrong,
    /// The device is gone: this job and all after it fail.
    Dies,
    /// It never ends.
    Hangs,
}

fn every(n: u64, number: u64) -> bool {
    n != 0 && number.is_multiple_of(n)
}

fn lock() -> MutexGuard<'static, Option<Behaviour>> {
    BEHAVIOUR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the behaviour and begins all counts again. 0, or -1 if `text` is unreadable.
///
/// # Safety
///
/// `text` must be a string that ends with a NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotlift_simulate(text: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
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

/// Jobs accepted since the behaviour was set.
#[unsafe(no_mangle)]
pub extern "C" fn hotlift_simulated_jobs() -> u64 {
    JOBS.load(Ordering::Relaxed)
}
