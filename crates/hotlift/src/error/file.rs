//! Errors of a file that could not be written, or cannot be trusted.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hotlift_wire::WireError;

use crate::error::MigrationError;

/// A file in which a VM is saved, or from which it is restored, cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The system refused the write.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The system refused the read.
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
        "{} is {is}, and a save file is a regular file or a block device: give the name of one",
        path.display()
    )]
    NotReadable {
        /// The name.
        path: PathBuf,
        /// Its kind.
        is: &'static str,
    },
    /// The file is empty.
    #[error("{} is empty", path.display())]
    Empty {
        /// Its name.
        path: PathBuf,
    },
    /// An existing entry with the file's name is not replaced.
    #[error("{} is {is}, and is not replaced: remove it, or choose another name", path.display())]
    NotReplaced {
        /// The name.
        path: PathBuf,
        /// Kind of the existing entry.
        is: &'static str,
    },
    /// An earlier write has failed, or the file was abandoned.
    #[error("the file takes no more: an earlier write has failed")]
    Closed,
    /// It is neither a save file nor a migration stream.
    #[error("this is neither a save file of hotlift nor a mapped-ram file of QEMU")]
    NotASave,
    /// Another program has written it.
    #[error(
        "this is {is}, and neither a save file of hotlift nor a mapped-ram file of QEMU: {instead}"
    )]
    Foreign {
        /// Kind of the file.
        is: &'static str,
        /// Next step for the operator.
        instead: &'static str,
    },
    /// QEMU has written it, and it can be read from its beginning only.
    #[error(
        "this is a migration stream of QEMU without capability mapped-ram (as of 'migrate exec:cat>FILE'): QEMU itself loads \
         it, by -incoming 'exec:cat FILE'"
    )]
    PlainStream,
    /// Another version of Hotlift has written it.
    #[error(
        "the save file has version {version}, and this hotlift reads version {own} (restore it with the \
         hotlift that wrote it)"
    )]
    Version {
        /// Version of the file.
        version: u32,
        /// Version that this side reads and writes.
        own: u32,
    },
    /// Its description of itself cannot be read.
    #[error("the save file's description of itself cannot be read")]
    Info {
        /// Error of the JSON reader.
        #[source]
        source: serde_json::Error,
    },
    /// It is cut short.
    #[error("the file is cut short: it ends inside of what begins at byte {position}")]
    Truncated {
        /// First byte of the incomplete part.
        position: u64,
    },
    /// Its bytes are not those that were written.
    #[error("the file is damaged: {what} at byte {position} is not what was written")]
    Damaged {
        /// The part that is damaged.
        what: &'static str,
        /// First byte of the part.
        position: u64,
    },
    /// The stream in it violates the format.
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
        "{missing} bytes of RAM block '{block}' came neither as content nor as zero, the first at byte {offset}: the file \
         would not hold the whole RAM"
    )]
    Incomplete {
        /// The RAM block.
        block: String,
        /// Bytes that are missing.
        missing: u64,
        /// Byte offset of the first of them.
        offset: u64,
    },
    /// The VM was saved without RAM that it shared (capability `x-ignore-shared`).
    #[error(
        "the file does not hold the whole RAM: it was saved with QEMU's capability x-ignore-shared on, which leaves shared \
         memory out (save the VM again without it)"
    )]
    WithoutSharedRam,
    /// Its server cannot be reached, or was lost.
    #[error("cannot read {file}")]
    Server {
        /// The file.
        file: String,
        /// Cause.
        #[source]
        source: Box<ServerError>,
    },
    /// Its server was lost, and did not come back within the time limit of the retries.
    #[error("the server of {file} was lost, and did not come back within {waited:?}")]
    Lost {
        /// The file.
        file: String,
        /// Time of the retries.
        waited: Duration,
        /// Error of the last attempt.
        #[source]
        source: Box<ServerError>,
    },
    /// Its server refuses to send it.
    #[error("the server refuses {file}: {reason}")]
    Refused {
        /// The file.
        file: String,
        /// The server's message.
        reason: String,
    },
    /// Its server could not read a part of it.
    #[error("the server of {file} cannot read it at byte {position}: {reason}")]
    Unread {
        /// The file.
        file: String,
        /// First byte of the part.
        position: u64,
        /// The server's message.
        reason: String,
    },
    /// Another file has that name now.
    #[error("there is another file under the name of {file} than the one that was opened")]
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

    /// Returns true if no other part of the file can be read either.
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
    #[error("no connection with its server")]
    Connect(#[source] Box<MigrationError>),
    /// The connection broke.
    #[error("the connection with its server broke")]
    Connection(#[source] io::Error),
    /// The other side has closed it.
    #[error("its server closed the connection")]
    Closed,
    /// The server cannot send it now, and may later.
    #[error("its server cannot hand it out just now: {reason}")]
    NotNow {
        /// The server's message.
        reason: String,
    },
    /// The other side is no file server.
    #[error("what listens there is no 'hotlift serve --files'")]
    Protocol(#[source] WireError),
}
