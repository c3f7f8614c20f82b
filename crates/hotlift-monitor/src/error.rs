//! Errors of a monitor.

use std::io;
use std::net::IpAddr;

use hotlift_qmp::server::Refusal;
use hotlift_terminal::error::TerminalError;

/// Error of a monitor that cannot serve clients, or whose process must end.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// An error that several commands of `hotlift` share.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// A command that the process itself executes at its start was refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A socket for clients could not be opened.
    #[error("cannot serve {address}")]
    Serve {
        /// Address of the socket.
        address: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Other hosts can reach the TCP socket, which is an error without `from_other_hosts`.
    #[error("cannot serve {address}: other hosts reach {reached}, and there is no authentication")]
    OtherHosts {
        /// Address of the socket.
        address: String,
        /// The first resolved address that is not a loopback address.
        reached: IpAddr,
    },
    /// An incoming migration has failed, and the process must end.
    #[error("the guest did not arrive: {reason}")]
    Incoming {
        /// Reason for the failure, in one line.
        reason: String,
    },
}
