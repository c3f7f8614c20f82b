//! A file or folder that cannot be used.

use std::io;
use std::path::{Path, PathBuf};

/// A failed use of a file or folder.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {}", path.display())]
pub struct FileError {
    /// The failed operation, as a verb: `read`, `write`.
    pub verb: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// The system's error.
    #[source]
    pub source: io::Error,
}

impl FileError {
    /// Creates the error of a failed operation on `path`, for [`Result::map_err`].
    pub fn of(verb: &'static str, path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self {
            verb,
            path: path.to_owned(),
            source,
        }
    }

    /// Creates the error of a failed read of `path`, for [`Result::map_err`].
    pub fn reading(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        Self::of("read", path)
    }

    /// Creates the error of a failed write of `path`, for [`Result::map_err`].
    pub fn writing(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        Self::of("write", path)
    }

    /// Returns true if the file does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}
