//! Errors of a monitor.

use std::io;
use std::net::IpAddr;

use hotlift_qmp::server::Refusal;
use hotlift_terminal::error::TerminalError;

/// A monitor that cannot be served, or a failure that ends the monitored process.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// An error that several commands share.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// A command that the process itself runs at its start was refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A socket for clients cannot be served.
    #[error("cannot serve {address}")]
    Serve {
        /// Address of the socket.
        address: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// Other hosts can reach the TCP socket, which is not allowed without `from_other_hosts`.
    #[error("cannot serve {address}: other hosts reach {reached}, and there is no authentication")]
    OtherHosts {
        /// Address of the socket.
        address: String,
        /// The first resolved address that is not a loopback address.
        reached: IpAddr,
    },
    /// An incoming migration that must end the process on failure has failed.
    #[error("the guest did not arrive: {reason}")]
    Incoming {
        /// Reason, in one line.
        reason: String,
    },
}
