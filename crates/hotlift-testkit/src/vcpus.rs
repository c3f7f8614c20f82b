//! How much of a CPU the guest of a test may take.
//!
//! The guest program never halts: it waits for its next tick in a loop, since it has no interrupts. Guests took half of all CPU
//! time of the tests with QEMUs so. A lower priority starves them: pages that a test needs are not written.

use std::path::Path;
use std::process::Command;

/// Gives each vCPU of the QEMU whose process id is in the file `$1` 1 ms in 10 (sched(7), `SCHED_DEADLINE`): a hundred times
/// what it needs for the writes of 10 ms. Where the kernel refuses that, it has as much as it takes.
pub(crate) const LIMIT: &str = r#"
[ -f "$1" ] || exit 0
for task in /proc/"$(cat "$1")"/task/*; do
    case "$(cat "$task"/comm)" in
    "CPU "*KVM)
        chrt --deadline --reset-on-fork --sched-runtime 1000000 --sched-deadline 10000000 --sched-period 10000000 \
            --pid 0 "${task##*/}"
        ;;
    esac
done 2>/dev/null
true"#;

/// Limits the vCPUs of a QEMU of this host.
pub(crate) fn limit(pid_file: &Path) {
    // Without it the test is slower, no more.
    let _ = Command::new("sh")
        .args(["-c", LIMIT, "sh"])
        .arg(pid_file)
        .status();
}
