//! Counts the wake-ups of idle threads.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Time in which no idle thread may wake up. It is longer than any periodic wait of the product.
const WINDOW: Duration = Duration::from_secs(10);

/// Timeout for newly started threads to become idle.
const DEADLINE: Duration = Duration::from_secs(120);

/// Threads to watch: process ID, and prefix of the thread names.
pub type Threads<'a> = &'a [(u32, &'a str)];

/// Returns the number of sleeps of each of `threads` so far, by process ID and thread name.
fn sleeps(threads: Threads<'_>) -> BTreeMap<(String, String), u64> {
    let of_process = |(pid, begins): &(u32, &str)| {
        let tasks = fs::read_dir(format!("/proc/{pid}/task"));
        let tasks = tasks.into_iter().flatten().filter_map(|task| {
            let task = task.ok()?.path();
            let name = fs::read_to_string(task.join("comm")).ok()?;
            let name = name.trim_end().to_owned();
            let status = fs::read_to_string(task.join("status")).ok()?;
            let mut lines = status.lines();
            let line = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
            let id = task.file_name()?.to_string_lossy().into_owned();
            let count = line.trim().parse().ok()?;
            name.starts_with(begins).then_some(((id, name), count))
        });
        tasks.collect::<Vec<_>>()
    };
    threads.iter().flat_map(of_process).collect()
}

/// Checks that none of `threads` wakes up within 10 s, after they have become idle. `with_reason` lists thread names
/// that may wake up, each with a maximum number of wake-ups.
///
/// # Panics
/// If a thread wakes up more often, ends or starts, if no thread matches, or if the threads do not become idle.
pub fn sleep_through(threads: Threads<'_>, with_reason: &[(&str, u64)]) {
    let allowed = |name: &str| with_reason.iter().find(|(may, _)| *may == name);
    let deadline = Instant::now() + DEADLINE;
    loop {
        let mut before = sleeps(threads);
        thread::sleep(Duration::from_secs(1));
        let mut after = sleeps(threads);
        for counts in [&mut before, &mut after] {
            counts.retain(|(_, name), _| allowed(name).is_none());
        }
        if !before.is_empty() && before == after {
            break;
        }
        let all = format!("{before:?}, {after:?}");
        assert!(Instant::now() < deadline, "they never rest: {all}");
    }
    let before = sleeps(threads);
    thread::sleep(WINDOW);
    let after = sleeps(threads);
    assert!(before.keys().eq(after.keys()), "{before:?}, {after:?}");
    let woken = after
        .iter()
        .map(|(thread, count)| (thread, count - before[thread]));
    let too_often = woken.filter(|((_, name), woken)| {
        let allowed = allowed(name).map_or(0, |(_, most)| *most);
        *woken > allowed
    });
    let too_often: Vec<_> = too_often.collect();
    assert!(
        too_often.is_empty(),
        "wake-ups in {WINDOW:?}: {too_often:?}"
    );
}
