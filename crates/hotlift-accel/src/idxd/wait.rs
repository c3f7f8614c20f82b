//! Short waits of the completion thread for a completion record.

use super::CpuFeatures;
use super::record::{Completion, Record};

/// A short wait. Afterwards the completion thread checks all batches in flight again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// One iteration of a busy loop.
    Pause,
    /// UMONITOR and UMWAIT: the core rests until the record's cache line is written.
    #[cfg(target_arch = "x86_64")]
    Monitor,
}

impl Waiter {
    /// Returns the best waiter for a CPU.
    pub(crate) fn of(cpu: CpuFeatures) -> Self {
        #[cfg(target_arch = "x86_64")]
        if cpu.waitpkg {
            return Self::Monitor;
        }
        let _ = cpu;
        Self::Pause
    }

    /// Waits until `record` may be complete, or for some microseconds: the caller must also check other batches in flight.
    pub(crate) fn wait(self, record: &Record) {
        match self {
            Self::Pause => std::hint::spin_loop(),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only a CPU whose CPUID reports the instructions gets this waiter.
            Self::Monitor => unsafe { instructions::monitor(record) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod instructions {
    use std::arch::asm;
    use std::arch::x86_64::_rdtsc;

    use super::{Completion, Record};

    /// Longest wait, in cycles of the time stamp counter: 4 us at 2.5 GHz. UMWAIT watches only the record of one batch, so the
    /// wait must be short compared with a batch: a device takes 20 us for 128 pages.
    const LONGEST: u64 = 10_000;

    /// C0.1 in Intel's manual: the state with the faster wake-up.
    const LIGHT: u32 = 1;

    /// # Safety
    ///
    /// The CPU must have UMONITOR and UMWAIT.
    pub(super) unsafe fn monitor(record: &Record) {
        // SAFETY: the instruction only arms a monitor on the line; the caller guarantees that it exists.
        unsafe { asm!("umonitor {0}", in(reg) record, options(nostack, preserves_flags)) };
        // UMWAIT does not return for a write that came before the monitor was armed.
        if record.read() != Completion::Pending {
            return;
        }
        // SAFETY: reads a counter.
        let until = unsafe { _rdtsc() } + LONGEST;
        // SAFETY: rests until the line is written, the deadline passes, or an interrupt; the caller guarantees that the
        // instruction exists.
        unsafe {
            asm!(
                "umwait {state:e}",
                state = in(reg) LIGHT,
                in("rax") until,
                in("rdx") until >> 32,
                options(nostack),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_cpu_that_says_so_is_asked_to_rest() {
        assert_eq!(Waiter::of(CpuFeatures::default()), Waiter::Pause);
        let rests = CpuFeatures {
            waitpkg: true,
            ..CpuFeatures::default()
        };
        #[cfg(target_arch = "x86_64")]
        assert_eq!(Waiter::of(rests), Waiter::Monitor);
        #[cfg(not(target_arch = "x86_64"))]
        assert_eq!(Waiter::of(rests), Waiter::Pause);
    }

    /// With UMWAIT, this shows that the CPU wakes up; otherwise, that the loop iterates.
    #[test]
    fn waiting_for_a_record_ends() {
        let waiter = Waiter::of(CpuFeatures::of_this_cpu());
        let record = Record::default();
        waiter.wait(&record);
        std::thread::scope(|scope| {
            scope.spawn(|| record.complete(1, 0, 4096, 0));
            while record.read() == Completion::Pending {
                waiter.wait(&record);
            }
        });
        waiter.wait(&record);
    }
}
