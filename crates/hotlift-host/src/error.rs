//! Errors of sampling memory and of measuring methods.

use std::io;
use std::path::PathBuf;

use hotlift_mem::{FileError, MemError};
use hotlift_methods::MethodError;
use hotlift_qmp::QmpError;

/// Error of sampling memory, or of a measurement.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A QMP socket does not answer.
    #[error("QEMU at the source")]
    Qmp(#[source] QmpError),
    /// The process does not exist.
    #[error("there is no process {pid}")]
    NoProcess {
        /// Process id.
        pid: u32,
    },
    /// The process belongs to another user.
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
    /// Files of a process cannot be read.
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
    /// An image, a folder, or a socket failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// An image has no pages.
    #[error("{} has no page of {} bytes in it", path.display(), hotlift_mem::PAGE_SIZE)]
    Empty {
        /// Path of the image.
        path: PathBuf,
    },
    /// A folder's files cannot be read.
    #[error("cannot sample the folder")]
    Folder(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Memory cannot be allocated.
    #[error("cannot allocate memory for the measurement")]
    Memory(#[from] MemError),
    /// A codec failed.
    #[error("method {method} fails on this host")]
    Method {
        /// Name of the method.
        method: &'static str,
        /// The codec's error.
        #[source]
        source: MethodError,
    },
    /// A QMP socket is not a UNIX socket, or its process is unknown.
    #[error(
        "cannot find the process behind the QMP socket {address}: give --pid with QEMU's process id"
    )]
    NoPeer {
        /// Address of the socket.
        address: String,
    },
    /// A QMP socket was created by a manager.
    #[error(
        "the QMP socket {address} was made by '{name}' (process {pid}), which is not a QEMU: give --pid with QEMU's process id"
    )]
    OtherPeer {
        /// Address of the socket.
        address: String,
        /// Name of the process.
        name: String,
        /// Process id.
        pid: u32,
    },
    /// A thread panicked.
    #[error("a measuring thread ended early: this is a bug of hotlift")]
    Thread,
}
