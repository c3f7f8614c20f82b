//! Compares generated pages of the documentation with the files.

use std::fs;
use std::path::Path;

/// Compares `file` with the generated `text`. If the environment variable `HOTLIFT_WRITE_TABLE` is set, writes the file
/// instead.
///
/// # Panics
/// If the file differs from `text`, or cannot be written.
pub fn check(file: &Path, text: &str) {
    if std::env::var_os("HOTLIFT_WRITE_TABLE").is_some() {
        fs::write(file, text).expect("the page");
    }
    assert!(
        fs::read_to_string(file).unwrap_or_default() == text,
        "{} is old: HOTLIFT_WRITE_TABLE=1 writes it",
        file.display()
    );
}
