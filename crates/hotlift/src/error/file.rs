//! Errors of a file that could not be written, or cannot be trusted.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hotlift_wire::WireError;

use crate::error::MigrationError;

/// Error of a file that a VM is saved to, or restored from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The system did not permit a write, or the write failed.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The system did not permit a read, or the read failed.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// This kind of file cannot be read at any position.
    #[error(
        "{} is {is}, not a regular file or a block device; give the name of a save file",
        path.display()
    )]
    NotReadable {
        /// The name.
        path: PathBuf,
        /// Kind of the file, e.g. "a FIFO".
        is: &'static str,
    },
    /// The file is empty.
    #[error("{} is empty", path.display())]
    Empty {
        /// Path of the file.
        path: PathBuf,
    },
    /// An existing entry with the file's name is not replaced.
    #[error("{} is {is}, which hotlift does not replace; remove it, or choose another name", path.display())]
    NotReplaced {
        /// The name.
        path: PathBuf,
        /// Kind of the existing entry.
        is: &'static str,
    },
    /// An earlier write has failed, or the file was abandoned.
    #[error("cannot write the file, because an earlier write failed")]
    Closed,
    /// The file is neither a save file nor a migration stream.
    #[error("this is neither a save file of hotlift nor a mapped-ram file of QEMU")]
    NotASave,
    /// The file was written by another program.
    #[error("this is {is}, not a save file of hotlift or a mapped-ram file of QEMU; {instead}")]
    Foreign {
        /// Kind of the file.
        is: &'static str,
        /// Next step for the operator.
        instead: &'static str,
    },
    /// The file was written by a QEMU without capability `mapped-ram`. Such a file can be read only from its beginning.
    #[error(
        "this is a migration stream of QEMU without capability mapped-ram (as from 'migrate exec:cat>FILE'); load it with \
         QEMU itself: -incoming 'exec:cat FILE'"
    )]
    PlainStream,
    /// The file has another version of Hotlift's format.
    #[error(
        "the save file has version {version}, but this hotlift reads version {own}; restore it with the hotlift that wrote it"
    )]
    Version {
        /// Version of the file.
        version: u32,
        /// Version that this Hotlift reads and writes.
        own: u32,
    },
    /// The description (JSON) in the file cannot be read or written.
    #[error("cannot read the save file's description")]
    Info {
        /// Error of the JSON reader.
        #[source]
        source: serde_json::Error,
    },
    /// The file is truncated.
    #[error("the file is cut short (it ends within the part that begins at byte {position})")]
    Truncated {
        /// First byte of the incomplete part.
        position: u64,
    },
    /// A part of the file differs from the written data.
    #[error("the file is damaged ({what} at byte {position} differs from the written data)")]
    Damaged {
        /// The part that is damaged.
        what: &'static str,
        /// First byte of the part.
        position: u64,
    },
    /// The migration stream in the file violates the format.
    #[error("the stream in the file is damaged at byte {position}")]
    Stream {
        /// First byte of the record.
        position: u64,
        /// Cause.
        #[source]
        source: WireError,
    },
    /// The stream can be migrated, but not kept in a file.
    #[error("this VM cannot be saved: {reason}")]
    CannotBeSaved {
        /// Reason.
        reason: String,
    },
    /// The stream ended before all of RAM had arrived.
    #[error(
        "{missing} bytes of RAM block '{block}' are missing in the stream, the first at byte {offset}, so the file would be \
         incomplete"
    )]
    Incomplete {
        /// The RAM block.
        block: String,
        /// Bytes that are missing.
        missing: u64,
        /// Byte offset of the first missing byte.
        offset: u64,
    },
    /// The VM was saved without RAM that it shared (capability `x-ignore-shared`).
    #[error(
        "the file does not contain the whole RAM, because it was saved with QEMU's capability x-ignore-shared, which omits \
         shared memory; save the VM again without it"
    )]
    WithoutSharedRam,
    /// The file's server cannot be reached, or the connection was lost.
    #[error("cannot read {file}")]
    Server {
        /// The file.
        file: String,
        /// Cause.
        #[source]
        source: Box<ServerError>,
    },
    /// The connection to the file's server was lost, and could not be restored within the time limit of the retries.
    #[error("lost the server of {file}; it did not return within {waited:?}")]
    Lost {
        /// The file.
        file: String,
        /// Time limit of the retries.
        waited: Duration,
        /// Error of the last attempt.
        #[source]
        source: Box<ServerError>,
    },
    /// The server does not send the file.
    #[error("the server refuses {file}: {reason}")]
    Refused {
        /// The file.
        file: String,
        /// The server's message.
        reason: String,
    },
    /// The server could not read a part of the file.
    #[error("the server of {file} cannot read it at byte {position}: {reason}")]
    Unread {
        /// The file.
        file: String,
        /// First byte of the part.
        position: u64,
        /// The server's message.
        reason: String,
    },
    /// The file on the server was replaced by another file with the same name.
    #[error("{file} was replaced by another file since it was opened")]
    OtherFile {
        /// The name.
        file: String,
    },
}

impl FileError {
    /// Returns the error of a failed read of the file at `path`.
    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        Self::Read {
            path: path.to_owned(),
            source,
        }
    }

    /// Returns the error of a failure between the reader of `file` and its server.
    pub(crate) fn server(file: &impl ToString, source: ServerError) -> Self {
        Self::Server {
            file: file.to_string(),
            source: Box::new(source),
        }
    }

    /// Returns true if the error affects the whole file, not only a part of it.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Server { .. } | Self::Lost { .. } | Self::Refused { .. } | Self::OtherFile { .. }
        )
    }
}

/// Failure between a file's reader and its server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The connection could not be made.
    #[error(transparent)]
    Connect(Box<MigrationError>),
    /// The connection broke.
    #[error("the connection to its server broke")]
    Connection(#[source] io::Error),
    /// The server has closed the connection.
    #[error("its server closed the connection")]
    Closed,
    /// The server cannot send the file now, but may do so later.
    #[error("its server cannot send it now ({reason})")]
    NotNow {
        /// The server's message.
        reason: String,
    },
    /// The peer is not a file server.
    #[error("the server at this address is not 'hotlift serve --files'")]
    Protocol(#[source] WireError),
}
