//! Why a file could not be written, or is not to be trusted.

use std::io;
use std::path::PathBuf;

use hotlift_wire::WireError;

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
    /// Another Hotlift has written it.
    #[error(
        "the save file has version {version}, and this hotlift reads version {} (restore it with the \
         hotlift that wrote it)",
        super::layout::VERSION
    )]
    Version {
        /// The version that it has.
        version: u32,
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
}
