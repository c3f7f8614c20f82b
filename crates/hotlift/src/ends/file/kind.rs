//! Checks the kind of a file (regular file, link, device) before it is read or replaced.

use std::fs::{self, File, FileType};
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::fs::{Access, Mode, OFlags};

use super::FileError;

/// Returns the name of a file's kind, e.g. "a FIFO"; `None` for a regular file.
pub(super) fn not_regular(kind: FileType) -> Option<&'static str> {
    let names = [
        (kind.is_symlink(), "a symbolic link"),
        (kind.is_dir(), "a directory"),
        (kind.is_fifo(), "a FIFO"),
        (kind.is_socket(), "a socket"),
        (kind.is_block_device(), "a block device"),
        (kind.is_char_device(), "a character device"),
    ];
    let named = names.into_iter().find_map(|(is, name)| is.then_some(name));
    named.or_else(|| (!kind.is_file()).then_some("not a regular file"))
}

/// Opens a file for random access, and never blocks. (A blocking open of a FIFO waits until another process writes to the
/// FIFO.)
///
/// # Errors
/// - [`FileError::NotReadable`] if the path is neither a regular file nor a block device.
/// - [`FileError::Empty`] for a regular file without bytes.
/// - [`FileError::Read`] for an error of the system.
pub fn open(path: &Path) -> Result<File, FileError> {
    let check = |kind: FileType| match not_regular(kind).filter(|_| !kind.is_block_device()) {
        Some(is) => Err(FileError::NotReadable {
            path: path.to_owned(),
            is,
        }),
        None => Ok(()),
    };
    let failed = |source| FileError::read(path, source);
    // A socket cannot be opened, and opening a device may have effects.
    check(fs::metadata(path).map_err(failed)?.file_type())?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.map_err(|errno| failed(errno.into()))?);
    // Checked again: another file may have replaced the first one.
    let there = file.metadata().map_err(failed)?;
    check(there.file_type())?;
    // The metadata of a block device has no length.
    if there.is_file() && there.len() == 0 {
        return Err(FileError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(file)
}

/// Returns the folder of a file; `.` for a path without a folder.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Checks that a save can create the file `path`, or replace an existing file. Called before the save begins.
///
/// # Errors
/// - [`FileError::NotReplaced`] if `path` exists and is not a regular file.
/// - [`FileError::Write`] if the folder does not exist or is not writable.
pub fn check_target(path: &Path) -> Result<(), FileError> {
    let failed = |source| FileError::Write {
        path: path.to_owned(),
        source,
    };
    let access = Access::WRITE_OK | Access::EXEC_OK;
    rustix::fs::access(folder_of(path), access).map_err(|errno| failed(errno.into()))?;
    let there = match fs::symlink_metadata(path) {
        Ok(there) => there,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(failed(source)),
    };
    match not_regular(there.file_type()) {
        Some(is) => Err(FileError::NotReplaced {
            path: path.to_owned(),
            is,
        }),
        None => Ok(()),
    }
}
