//! A file that appears under its name only when it is whole.

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

/// Slices that are handed to the kernel at once.
const SLICES: usize = 16;

/// Bytes set aside for what is written after the source was told that its guest is safe: EOF, a VM description of 100 KB to
/// some MB, and a table of contents.
const END: u64 = 4 << 20;

/// Files that this process has open, by number.
const OPEN_FILES: &str = "/proc/self/fd";

/// Written without a name where the file system can (`O_TMPFILE`), else under a random one that did not
/// exist; nothing that somebody has put into the folder is opened. It is gone unless
/// [`PartialFile::publish`] gives it its name.
#[derive(Debug)]
pub(crate) struct PartialFile {
    file: File,
    path: PathBuf,
    folder: PathBuf,
    /// The folder, open: a rename is on disk when it is.
    folder_file: File,
    name: Mutex<Name>,
}

#[derive(Debug)]
enum Name {
    /// A process that ends, however, leaves nothing.
    None,
    /// A random name in the file's folder, removed with this value.
    Random(TempPath),
    /// It has got its name, or was given up.
    Settled,
}

impl PartialFile {
    /// Creates the file, readable by its owner only: a guest's memory holds its secrets.
    ///
    /// # Errors
    /// Also if what has its name is no regular file of this user: [`FileError::NotReplaced`].
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
            // Leading empty ones are not for the kernel.
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

    /// Returns when everything written is on disk, blocks for the file's end are set aside at `position`, where the file
    /// system can, and the file has a name that only has to be changed: what can fail for lack of space or rights is done.
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
                // Fails if the name is there, and then another one is tried.
                let linked = rustix::fs::linkat(CWD, &open, CWD, to, AtFlags::SYMLINK_FOLLOW);
                linked.map_err(io::Error::from)
            };
            let linked = names().make_in(&self.folder, link)?;
            *name = Name::Random(linked.into_temp_path());
        }
        Ok(())
    }

    /// The file is whole, with `length` bytes: puts it on disk and gives it its name, in the place of
    /// what had that name.
    ///
    /// # Errors
    /// Until the file has its name; it is given up then.
    pub(crate) fn publish(&self, length: u64) -> Result<(), FileError> {
        let mut name = self.lock();
        // Also gives back what was reserved and not used.
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
        // The file is there, whole and on disk, and its guest may be nowhere else: that the disk was slow
        // to take the name is no failure.
        let _ = self.folder_file.sync_all();
        Ok(())
    }

    /// Removes the file, unless it has got its name.
    pub(crate) fn give_up(&self) {
        *self.lock() = Name::Settled;
    }

    pub(crate) fn failed(&self, source: io::Error) -> FileError {
        write_error(&self.path, source)
    }
}

/// A new file in `folder`.
fn open_in(folder: &Path) -> io::Result<(File, Name)> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    // Without `/proc` it could not get a name later.
    if Path::new(OPEN_FILES).exists() {
        match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => return Ok((file.into(), Name::None)),
            // The file system has none of these (NFS, some of FUSE).
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    // O_CREAT and O_EXCL, mode 0600.
    let (file, path) = names().tempfile_in(folder)?.into_parts();
    Ok((file, Name::Random(path)))
}

/// Names of files on their way. Short, whatever the name in the end: it may be as long as names may be.
fn names() -> tempfile::Builder<'static, 'static> {
    let mut names = tempfile::Builder::new();
    names.prefix(".hotlift-").suffix(".partial");
    names
}

/// Only a regular file of the new one's owner is replaced. A device must not be, a link is rarely meant
/// to be, and what belongs to somebody else is not this user's to end.
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
