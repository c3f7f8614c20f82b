//! CPU time of QEMUs and relays, as counted by the kernel.

use std::time::Duration;

use hotlift::figures::ThreadCpu;

use crate::record::ThreadCounts;
use crate::threads::{Sampler, process_cpu};

/// Entry name for CPU time that no sample contains: threads of QEMU may end between two samples.
const BETWEEN: &str = "(between samples)";

/// Resolution of the kernel's CPU clock of a process (USER_HZ), in seconds; a smaller remainder is ignored.
const RESOLUTION_S: f64 = 0.02;

/// Measures the CPU time of the processes of both sides of a migration.
pub struct Meter {
    processes: Vec<u32>,
    before: Vec<Duration>,
    sampler: Sampler,
}

/// CPU time of all processes on one side of a migration.
pub struct SideCpu {
    /// Counts of each thread of the side's processes.
    pub threads: Vec<ThreadCounts>,
    /// CPU time of the side's processes together, including ended threads.
    pub cpu: Duration,
}

impl Meter {
    /// Starts to sample `processes`. Their order alternates: a process of the source, then one of the destination.
    pub fn start(processes: Vec<u32>) -> Self {
        Self {
            before: processes.iter().copied().map(process_cpu).collect(),
            sampler: Sampler::start(&processes),
            processes,
        }
    }

    /// Stops sampling, and returns the CPU time of source and destination, in this order.
    pub fn finish(self) -> [SideCpu; 2] {
        let after = self.processes.iter().copied().map(process_cpu);
        let used = after
            .zip(&self.before)
            .map(|(after, before)| after.saturating_sub(*before));
        let used: Vec<Duration> = used.collect();
        let threads = self.sampler.finish();
        [0, 1].map(|side| SideCpu {
            threads: threads
                .iter()
                .skip(side)
                .step_by(2)
                .flatten()
                .cloned()
                .collect(),
            cpu: used.iter().skip(side).step_by(2).sum(),
        })
    }
}

fn is_vcpu(name: &str) -> bool {
    name.starts_with("CPU ")
}

/// Removes the vCPU threads, which do the guest's work.
pub fn without_vcpus(mut threads: Vec<ThreadCounts>) -> Vec<ThreadCounts> {
    threads.retain(|thread| !is_vcpu(&thread.name));
    threads
}

/// Returns the CPU time of each thread. The rest of the `process` time gets an entry of its own.
pub fn cpu_of(threads: &[ThreadCounts], process: Duration) -> Vec<ThreadCpu> {
    let seen: f64 = threads.iter().map(|thread| thread.cpu_s).sum();
    let rest = process.as_secs_f64() - seen;
    let rest = (rest > RESOLUTION_S).then(|| ThreadCpu {
        name: BETWEEN.to_owned(),
        cpu_s: rest,
    });
    threads
        .iter()
        .filter(|thread| !is_vcpu(&thread.name))
        .map(|thread| ThreadCpu {
            name: thread.name.clone(),
            cpu_s: thread.cpu_s,
        })
        .chain(rest)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_and_the_rest_add_up_to_the_process_without_the_vcpus() {
        let thread = |name: &str, cpu_s| ThreadCounts {
            name: name.to_owned(),
            cpu_s,
            ..ThreadCounts::default()
        };
        let threads = [thread("mig/src/main", 0.5), thread("CPU 0/KVM", 1.0)];
        let cpu = cpu_of(&threads, Duration::from_secs(2));
        let sum: f64 = cpu.iter().map(|thread| thread.cpu_s).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{cpu:?}");
        assert_eq!(cpu_of(&threads, Duration::from_millis(1500)).len(), 1);
    }
}
