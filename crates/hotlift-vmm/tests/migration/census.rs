//! What this process holds, to see that a migration leaves nothing behind.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a thread that has been joined may still be listed by the kernel.
const PATIENCE: Duration = Duration::from_secs(10);

/// One test at a time: the census is that of the whole process, and timing of many guests on few
/// cores is nobody's promise.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads of guests and migrations by name, and open files by what they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Census(BTreeMap<String, usize>);

impl Census {
    pub fn take() -> Self {
        let mut count = BTreeMap::new();
        for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            // The test harness starts and ends threads of its own.
            if ["mig/", "vcpu-", "proxy"]
                .iter()
                .any(|own| name.starts_with(own))
            {
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
            // The pagemap is opened once and kept, and the rest of /proc is this census.
            if !kind.starts_with("/proc/") {
                *count.entry(format!("file {kind}")).or_default() += 1;
            }
        }
        Self(count)
    }

    /// Panics if more or less is there than when this census was taken.
    pub fn expect_unchanged(&self) {
        let start = Instant::now();
        loop {
            let now = Self::take();
            if now == *self {
                return;
            }
            assert!(
                start.elapsed() < PATIENCE,
                "left behind: {:?}, before: {:?}",
                now.0,
                self.0
            );
            std::thread::yield_now();
        }
    }
}
