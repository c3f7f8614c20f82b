//! The `hotlift` command: the bench uses its guests, relays and certificates.

use std::path::{Path, PathBuf, absolute};
use std::process::Command;

use rustix::fs::{Access, access};

use crate::error::BenchError;

/// File name of the command.
const NAME: &str = "hotlift";

/// The command.
#[derive(Debug)]
pub struct Hotlift {
    /// Path of its file.
    pub path: PathBuf,
    /// Its version.
    pub version: String,
}

impl Hotlift {
    /// Finds the command: at `given`, else in the folder of this program, else on PATH.
    ///
    /// # Errors
    /// If there is none, or if it does not print its version.
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
