//! Why there is no advice.

use std::io;
use std::path::PathBuf;

use hotlift::transport::TransportError;
use hotlift_mem::MemError;
use hotlift_methods::MethodError;
use hotlift_vmm::fill::FillError;
use hotlift_vmm::layout::LayoutError;

/// Memory that could not be sampled, or a measurement that failed.
#[derive(Debug, thiserror::Error)]
pub enum AdviseError {
    #[error("there is no process {pid}")]
    NoProcess { pid: u32 },
    #[error(
        "not allowed to read the memory of process {pid}: run this as root, or as its user with CAP_SYS_PTRACE"
    )]
    NotAllowed { pid: u32 },
    #[error(
        "process {pid} has no memory of its own that is writable: it is a kernel thread, or has ended"
    )]
    NoMemory { pid: u32 },
    #[error("cannot read {} of process {pid}", path.display())]
    Process {
        pid: u32,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the QMP socket {address} tells no process: give --pid with QEMU's process id")]
    NoPeer { address: String },
    #[error(
        "the QMP socket {address} was made by '{name}' (process {pid}), which is no QEMU: give --pid with QEMU's process id"
    )]
    OtherPeer {
        address: String,
        name: String,
        pid: u32,
    },
    #[error("QEMU did not measure its dirty rate: it says '{status}'; give --dirty-rate")]
    DirtyRate { status: String },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} has no page of {} bytes in it", path.display(), hotlift_mem::PAGE_SIZE)]
    Empty { path: PathBuf },
    #[error("cannot sample the folder")]
    Folder(#[from] FillError),
    #[error("cannot lay the folder out as memory")]
    Layout(#[from] LayoutError),
    #[error("cannot have memory to measure with")]
    Memory(#[from] MemError),
    #[error("method {method} fails on this host")]
    Method {
        method: &'static str,
        #[source]
        source: MethodError,
    },
    #[error("the other host answers no survey: {what} is not what a hotlift of this version says")]
    Strange { what: &'static str },
    #[error(
        "cannot connect to {address}, where the other host takes a survey: let the port through, or give 'hotlift serve' \
         one that is let through by --data-port"
    )]
    Connections {
        address: String,
        #[source]
        source: TransportError,
    },
    #[error("the other host ended a connection of its survey")]
    Survey(#[source] io::Error),
    #[error("cannot measure a connection to this host itself")]
    Loopback(#[source] io::Error),
    #[error("a thread that measures has ended early: this is a mistake in hotlift")]
    Thread,
}
