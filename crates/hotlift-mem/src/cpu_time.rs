//! What a thread has cost so far.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time of the calling thread, user and system (`CLOCK_THREAD_CPUTIME_ID`).
pub fn thread_cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    // The clock starts at zero with the thread and only grows: neither field is ever negative.
    Duration::new(
        u64::try_from(now.tv_sec).unwrap_or(0),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_grows_with_work_and_never_falls() {
        let before = thread_cpu_time();
        let mut last = before;
        while last == before {
            let now = thread_cpu_time();
            assert!(now >= last);
            last = now;
        }
    }
}
