//! Why there is no advice.

use hotlift_console::error::ConsoleError;
use hotlift_host::accel::AccelError;
use hotlift_host::error::HostError;
use hotlift_qmp::QmpError;

/// Memory that could not be sampled, or a measurement that failed.
#[derive(Debug, thiserror::Error)]
pub enum AdviseError {
    /// What several commands can fail with.
    #[error(transparent)]
    Console(#[from] ConsoleError),
    /// Whether this host has an accelerator.
    #[error(transparent)]
    Accel(#[from] AccelError),
    /// This host, the memory or the other host.
    #[error(transparent)]
    Host(HostError),
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
    /// A folder without a size of RAM.
    #[error("a folder does not say how much RAM its files are to fill: give --ram")]
    NoRam,
    /// `calc-dirty-rate` that does not come to its end.
    #[error("QEMU did not measure its dirty rate: it says '{status}'; give --dirty-rate")]
    DirtyRate {
        /// QEMU's name of its state.
        status: String,
    },
}

impl AdviseError {
    /// An error of the QEMU whose guest is to move.
    pub(crate) fn qmp(source: QmpError) -> Self {
        let side = "source";
        ConsoleError::Qmp { side, source }.into()
    }
}

impl From<HostError> for AdviseError {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Console(error) => Self::Console(error),
            error => Self::Host(error),
        }
    }
}
