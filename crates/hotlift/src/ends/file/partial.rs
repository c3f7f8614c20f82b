//! A file that appears under its name only when it is complete.

use std::fs::{self, File};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use tempfile::TempPath;

use super::FileError;
use super::kind::{check_target, folder_of};

/// Maximum number of slices in one system call.
const SLICES: usize = 16;

/// Disk space reserved for the end of the file, in bytes: EOF, a VM description of 100 KB to some MB, and a table of contents.
/// The end is written after the source has learned that its guest is safe, so a full disk must be noticed before.
const END: u64 = 4 << 20;

/// File descriptors of this process, by number.
const OPEN_FILES: &str = "/proc/self/fd";

/// A file without a name where the file system supports it (`O_TMPFILE`), else with a new random name. No existing file in the
/// folder is opened. The file disappears unless [`PartialFile::publish`] gives it its name.
#[derive(Debug)]
pub(crate) struct PartialFile {
    file: File,
    path: PathBuf,
    folder: PathBuf,
    /// The open folder. Its sync makes the rename of the file permanent.
    folder_file: File,
    name: Mutex<Name>,
}

#[derive(Debug)]
enum Name {
    /// The file has no name. It disappears when the process ends, even if the process is killed.
    None,
    /// Random name in the file's folder, removed when this value is dropped.
    Random(TempPath),
    /// The file has its name, or was discarded.
    Settled,
}

impl PartialFile {
    /// Creates the file, readable by its owner only, because a guest's memory holds secrets.
    ///
    /// # Errors
    /// - [`FileError::Write`] if the file cannot be created.
    /// - [`FileError::NotReplaced`] if `path` exists and is not a regular file of this user.
    pub(crate) fn create(path: &Path) -> Result<Self, FileError> {
        let failed = |source| write_error(path, source);
        let folder = folder_of(path);
        let folder_file = File::open(folder).map_err(failed)?;
        let (file, name) = open_in(folder).map_err(failed)?;
        check_replaceable(path, &file)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            folder: folder.to_owned(),
            folder_file,
            name: Mutex::new(name),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Name> {
        self.name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Writes `parts`, one after the other, at byte `position`.
    pub(crate) fn write_at(&self, parts: &[&[u8]], mut position: u64) -> Result<(), FileError> {
        for parts in parts.chunks(SLICES) {
            let mut slices = [IoSlice::new(&[]); SLICES];
            for (slice, part) in slices.iter_mut().zip(parts) {
                *slice = IoSlice::new(part);
            }
            let mut slices = &mut slices[..parts.len()];
            // Skips empty slices at the front.
            IoSlice::advance_slices(&mut slices, 0);
            while !slices.is_empty() {
                match rustix::io::pwritev(self.file.as_fd(), slices, position) {
                    Ok(0) => return Err(self.failed(io::ErrorKind::WriteZero.into())),
                    Ok(written) => {
                        IoSlice::advance_slices(&mut slices, written);
                        position += written as u64;
                    }
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(self.failed(errno.into())),
                }
            }
        }
        Ok(())
    }

    /// Does everything that can fail for lack of space or permissions:
    ///
    /// - puts all data on disk
    /// - reserves space for the file's end at `position`, if the file system can
    /// - gives the file a random name
    pub(crate) fn settle(&self, position: u64) -> Result<(), FileError> {
        match rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, position, END) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::INTR) => {}
            Err(errno) => return Err(self.failed(errno.into())),
        }
        self.file
            .sync_data()
            .and_then(|()| self.give_random_name(&mut self.lock()))
            .and_then(|()| self.folder_file.sync_all())
            .map_err(|source| self.failed(source))
    }

    fn give_random_name(&self, name: &mut Name) -> io::Result<()> {
        if let Name::None = name {
            let open = format!("{OPEN_FILES}/{}", self.file.as_raw_fd());
            let link = |to: &Path| {
                // Fails if the name exists; `make_in` then tries another name.
                let linked = rustix::fs::linkat(CWD, &open, CWD, to, AtFlags::SYMLINK_FOLLOW);
                linked.map_err(io::Error::from)
            };
            let linked = names().make_in(&self.folder, link)?;
            *name = Name::Random(linked.into_temp_path());
        }
        Ok(())
    }

    /// Completes the file with `length` bytes: puts it on disk and gives it its name, replacing an existing file.
    ///
    /// # Errors
    /// Errors occur only before the file gets its name. The file is then discarded.
    pub(crate) fn publish(&self, length: u64) -> Result<(), FileError> {
        let mut name = self.lock();
        // Also frees reserved space that was not used.
        self.file
            .set_len(length)
            .and_then(|()| self.file.sync_all())
            .and_then(|()| self.give_random_name(&mut name))
            .map_err(|source| self.failed(source))?;
        check_replaceable(&self.path, &self.file)?;
        let Name::Random(random) = std::mem::replace(&mut *name, Name::Settled) else {
            return Err(FileError::Closed);
        };
        random
            .persist(&self.path)
            .map_err(|refused| self.failed(refused.error))?;
        // No error: the file is complete and on disk, and may be the only copy of the guest. So a failed sync of its name must
        // not fail the save.
        let _ = self.folder_file.sync_all();
        Ok(())
    }

    /// Removes the file, unless [`PartialFile::publish`] has given it its name.
    pub(crate) fn discard(&self) {
        *self.lock() = Name::Settled;
    }

    pub(crate) fn failed(&self, source: io::Error) -> FileError {
        write_error(&self.path, source)
    }
}

/// Creates a new file in `folder`, without a name if possible.
fn open_in(folder: &Path) -> io::Result<(File, Name)> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    // Without `/proc`, an unnamed file could not get a name later.
    if Path::new(OPEN_FILES).exists() {
        match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => return Ok((file.into(), Name::None)),
            // The file system does not support it (NFS, some of FUSE).
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    // O_CREAT and O_EXCL, mode 0600.
    let (file, path) = names().tempfile_in(folder)?.into_parts();
    Ok((file, Name::Random(path)))
}

/// Returns a generator of temporary names. They are short, because the final name may have the maximum length.
fn names() -> tempfile::Builder<'static, 'static> {
    let mut names = tempfile::Builder::new();
    names.prefix(".hotlift-").suffix(".partial");
    names
}

/// Checks that `path` does not exist, or is a regular file with the same owner as `file`. A save must not replace a device, a
/// link, or a file of another user.
fn check_replaceable(path: &Path, file: &File) -> Result<(), FileError> {
    check_target(path)?;
    let failed = |source| write_error(path, source);
    let there = match fs::symlink_metadata(path) {
        Ok(there) => there,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if there.uid() == file.metadata().map_err(failed)?.uid() {
        return Ok(());
    }
    Err(FileError::NotReplaced {
        path: path.to_owned(),
        is: "a file of another user",
    })
}

fn write_error(path: &Path, source: io::Error) -> FileError {
    FileError::Write {
        path: path.to_owned(),
        source,
    }
}
