//! Kinds of files, and which of them can hold a save file.

use std::fs::{self, File, FileType};
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::fs::{Access, Mode, OFlags};

use super::FileError;

/// Name of a kind that is not a regular file; `None` for a regular file.
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
    named.or_else(|| (!kind.is_file()).then_some("no regular file"))
}

/// Opens a file to be read at any position. Never waits: the open of a FIFO would, until another process writes to it.
///
/// # Errors
/// [`FileError::NotReadable`] for anything else than a regular file or a block device; [`FileError::Read`].
pub fn open(path: &Path) -> Result<File, FileError> {
    let check = |kind: FileType| match not_regular(kind).filter(|_| !kind.is_block_device()) {
        Some(is) => Err(FileError::NotReadable {
            path: path.to_owned(),
            is,
        }),
        None => Ok(()),
    };
    let failed = |source| FileError::read(path, source);
    // A socket cannot be opened, and the open of a device may have effects.
    check(fs::metadata(path).map_err(failed)?.file_type())?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.map_err(|errno| failed(errno.into()))?);
    // Another file may have taken the name in between.
    let there = file.metadata().map_err(failed)?;
    check(there.file_type())?;
    // A block device has no length here.
    if there.is_file() && there.len() == 0 {
        return Err(FileError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(file)
}

/// The folder that a file is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Checks that a save could create its file, or replace what has its name, before anything else is begun.
///
/// # Errors
/// [`FileError::NotReplaced`] for anything else than a regular file; [`FileError::Write`] where the folder is not there, or
/// takes no file.
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
