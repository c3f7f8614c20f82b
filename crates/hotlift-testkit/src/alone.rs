//! Runs a test in a separate process, and reads the memory use of a process.
//!
//! Tests run concurrently in one process, so process-wide values (resident memory, threads) include other tests.

use std::fs;
use std::process::Command;

/// Name of the environment variable that is set in a process for one test.
const VARIABLE: &str = "HOTLIFT_TEST_ALONE";

/// Runs the rest of this test in a separate process. Must be the first statement of a test that returns nothing.
#[macro_export]
macro_rules! alone {
    () => {
        fn here() {}
        if $crate::alone::has_run_elsewhere(::std::any::type_name_of_val(&here)) {
            return;
        }
    };
}

/// Implements [`alone!`](crate::alone!). Returns false in the separate process of the test. Otherwise starts this
/// process, waits for its success, and returns true. `here` is a function inside the test's function.
///
/// # Panics
/// If the test fails in the separate process, or cannot be run.
#[must_use]
pub fn has_run_elsewhere(here: &str) -> bool {
    if std::env::var_os(VARIABLE).is_some() {
        return false;
    }
    // The name is CRATE::MODULE::TEST::here, but libtest omits the crate.
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
    // libtest also succeeds if no test matches the filter.
    let has_run = printed.contains("test result: ok. 1 passed");
    assert!(
        output.status.success() && has_run,
        "{test}: {printed}\n{errors}"
    );
    true
}

/// Returns the resident memory of this process, in bytes.
///
/// # Panics
/// If the kernel does not report the value.
#[must_use]
pub fn resident() -> u64 {
    status("VmRSS:")
}

/// Returns the peak of this process's resident memory since the last call, in bytes.
///
/// # Panics
/// If the kernel does not report the value.
#[must_use]
pub fn peak() -> u64 {
    let peak = status("VmHWM:");
    // proc_pid_clear_refs(5): resets the peak to the current value.
    let reset = fs::write("/proc/self/clear_refs", "5");
    reset.unwrap_or_else(|error| panic!("clear_refs: {error}"));
    peak
}

/// Returns the value `name` from this process's status file, converted from KiB to bytes.
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
        // The kernel's count is accurate to a few pages per CPU.
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
