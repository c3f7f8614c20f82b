//! A file that is read from any place.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::FileError;

/// A file that is open, and its name for errors.
pub(crate) struct PlaceReader {
    file: File,
    path: PathBuf,
    length: u64,
}

impl PlaceReader {
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        let failed = |source| FileError::Read {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        Ok(Self {
            file,
            path: path.to_owned(),
            length,
        })
    }

    /// Bytes of the file, when it was opened.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Reads what there is from `position` on, up to the length of `into`; how much that was.
    pub(crate) fn read_some(&self, into: &mut [u8], position: u64) -> Result<usize, FileError> {
        let mut filled = 0;
        while filled < into.len() {
            match self
                .file
                .read_at(&mut into[filled..], position + filled as u64)
            {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(FileError::Read {
                        path: self.path.clone(),
                        source,
                    });
                }
            }
        }
        Ok(filled)
    }

    /// Fills `into` from `position` on.
    ///
    /// # Errors
    /// [`FileError::Truncated`] if the file ends before.
    pub(crate) fn read_exact(&self, into: &mut [u8], position: u64) -> Result<(), FileError> {
        if self.read_some(into, position)? < into.len() {
            return Err(FileError::Truncated { position });
        }
        Ok(())
    }
}
