//! CPU time of a thread.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of the calling thread, user and system (`CLOCK_THREAD_CPUTIME_ID`).
pub fn thread_cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    // The clock starts at zero with the thread and only grows: neither field is negative.
    Duration::new(
        u64::try_from(now.tv_sec).unwrap_or(0),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    )
}

/// Time in which a thread was ready to run and had no CPU.
#[derive(Debug)]
pub struct RunQueue(Option<File>);

impl RunQueue {
    /// Opens the scheduler statistics of the calling thread. If the kernel has none (no `CONFIG_SCHED_INFO`), the wait time is
    /// 0.
    #[must_use]
    pub fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// Returns the total wait time since the thread's start.
    #[must_use]
    pub fn waited(&self) -> Duration {
        let mut text = [0; 64];
        let read = self
            .0
            .as_ref()
            .and_then(|file| file.read_at(&mut text, 0).ok());
        // Three numbers: ns on a CPU, ns in the queue, slices.
        let text = str::from_utf8(&text[..read.unwrap_or(0)]).unwrap_or_default();
        let nanos = text.split_ascii_whitespace().nth(1);
        Duration::from_nanos(nanos.and_then(|nanos| nanos.parse().ok()).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preempted_thread_has_run_queue_wait() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

        let all = sched_getaffinity(None).expect("affinity");
        let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu));
        let mut one = CpuSet::new();
        one.set(first.expect("a CPU"));
        let on_one_cpu = || {
            sched_setaffinity(None, &one).expect("affinity");
            let queue = RunQueue::of_this_thread();
            // Two threads share the CPU, so each of them waits.
            while thread_cpu_time() < Duration::from_millis(50) {}
            queue.waited()
        };
        let [a, b] = std::thread::scope(|scope| {
            [scope.spawn(on_one_cpu), scope.spawn(on_one_cpu)]
                .map(|thread| thread.join().expect("thread"))
        });
        assert!(a.max(b) > Duration::ZERO, "{a:?} {b:?}");
    }

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
