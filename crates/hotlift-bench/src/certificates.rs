//! TLS certificates for one call of `hotlift-bench`: a CA, and the host certificates that the CA issues.

use std::path::Path;
use std::process::{Command, Stdio};

use hotlift_command::migration_args::{Given, MigrationArgs};
use hotlift_terminal::error::TerminalError;
use tempfile::TempDir;

use crate::cell::Cell;
use crate::error::BenchError;
use crate::record::Row;

/// Name of the option that sets the folder of the certificates.
pub const OPTION: &str = "tls-creds";

/// Placeholder for the folder in settings and records. Each call of `hotlift-bench` creates a new folder. The
/// placeholder makes runs of two calls comparable.
pub const CERTIFICATES: &str = "certificates";

/// Host name in every certificate. The client expects this name at any address.
pub const NAME: &str = "localhost";

/// Temporary folder with the certificates; removed on drop.
#[derive(Debug)]
pub struct Certificates(TempDir);

impl Certificates {
    /// Creates the certificates with `hotlift certs`.
    ///
    /// # Errors
    /// If the command fails.
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
                let output = String::from_utf8_lossy(&made.stderr);
                let line = output.lines().last().unwrap_or_default();
                return Err(failed(std::io::Error::other(line)).into());
            }
        }
        Ok(Self(folder))
    }

    /// Returns the path of the folder.
    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    /// Returns `cell` with the real path of the folder instead of the placeholder [`CERTIFICATES`].
    pub fn fill_in(&self, cell: &Cell) -> Cell {
        let folder = self.folder().display().to_string();
        let mut cell = cell.clone();
        for (name, value) in [(OPTION, folder.as_str()), ("tls-hostname", NAME)] {
            // These options accept any text.
            if let Ok(given) = Given::parse(name, value) {
                cell.migration.set(given);
            }
        }
        cell
    }
}

/// Returns true if a run used TLS with certificates that the bench created.
pub fn wants_row(row: &Row) -> bool {
    row.options
        .get(OPTION)
        .is_some_and(|value| value == CERTIFICATES)
}

/// Returns true if `migration` requests TLS with certificates that the bench creates.
pub fn wants(migration: &MigrationArgs) -> bool {
    migration.values().tls.creds == CERTIFICATES
}
