//! CPU instructions that submit descriptors to a device, and that wait for its completion records.

/// Instructions that a CPU has.
///
/// Only CPUID decides if an instruction is used. ENQCMD is never executed as a test: if the kernel or a hypervisor disables it,
/// ENQCMD raises a signal that looks like a memory fault.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuFeatures {
    /// ENQCMD: submits to shared queues.
    pub enqcmd: bool,
    /// MOVDIR64B: submits to dedicated queues.
    pub movdir64b: bool,
    /// UMONITOR, UMWAIT, TPAUSE: wait for a completion record without a busy loop.
    pub waitpkg: bool,
}

impl CpuFeatures {
    /// Returns the features of the current CPU.
    #[must_use]
    pub fn of_this_cpu() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
            let (leaves, _) = __get_cpuid_max(0);
            if leaves < 7 {
                return Self::default();
            }
            // CPUID.(EAX=7,ECX=0):ECX in Intel's manual: bit 29, bit 28, bit 5.
            let bits = __cpuid_count(7, 0).ecx;
            Self {
                enqcmd: bits >> 29 & 1 == 1,
                movdir64b: bits >> 28 & 1 == 1,
                waitpkg: bits >> 5 & 1 == 1,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::default()
    }

    /// Returns the features in a `/proc/cpuinfo`: the flags that the kernel lets programs use.
    #[must_use]
    pub fn of_cpuinfo(cpuinfo: &str) -> Self {
        let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags"));
        let has = |name| flags.is_some_and(|f| f.split_whitespace().any(|flag| flag == name));
        Self {
            enqcmd: has("enqcmd"),
            movdir64b: has("movdir64b"),
            waitpkg: has("waitpkg"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn cpuid_says_no_less_than_the_kernel() {
        // The kernel clears flags that it does not support; it adds none.
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").expect("/proc/cpuinfo");
        let kernel = CpuFeatures::of_cpuinfo(&cpuinfo);
        let cpu = CpuFeatures::of_this_cpu();
        assert!(cpu.enqcmd >= kernel.enqcmd);
        assert!(cpu.movdir64b >= kernel.movdir64b);
        assert!(cpu.waitpkg >= kernel.waitpkg);
    }

    #[test]
    fn flags_are_whole_words_of_the_flags_line() {
        let text = "model name : enqcmd\nflags\t\t: fpu movdir64bx waitpkg\n";
        let expected = CpuFeatures {
            waitpkg: true,
            ..CpuFeatures::default()
        };
        assert_eq!(CpuFeatures::of_cpuinfo(text), expected);
    }
}
