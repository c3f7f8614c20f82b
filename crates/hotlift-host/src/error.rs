//! Why memory could not be sampled, or methods not be measured.

use std::io;
use std::path::PathBuf;

use hotlift_mem::{FileError, MemError};
use hotlift_methods::MethodError;
use hotlift_qmp::QmpError;

/// Memory that could not be sampled, or a measurement that failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A QMP socket that does not answer.
    #[error("QEMU at the source")]
    Qmp(#[source] QmpError),
    /// Nothing to sample.
    #[error("there is no process {pid}")]
    NoProcess {
        /// Its id.
        pid: u32,
    },
    /// Another user's process.
    #[error(
        "not allowed to read the memory of process {pid}: run this as root, or as its user with CAP_SYS_PTRACE"
    )]
    NotAllowed {
        /// Its id.
        pid: u32,
    },
    /// A process without memory.
    #[error(
        "process {pid} has no memory of its own that is writable: it is a kernel thread, or has ended"
    )]
    NoMemory {
        /// Its id.
        pid: u32,
    },
    /// Files of a process.
    #[error("cannot read {} of process {pid}", path.display())]
    Process {
        /// Its id.
        pid: u32,
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An image, a folder, or a socket.
    #[error(transparent)]
    File(#[from] FileError),
    /// An image without pages.
    #[error("{} has no page of {} bytes in it", path.display(), hotlift_mem::PAGE_SIZE)]
    Empty {
        /// Which.
        path: PathBuf,
    },
    /// A folder's files.
    #[error("cannot sample the folder")]
    Folder(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The system.
    #[error("cannot have memory to measure with")]
    Memory(#[from] MemError),
    /// A codec.
    #[error("method {method} fails on this host")]
    Method {
        /// Which.
        method: &'static str,
        /// Why.
        #[source]
        source: MethodError,
    },
    /// A QMP socket that is no UNIX socket, or whose process is not known.
    #[error("the QMP socket {address} tells no process: give --pid with QEMU's process id")]
    NoPeer {
        /// The socket.
        address: String,
    },
    /// A QMP socket that a manager has made.
    #[error(
        "the QMP socket {address} was made by '{name}' (process {pid}), which is no QEMU: give --pid with QEMU's process id"
    )]
    OtherPeer {
        /// The socket.
        address: String,
        /// The process's name.
        name: String,
        /// Its id.
        pid: u32,
    },
    /// A panic.
    #[error("a thread that measures has ended early: this is a mistake in hotlift")]
    Thread,
}
