//! A test in a process of its own, and the memory of a process.
//!
//! Tests run concurrently in one process, so process-wide values (resident memory, threads) belong to no single test.

use std::fs;
use std::process::Command;

/// Set in a process that runs one test.
const VARIABLE: &str = "HOTLIFT_TEST_ALONE";

/// Runs the rest of this test in a process of its own. Must be first in a test that returns nothing.
#[macro_export]
macro_rules! alone {
    () => {
        fn here() {}
        if $crate::alone::has_run_elsewhere(::std::any::type_name_of_val(&here)) {
            return;
        }
    };
}

/// Implements [`alone!`](crate::alone!): returns false in a process that was started for the test. Otherwise runs it in one,
/// and panics if it fails there. `here` is a function inside the test's function.
///
/// # Panics
/// If the test fails, or cannot be run.
#[must_use]
pub fn has_run_elsewhere(here: &str) -> bool {
    if std::env::var_os(VARIABLE).is_some() {
        return false;
    }
    // CRATE::MODULE::TEST::here: libtest does not name the crate.
    let test = here
        .split_once("::")
        .and_then(|(_, path)| path.rsplit_once("::"));
    let Some((test, _)) = test else {
        panic!("{here} is in no test");
    };
    let program = std::env::current_exe();
    let mut command = Command::new(program.unwrap_or_else(|error| panic!("{error}")));
    command.args(["--exact", test, "--nocapture"]);
    let output = command.env(VARIABLE, "1").output();
    let output = output.unwrap_or_else(|error| panic!("{test}: {error}"));
    let [printed, errors] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    // A filter without a matching test succeeds too.
    let has_run = printed.contains("test result: ok. 1 passed");
    assert!(
        output.status.success() && has_run,
        "{test}: {printed}\n{errors}"
    );
    true
}

/// Returns the resident bytes of this process.
///
/// # Panics
/// If the kernel does not report them.
#[must_use]
pub fn resident() -> u64 {
    status("VmRSS:")
}

/// Returns the peak of resident bytes of this process since the last call.
///
/// # Panics
/// If the kernel does not report it.
#[must_use]
pub fn peak() -> u64 {
    let peak = status("VmHWM:");
    // proc_pid_clear_refs(5): resets the peak to the current value.
    let reset = fs::write("/proc/self/clear_refs", "5");
    reset.unwrap_or_else(|error| panic!("clear_refs: {error}"));
    peak
}

/// Returns a value in KiB of this process's status, in bytes.
fn status(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let value = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = value.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_else(|| panic!("no {name} in {status}")) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_memory_is_resident_and_its_peak_stays_until_read() {
        alone!();
        // The kernel's count is accurate to some pages per CPU.
        const HALF: u64 = 32 << 20;
        let _ = peak();
        let before = resident();
        let memory = vec![1_u8; 64 << 20];
        assert!(resident() > before + HALF);
        drop(std::hint::black_box(memory));
        assert!(resident() < before + HALF);
        assert!(peak() > before + HALF);
        assert!(peak() < before + HALF);
    }

    #[test]
    #[should_panic(expected = "running 0 tests")]
    fn an_unknown_test_name_is_a_failure() {
        let _ = has_run_elsewhere("hotlift_testkit::alone::tests::nothing::here");
    }
}
