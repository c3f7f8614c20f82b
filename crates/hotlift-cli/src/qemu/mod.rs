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
pub mod watch;
mod words;

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;

use hotlift_console::error::ConsoleError;
use hotlift_console::signals::OwnFolder;

/// A folder for sockets that only this user can enter, gone when it goes out of scope.
pub fn private_folder() -> Result<OwnFolder, ConsoleError> {
    let mut builder = tempfile::Builder::new();
    builder
        .prefix("hotlift-")
        .permissions(Permissions::from_mode(0o700));
    Ok(OwnFolder::new(builder.tempdir().map_err(no_folder)?))
}

fn no_folder(source: io::Error) -> ConsoleError {
    ConsoleError::Process {
        what: "a folder for sockets",
        source,
    }
}
