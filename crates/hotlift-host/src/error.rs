//! Errors while sampling memory, and while measuring methods.

use std::io;
use std::path::PathBuf;

use hotlift_mem::{FileError, MemError};
use hotlift_methods::MethodError;
use hotlift_qmp::QmpError;

/// Error while sampling memory, or while measuring methods.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The QMP socket does not answer.
    #[error("QEMU at the source")]
    Qmp(#[source] QmpError),
    /// The process does not exist.
    #[error("there is no process {pid}")]
    NoProcess {
        /// Process id.
        pid: u32,
    },
    /// This user may not read the memory of the process.
    #[error(
        "not allowed to read the memory of process {pid}: run this as root, or as its user with CAP_SYS_PTRACE"
    )]
    NotAllowed {
        /// Process id.
        pid: u32,
    },
    /// The process has no memory.
    #[error(
        "process {pid} has no memory of its own that is writable: it is a kernel thread, or has ended"
    )]
    NoMemory {
        /// Process id.
        pid: u32,
    },
    /// A file of the process in `/proc` cannot be read.
    #[error("cannot read {} of process {pid}", path.display())]
    Process {
        /// Process id.
        pid: u32,
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// An image, a folder, or a socket cannot be opened or read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The image contains no complete page.
    #[error("{} has no page of {} bytes in it", path.display(), hotlift_mem::PAGE_SIZE)]
    Empty {
        /// Path of the image.
        path: PathBuf,
    },
    /// The files of the folder cannot be read.
    #[error("cannot sample the folder")]
    Folder(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Memory cannot be allocated.
    #[error("cannot allocate memory for the measurement")]
    Memory(#[from] MemError),
    /// A compression method failed.
    #[error("method {method} fails on this host")]
    Method {
        /// Name of the compression method.
        method: &'static str,
        /// Error of the encoder or decoder.
        #[source]
        source: MethodError,
    },
    /// The process at the other end of a QMP socket is unknown, or the address is not a UNIX socket.
    #[error(
        "cannot find the process behind the QMP socket {address}: give --pid with QEMU's process id"
    )]
    NoPeer {
        /// Address of the socket.
        address: String,
    },
    /// The process that created the QMP socket is not a QEMU; it may be a program that manages QEMU.
    #[error(
        "the QMP socket {address} was made by '{name}' (process {pid}), which is not a QEMU: give --pid with QEMU's process id"
    )]
    OtherPeer {
        /// Address of the socket.
        address: String,
        /// Name of the process that created the socket.
        name: String,
        /// Id of the process that created the socket.
        pid: u32,
    },
    /// A measuring thread panicked.
    #[error("a measuring thread ended early: this is a bug of hotlift")]
    Thread,
}
