//! Why a file could not be written, or is not to be trusted.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hotlift_wire::WireError;

use crate::error::MigrationError;

/// A file that a VM was to be saved in or restored from cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The system did not let it be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The system did not let it be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// Its kind cannot be read at any position.
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
    /// A file without a byte.
    #[error("{} is empty", path.display())]
    Empty {
        /// Its name.
        path: PathBuf,
    },
    /// What has the file's name is not replaced.
    #[error("{} is {is}, and is not replaced: remove it, or choose another name", path.display())]
    NotReplaced {
        /// The name.
        path: PathBuf,
        /// What has it.
        is: &'static str,
    },
    /// An earlier write has failed, or the file was given up.
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
    /// Another Hotlift has written it.
    #[error(
        "the save file has version {version}, and this hotlift reads version {own} (restore it with the \
         hotlift that wrote it)"
    )]
    Version {
        /// The version that it has.
        version: u32,
        /// The version that this side reads and writes.
        own: u32,
    },
    /// What it says of itself cannot be read.
    #[error("the save file's description of itself cannot be read")]
    Info {
        /// What the JSON reader says.
        #[source]
        source: serde_json::Error,
    },
    /// It ends before its end.
    #[error("the file is cut short: it ends inside of what begins at byte {position}")]
    Truncated {
        /// Where the incomplete part begins.
        position: u64,
    },
    /// Its bytes are not those that were written.
    #[error("the file is damaged: {what} at byte {position} is not what was written")]
    Damaged {
        /// The part that is damaged.
        what: &'static str,
        /// Where it begins.
        position: u64,
    },
    /// The stream in it is not what the format allows.
    #[error("the stream in the file is damaged at byte {position}")]
    Stream {
        /// Where the record begins.
        position: u64,
        /// What is wrong with it.
        #[source]
        source: WireError,
    },
    /// The stream can be migrated, but not kept in a file.
    #[error("this VM cannot be saved: {reason}")]
    CannotBeSaved {
        /// What is in the way.
        reason: String,
    },
    /// The stream ended before all of RAM had come.
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
        /// Why.
        #[source]
        source: Box<ServerError>,
    },
    /// Its server was lost, and tried again for as long as that may take.
    #[error("the server of {file} was lost, and did not come back within {waited:?}")]
    Lost {
        /// The file.
        file: String,
        /// How long it was tried.
        waited: Duration,
        /// What the last attempt has met.
        #[source]
        source: Box<ServerError>,
    },
    /// Its server does not hand it out.
    #[error("the server refuses {file}: {reason}")]
    Refused {
        /// The file.
        file: String,
        /// The server's words.
        reason: String,
    },
    /// Its server could not read a part of it.
    #[error("the server of {file} cannot read it at byte {position}: {reason}")]
    Unread {
        /// The file.
        file: String,
        /// Where the part begins.
        position: u64,
        /// The server's words.
        reason: String,
    },
    /// There is another file of that name by now.
    #[error("there is another file under the name of {file} than the one that was opened")]
    OtherFile {
        /// The name.
        file: String,
    },
}

impl FileError {
    /// The system did not let the file at `path` be read.
    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        Self::Read {
            path: path.to_owned(),
            source,
        }
    }

    /// Something came between the reader of `file` and its server.
    pub(crate) fn server(file: &impl ToString, source: ServerError) -> Self {
        Self::Server {
            file: file.to_string(),
            source: Box::new(source),
        }
    }

    /// Whether no other part of the file can be read either.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Server { .. } | Self::Lost { .. } | Self::Refused { .. } | Self::OtherFile { .. }
        )
    }
}

/// What came between a file's reader and its server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// There is no connection.
    #[error("no connection with its server")]
    Connect(#[source] Box<MigrationError>),
    /// The connection broke.
    #[error("the connection with its server broke")]
    Connection(#[source] io::Error),
    /// The other side has closed it.
    #[error("its server closed the connection")]
    Closed,
    /// It may do later what it cannot do now.
    #[error("its server cannot hand it out just now: {reason}")]
    NotNow {
        /// The server's words.
        reason: String,
    },
    /// The other side says something else than a file server does.
    #[error("what listens there is no 'hotlift serve --files'")]
    Protocol(#[source] WireError),
}
