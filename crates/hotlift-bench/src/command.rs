//! Finds the `hotlift` command, which provides the guests, relays and certificates of the bench.

use std::path::{Path, PathBuf, absolute};
use std::process::Command;

use rustix::fs::{Access, access};

use crate::error::BenchError;

/// File name of the `hotlift` command.
const NAME: &str = "hotlift";

/// The `hotlift` command to measure.
#[derive(Debug)]
pub struct Hotlift {
    /// Path of the executable file.
    pub path: PathBuf,
    /// Version of the command.
    pub version: String,
}

impl Hotlift {
    /// Finds the command: the path `given`; without one, `hotlift` in the folder of this program, then in the folders
    /// of PATH.
    ///
    /// # Errors
    /// If there is no such file, or if its output for `--version` is not a version of hotlift.
    pub fn find(given: Option<&Path>) -> Result<Self, BenchError> {
        let path = match given {
            Some(path) => absolute(path).unwrap_or_else(|_| path.to_owned()),
            None => installed().ok_or(BenchError::NoHotlift)?,
        };
        match Command::new(&path).arg("--version").output() {
            Ok(output) => {
                let output = String::from_utf8_lossy(&output.stdout);
                let version = output
                    .trim_end()
                    .strip_prefix("hotlift ")
                    .map(str::to_owned);
                let version =
                    version.ok_or_else(|| BenchError::NotHotlift { path: path.clone() })?;
                Ok(Self { path, version })
            }
            Err(source) => Err(BenchError::RunHotlift { path, source }),
        }
    }
}

/// Returns the first file with the command's name that this process may execute.
fn installed() -> Option<PathBuf> {
    let own = std::env::current_exe().ok();
    let own = own
        .iter()
        .filter_map(|file| file.parent())
        .map(Path::to_owned);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let files = own
        .chain(std::env::split_paths(&path))
        .map(|folder| folder.join(NAME));
    let can_run = |file: &PathBuf| file.is_file() && access(file, Access::EXEC_OK).is_ok();
    files.into_iter().find(can_run)
}
