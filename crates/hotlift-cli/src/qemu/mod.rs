//! Steering QEMUs: what the commands that hold a QMP socket share.

pub mod control;
pub mod destination;
pub mod guard;
pub mod incoming;
pub mod outgoing;
pub mod process;
pub mod result;
pub mod settings;
pub mod source;
pub mod uuid;
pub mod watch;

use tempfile::TempDir;

use crate::error::CommandError;

/// A folder for sockets that only this user can enter, gone when it goes out of scope.
pub fn private_folder() -> Result<TempDir, CommandError> {
    let folder = tempfile::Builder::new().prefix("hotlift-").tempdir();
    folder.map_err(|source| CommandError::Process {
        what: "a folder for sockets",
        source,
    })
}
