//! Why there is no advice.

use hotlift_host::error::HostError;

/// Memory that could not be sampled, or a measurement that failed.
#[derive(Debug, thiserror::Error)]
pub enum AdviseError {
    #[error(transparent)]
    Host(#[from] HostError),
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
    #[error("a folder does not say how much RAM its files are to fill: give --ram")]
    NoRam,
    #[error("QEMU did not measure its dirty rate: it says '{status}'; give --dirty-rate")]
    DirtyRate { status: String },
}
