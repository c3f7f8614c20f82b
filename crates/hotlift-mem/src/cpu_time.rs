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
    fn cpu_time_grows_with_the_work_of_this_thread_alone() {
        let start = thread_cpu_time();
        let mut now = start;
        while now < start + Duration::from_millis(20) {
            let next = thread_cpu_time();
            assert!(next >= now);
            now = next;
        }
        let fresh = std::thread::spawn(thread_cpu_time).join().expect("thread");
        assert!(fresh < now, "{fresh:?} of a thread that has done nothing");
    }
}
