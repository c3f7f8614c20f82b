//! A file that appears under its name only when it is whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

use super::FileError;

/// Slices that are handed to the kernel at once.
const SLICES: usize = 16;

/// Written as `NAME.partial`, and gone unless [`PartialFile::publish`] gives it its name: a process
/// that is killed leaves nothing that looks whole.
#[derive(Debug)]
pub(super) struct PartialFile {
    file: File,
    path: PathBuf,
    partial: PathBuf,
    /// It has got its name, or was given up.
    settled: AtomicBool,
}

impl PartialFile {
    /// Creates the file, readable by its owner only: a guest's memory holds its secrets. What a killed
    /// process has left is overwritten, what a living one writes is not.
    pub(super) fn create(path: &Path) -> Result<Self, FileError> {
        let mut name = path.as_os_str().to_owned();
        name.push(".partial");
        let partial = PathBuf::from(name);
        let failed = |source| FileError::Write {
            path: partial.clone(),
            source,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&partial)
            .map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(FileError::InUse { path: partial }),
            Err(errno) => return Err(failed(errno.into())),
        }
        // Its last owner may have given it its name meanwhile: what is locked is then a whole file.
        if !is_at(&file, &partial).map_err(failed)? {
            return Err(FileError::InUse { path: partial });
        }
        file.set_len(0).map_err(failed)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            partial,
            settled: AtomicBool::new(false),
        })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Writes `parts`, one after the other, at byte `position`.
    pub(super) fn write_at(&self, parts: &[&[u8]], mut position: u64) -> Result<(), FileError> {
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

    /// Sets blocks aside for `length` bytes from `position` on, where the file system can: what is
    /// written there later cannot fail for lack of space.
    pub(super) fn reserve(&self, position: u64, length: u64) -> Result<(), FileError> {
        match rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, position, length) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::INTR) => Ok(()),
            Err(errno) => Err(self.failed(errno.into())),
        }
    }

    /// Returns when everything written is on disk.
    pub(super) fn sync(&self) -> Result<(), FileError> {
        self.file.sync_data().map_err(|source| self.failed(source))
    }

    /// The file is whole, with `length` bytes: puts it on disk and gives it its name, in the place of
    /// what had that name.
    pub(super) fn publish(&self, length: u64) -> Result<(), FileError> {
        let publish = || {
            // Also gives back what was reserved and not used.
            self.file.set_len(length)?;
            self.file.sync_all()?;
            fs::rename(&self.partial, &self.path)?;
            self.settled.store(true, Ordering::Release);
            let folder = match self.path.parent() {
                Some(folder) if !folder.as_os_str().is_empty() => folder,
                _ => Path::new("."),
            };
            File::open(folder)?.sync_all()
        };
        publish().map_err(|source| self.failed(source))
    }

    /// Removes the file, unless it has got its name.
    pub(super) fn give_up(&self) {
        if !self.settled.swap(true, Ordering::AcqRel) {
            // Somebody else may have removed it; more cannot be done.
            let _ = fs::remove_file(&self.partial);
        }
    }

    pub(super) fn failed(&self, source: io::Error) -> FileError {
        FileError::Write {
            path: self.partial.clone(),
            source,
        }
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Whether `path` is the name of `file`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (opened, named) = (file.metadata()?, std::fs::metadata(path));
    match named {
        Ok(named) => Ok((opened.dev(), opened.ino()) == (named.dev(), named.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
