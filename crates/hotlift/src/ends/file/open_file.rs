//! Random access to a file on this host or on a file server.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hotlift_wire::limits::FILE_READ;

use super::FileError;
use super::exchange::Range;
use super::kind;
use super::location::Location;
use super::remote::RemoteReader;
use crate::control::Control;

/// An open file, and its name for errors.
pub(crate) struct OpenFile {
    bytes: Bytes,
    length: u64,
}

/// Source of the bytes.
enum Bytes {
    Local { file: File, path: PathBuf },
    Remote(Box<RemoteReader>),
}

impl OpenFile {
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        Self::of(kind::open(path)?, path)
    }

    /// Wraps a file that is already open.
    pub(crate) fn of(file: File, path: &Path) -> Result<Self, FileError> {
        // The metadata of a block device has no length.
        let length = (&file)
            .seek(SeekFrom::End(0))
            .map_err(|source| FileError::read(path, source))?;
        let path = path.to_owned();
        Ok(Self {
            bytes: Bytes::Local { file, path },
            length,
        })
    }

    /// Opens the file at `location`. Cancelling `control` ends the wait for a file server.
    pub(crate) fn open_at(location: &Location, control: &Control) -> Result<Self, FileError> {
        let file = match location {
            Location::Path(path) => return Self::open(path),
            Location::Server(file) => RemoteReader::open(file, control)?,
        };
        Ok(Self {
            length: file.length(),
            bytes: Bytes::Remote(Box::new(file)),
        })
    }

    /// Returns the length of the file in bytes, at the time of opening.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Returns the remote reader, if the file is on another host.
    pub(crate) fn remote(&self) -> Option<&RemoteReader> {
        match &self.bytes {
            Bytes::Local { .. } => None,
            Bytes::Remote(file) => Some(file),
        }
    }

    /// Sets the time for which reads retry after the connection to the file server is lost. Does nothing for a local file.
    pub(crate) fn persist(&self, timeout: Duration) {
        if let Some(file) = self.remote() {
            file.persist(timeout);
        }
    }

    /// Reads bytes from `position` on into `into`, and returns their number. It is less than `into.len()` only at the end of
    /// the file.
    pub(crate) fn read_some(&self, into: &mut [u8], position: u64) -> Result<usize, FileError> {
        match &self.bytes {
            Bytes::Local { file, path } => {
                read_local(file, into, position).map_err(|source| FileError::read(path, source))
            }
            Bytes::Remote(file) => {
                let pieces = into.chunks_mut(FILE_READ);
                let starts = (position..).step_by(FILE_READ);
                let mut ranges: Vec<_> = starts.zip(pieces).map(Range::new).collect();
                file.read(&mut ranges)?;
                Ok(ranges.iter().map(|range| range.got).sum())
            }
        }
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

fn read_local(file: &File, into: &mut [u8], position: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match file.read_at(&mut into[filled..], position + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
