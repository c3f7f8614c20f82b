//! Certificates for the runs over TLS of one call: a CA, and what it gives to this host.

use std::path::Path;
use std::process::{Command, Stdio};

use hotlift_command::migration_args::MigrationArgs;
use hotlift_terminal::error::TerminalError;
use tempfile::TempDir;

use crate::cell::Cell;
use crate::error::BenchError;
use crate::record::Row;

/// Option that names the folder.
pub const OPTION: &str = "tls-creds";

/// As its value: a folder that is made for this call. Records keep the word, so that runs of two calls compare.
pub const CERTIFICATES: &str = "certificates";

/// Every certificate has this name, whatever address is connected to.
pub const NAME: &str = "localhost";

/// The folder; removed when it goes out of scope.
#[derive(Debug)]
pub struct Certificates(TempDir);

impl Certificates {
    /// Makes them by the 'certs' of `hotlift`.
    ///
    /// # Errors
    /// If they cannot be made.
    pub fn make(hotlift: &Path) -> Result<Self, BenchError> {
        let failed = TerminalError::process("hotlift certs");
        let folder = TempDir::with_prefix("hotlift-certs-").map_err(failed)?;
        for words in [["init", "--name=hotlift-bench"], ["host", NAME]] {
            let made = Command::new(hotlift)
                .arg("certs")
                .args(words)
                .arg("--dir")
                .arg(folder.path())
                .stdin(Stdio::null())
                .output()
                .map_err(failed)?;
            if !made.status.success() {
                let said = String::from_utf8_lossy(&made.stderr);
                let line = said.lines().last().unwrap_or_default();
                return Err(failed(std::io::Error::other(line)).into());
            }
        }
        Ok(Self(folder))
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    /// `cell` with the folder for the word.
    pub fn fill_in(&self, cell: &Cell) -> Cell {
        let folder = self.folder().display().to_string();
        let migration = cell.migration.with(OPTION, &folder);
        Cell {
            migration: migration.with("tls-hostname", NAME),
            ..cell.clone()
        }
    }
}

/// Whether a run went over TLS with them.
pub fn wants_row(row: &Row) -> bool {
    row.options
        .get(OPTION)
        .is_some_and(|value| value == CERTIFICATES)
}

/// Whether `migration` is to go over TLS with certificates of the bench.
pub fn wants(migration: &MigrationArgs) -> bool {
    let is = |(name, value): &(String, String)| name == OPTION && value == CERTIFICATES;
    migration.given().iter().any(is)
}
