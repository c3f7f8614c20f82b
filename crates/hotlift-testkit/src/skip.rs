//! Tests that this machine cannot run, noted where the test detects it.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};

/// File to which every skip is appended, if the variable is set. `.ci/run` sets it, and fails on a key that is not in
/// `.ci/skips`.
pub const VARIABLE: &str = "HOTLIFT_SKIPS";

/// Notes that a test, or a part of it, cannot run here: a short key for the missing thing, and the reason, as for [`format!`].
/// The test itself must continue or return.
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

/// Writes `skip: KEY: REASON (FILE:LINE)` to stderr, past the capture of `cargo test`, and to the file that
/// [`VARIABLE`] names.
///
/// # Panics
/// If that file cannot be written: a skip must not get lost.
pub fn note(key: &str, reason: fmt::Arguments<'_>, file: &str, line: u32) {
    let reason = reason.to_string().replace('\n', " ");
    let text = format!("skip: {key}: {reason} ({file}:{line})\n");
    // Not by `eprint!`, which libtest captures. The reader may be gone.
    let _ = io::stderr().lock().write_all(text.as_bytes());
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else {
        return;
    };
    let opened = OpenOptions::new().create(true).append(true).open(&path);
    // One write: tests of other processes append too.
    if let Err(error) = opened.and_then(|mut skips| skips.write_all(text.as_bytes())) {
        panic!("cannot note a skip in {}: {error}", path.display());
    }
}
