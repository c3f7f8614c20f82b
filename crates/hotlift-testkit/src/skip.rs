//! Notes tests that this machine cannot run, when the test detects the reason.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};

/// Environment variable with the file to which every skip is appended. `.ci/run` sets it, and fails on a key that is
/// not in `.ci/skips`.
pub const VARIABLE: &str = "HOTLIFT_SKIPS";

/// Notes that a test, or a part of it, cannot run on this machine. The arguments are a short key for the missing thing,
/// and the reason, formatted like [`format!`]. The macro does not end the test.
///
/// ```
/// hotlift_testkit::skip!("dsa", "no work queue in {}", "/dev/dsa");
/// ```
#[macro_export]
macro_rules! skip {
    ($key:expr, $($reason:tt)+) => {
        $crate::skip::note($key, ::std::format_args!($($reason)+), ::std::file!(), ::std::line!())
    };
}

/// Writes `skip: KEY: REASON (FILE:LINE)` to standard error, where `cargo test` does not capture it. Also appends the
/// line to the file that the environment variable [`VARIABLE`] names.
///
/// # Panics
/// If this file cannot be written, because a skip must not be lost.
pub fn note(key: &str, reason: fmt::Arguments<'_>, file: &str, line: u32) {
    let reason = reason.to_string().replace('\n', " ");
    let text = format!("skip: {key}: {reason} ({file}:{line})\n");
    // `eprint!` is not used, because libtest captures it. The error of a closed stderr is ignored.
    let _ = io::stderr().lock().write_all(text.as_bytes());
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else {
        return;
    };
    let opened = OpenOptions::new().create(true).append(true).open(&path);
    // One write call, because tests in other processes append too.
    if let Err(error) = opened.and_then(|mut skips| skips.write_all(text.as_bytes())) {
        panic!("cannot note a skip in {}: {error}", path.display());
    }
}
