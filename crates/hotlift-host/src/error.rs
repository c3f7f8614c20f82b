//! Why a host, its memory or another host could not be measured.

use std::io;
use std::path::PathBuf;

use hotlift::transport::TransportError;
use hotlift_console::conversation::ConversationError;
use hotlift_console::error::ConsoleError;
use hotlift_mem::MemError;
use hotlift_methods::MethodError;
use hotlift_vmm::fill::FillError;
use hotlift_vmm::layout::LayoutError;

/// Memory that could not be sampled, or a measurement that failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// What several commands can fail with.
    #[error(transparent)]
    Console(#[from] ConsoleError),
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
    /// An image or a folder.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An image without pages.
    #[error("{} has no page of {} bytes in it", path.display(), hotlift_mem::PAGE_SIZE)]
    Empty {
        /// Which.
        path: PathBuf,
    },
    /// A folder's files.
    #[error("cannot sample the folder")]
    Folder(#[from] FillError),
    /// A size that is no guest's.
    #[error("cannot lay the folder out as memory")]
    Layout(#[from] LayoutError),
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
    /// An answer that is none.
    #[error("the other host answers no survey: {what} is not what a hotlift of this version says")]
    Strange {
        /// Which.
        what: &'static str,
    },
    /// The port of the survey.
    #[error(
        "cannot connect to {address}, where the other host takes a survey: let the port through, or give 'hotlift serve' \
         one that is let through by --data-port"
    )]
    Connections {
        /// Where.
        address: String,
        /// Why.
        #[source]
        source: TransportError,
    },
    /// Its connections.
    #[error("the other host ended a connection of its survey")]
    Survey(#[source] io::Error),
    /// Sockets of this host.
    #[error("cannot measure a connection to this host itself")]
    Loopback(#[source] io::Error),
    /// A panic.
    #[error("a thread that measures has ended early: this is a mistake in hotlift")]
    Thread,
}

impl From<ConversationError> for HostError {
    fn from(error: ConversationError) -> Self {
        ConsoleError::from(error).into()
    }
}
