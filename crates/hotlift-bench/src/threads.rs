//! Samples the kernel's counts for threads of other processes, equally for Hotlift and QEMU.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::record::ThreadCounts;

/// Interval between two samples. Short enough that a thread's last sample is close to the thread's end. Long enough
/// that reading three small files per thread needs about 1 % of a core.
const PERIOD: Duration = Duration::from_millis(20);

/// Samples the threads of several processes in a background thread, until `finish`.
pub struct Sampler {
    stop: Sender<()>,
    worker: JoinHandle<Vec<Vec<ThreadCounts>>>,
}

/// First and last sample of a thread.
struct Seen {
    first: ThreadCounts,
    last: ThreadCounts,
}

type Threads = BTreeMap<String, Seen>;

impl Sampler {
    /// Starts to sample. Counts from before the start are subtracted.
    pub fn start(processes: &[u32]) -> Self {
        let processes = processes.to_vec();
        let mut watched: Vec<Threads> = processes.iter().map(|_| Threads::new()).collect();
        sample_all(&processes, &mut watched, true);
        let (stop, stopped) = channel();
        let worker = std::thread::spawn(move || {
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                sample_all(&processes, &mut watched, false);
            }
            sample_all(&processes, &mut watched, false);
            watched.into_iter().map(counted).collect()
        });
        Self { stop, worker }
    }

    /// Stops sampling, and returns the threads of each process, in the order of the argument of [`Sampler::start`].
    pub fn finish(self) -> Vec<Vec<ThreadCounts>> {
        let _ = self.stop.send(());
        self.worker.join().unwrap_or_default()
    }
}

/// Returns user and system time of a process, including its ended threads. The resolution is 10 ms (USER_HZ).
pub fn process_cpu(process: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let Some((_, fields)) = stat.rsplit_once(')') else {
        return Duration::ZERO;
    };
    // Fields 14 and 15: the first field after the name in brackets is field 3.
    let fields: Vec<u64> = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse().ok())
        .collect();
    let ticks: u64 = fields.iter().sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second().max(1))
}

/// Samples all threads of all processes once. A thread in the first sample (`begin`) counts from that sample on, a
/// later thread from its own start.
fn sample_all(processes: &[u32], watched: &mut [Threads], begin: bool) {
    for (process, threads) in processes.iter().zip(watched) {
        let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else {
            continue;
        };
        for task in tasks.flatten() {
            let Some(now) = read(&task.path()) else {
                continue;
            };
            let id = task.file_name().to_string_lossy().into_owned();
            let seen = threads.entry(id).or_insert_with(|| Seen {
                first: if begin {
                    now.clone()
                } else {
                    ThreadCounts::default()
                },
                last: ThreadCounts::default(),
            });
            seen.last = now;
        }
    }
}

/// Returns the counts of a thread; `None` if the thread has ended.
fn read(task: &Path) -> Option<ThreadCounts> {
    let text = |name: &str| fs::read_to_string(task.join(name)).ok();
    let (stat, status, schedstat) = (text("stat")?, text("status")?, text("schedstat")?);
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.strip_prefix(':')?.trim().parse::<u64>().ok()
    };
    // Fields 10 and 12: the first field after the name in brackets is field 3.
    let (name, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let faults = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let ran: u64 = schedstat.split(' ').next()?.parse().ok()?;
    Some(ThreadCounts {
        name: name.split_once('(')?.1.to_owned(),
        cpu_s: Duration::from_nanos(ran).as_secs_f64(),
        waits: field("voluntary_ctxt_switches")?,
        preempted: field("nonvoluntary_ctxt_switches")?,
        page_faults: faults(7)? + faults(9)?,
    })
}

/// Returns the threads that used CPU time, sorted by name and number.
fn counted(threads: Threads) -> Vec<ThreadCounts> {
    let mut counted: Vec<ThreadCounts> = threads
        .into_values()
        .map(|Seen { first, last }| ThreadCounts {
            cpu_s: (last.cpu_s - first.cpu_s).max(0.0),
            waits: last.waits.saturating_sub(first.waits),
            preempted: last.preempted.saturating_sub(first.preempted),
            page_faults: last.page_faults.saturating_sub(first.page_faults),
            name: last.name,
        })
        .filter(|thread| thread.cpu_s > 0.0)
        .collect();
    counted.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
    counted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_of_this_process_is_listed_with_its_waits_and_cpu_time() {
        let sampler = Sampler::start(&[std::process::id()]);
        let (go, gone) = channel::<()>();
        let thread = std::thread::Builder::new().name("counted".to_owned());
        let thread = thread
            .spawn(move || {
                while gone.recv_timeout(Duration::from_millis(2)) == Err(RecvTimeoutError::Timeout)
                {
                }
            })
            .unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let id = || {
            let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
            let mut found = tasks.filter_map(|task| read(&task.path()));
            found.any(|task| task.name == "counted" && task.waits > 20)
        };
        while !id() {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        let threads = sampler.finish().remove(0);
        drop(go);
        thread.join().unwrap();
        let counted = threads.iter().find(|thread| thread.name == "counted");
        let counted = counted.expect("it was seen");
        assert!(counted.waits > 20 && counted.cpu_s > 0.0, "{counted:?}");
    }
}
