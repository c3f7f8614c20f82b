//! Counts the resources of this process, to check that a migration releases everything.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// Maximum time that the kernel may list a joined thread.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Threads by name, and open files by kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Census(BTreeMap<String, usize>);

impl Census {
    pub fn take() -> Self {
        let mut count = BTreeMap::new();
        for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
            // A thread that has ended in between has no name.
            let Ok(name) = fs::read_to_string(task.path().join("comm")) else {
                continue;
            };
            // The test harness starts and ends threads, and names each after its test, "module::name".
            if !name.contains("::") {
                *count.entry(format!("thread {}", name.trim())).or_default() += 1;
            }
        }
        for file in fs::read_dir("/proc/self/fd").unwrap().flatten() {
            let Ok(target) = fs::read_link(file.path()) else {
                continue;
            };
            let target = target.to_string_lossy();
            // Of "socket:[1234]" the kind, not the number.
            let kind = target.split(":[").next().unwrap_or_default();
            // The pagemap is opened once and kept; the other files of /proc are opened by this census.
            if !kind.starts_with("/proc/") {
                *count.entry(format!("file {kind}")).or_default() += 1;
            }
        }
        Self(count)
    }

    /// Panics if more resources exist than in this census. Fewer are permitted: announcements of an earlier test's guest end
    /// later.
    pub fn expect_unchanged(&self) {
        let start = Instant::now();
        loop {
            let now = Self::take();
            let is_left = |(what, count): (&String, &usize)| self.0.get(what) < Some(count);
            if !now.0.iter().any(is_left) {
                return;
            }
            assert!(
                start.elapsed() < TIMEOUT,
                "left behind: {:?}, before: {:?}",
                now.0,
                self.0
            );
            std::thread::yield_now();
        }
    }
}
