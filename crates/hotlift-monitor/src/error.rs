//! Why a monitor failed.

use std::io;
use std::net::IpAddr;

use hotlift_qmp::server::Refusal;
use hotlift_terminal::error::TerminalError;

/// A monitor that cannot be served, or a failure that ends the process that is monitored.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// What several commands can fail with.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// A command that the start of the process stands for.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A socket for clients.
    #[error("cannot serve {address}")]
    Serve {
        /// Where.
        address: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A TCP socket that is not for this host alone.
    #[error("cannot serve {address}: other hosts reach {reached}, and there is no authentication")]
    OtherHosts {
        /// Where.
        address: String,
        /// The first of its addresses that is not a loopback address.
        reached: IpAddr,
    },
    /// An incoming migration that was to end the process if it failed.
    #[error("the guest has not come: {reason}")]
    Incoming {
        /// Why, in one line.
        reason: String,
    },
}
