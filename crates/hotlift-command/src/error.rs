//! Errors of the commands that migrate guests.

use std::io;

use hotlift::Address;
use hotlift::conversation::ConversationError;
use hotlift::conversation::callers::DropReason;
use hotlift::options::OptionError;
use hotlift::tls::{Fault, TlsError, TlsSetupError};
use hotlift::transport::TransportError;
use hotlift_terminal::error::TerminalError;
use hotlift_vmm::fill::FillError;
use hotlift_vmm::layout::LayoutError;

/// Next step if the certificates of both hosts are from different CAs.
const SAME_CA: &str =
    "give both hosts certificates of the same CA: 'hotlift certs host NAME' on the host of the CA";

/// Error of a command that migrates, or of its exchange with the peer before the migration.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// Error that any command can have.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// An option's value is invalid, or options are incompatible.
    #[error("invalid option")]
    Option(#[from] OptionError),
    /// RAM, vCPUs and working set are incompatible.
    #[error("invalid guest settings")]
    Layout(#[from] LayoutError),
    /// The content for `--fill` cannot be produced.
    #[error("cannot fill the guest's memory")]
    Fill(#[from] FillError),
    /// The guest check found a problem.
    #[error("guest check failed after migration: {problem}")]
    NotWell {
        /// Description of the problem.
        problem: String,
    },
    /// Some of several migrations failed.
    #[error("{failed} of {runs} migrations failed")]
    Migrations {
        /// Number of failed migrations.
        failed: usize,
        /// Number of all migrations.
        runs: usize,
    },
    /// The exchange of messages with the peer failed after its start.
    #[error("the connection to 'hotlift serve' failed")]
    Conversation(#[from] ConversationError),
    /// Listening for connections failed.
    #[error(transparent)]
    Listen {
        /// The system's error.
        source: TransportError,
    },
    /// 'hotlift serve' cannot be reached.
    #[error("cannot reach 'hotlift serve'")]
    NoServe {
        /// The system's error.
        #[source]
        source: TransportError,
    },
    /// TLS cannot be set up.
    #[error("cannot use TLS")]
    TlsSetup(#[source] Box<TlsSetupError>),
    /// The TLS handshake with the peer failed.
    #[error("the TLS handshake with {host} failed")]
    Tls {
        /// Address of the other host.
        host: String,
        /// The error.
        #[source]
        source: Box<TlsError>,
    },
    /// QEMU's stream would cross a network unencrypted.
    #[error(
        "QEMU's stream would cross the network unencrypted at {address}; let QEMU use a UNIX socket or loopback, or give \
         '--insecure'"
    )]
    InsecureQemu {
        /// The address.
        address: Address,
    },
    /// This flag accepts only TCP addresses, and got the address of a UNIX socket.
    #[error("{flag} takes tcp:HOST:PORT")]
    OnlyTcp {
        /// The flag with this address.
        flag: &'static str,
    },
    /// A client's messages before the migration cannot be read.
    #[error(transparent)]
    DropReason(DropReason),
    /// The destination refused the migration.
    #[error("the destination refuses: {reason}")]
    Refused {
        /// The reason in one line.
        reason: String,
    },
}

impl From<DropReason> for SharedError {
    fn from(error: DropReason) -> Self {
        match error {
            DropReason::Conversation(error) => Self::Conversation(error),
            error => Self::DropReason(error),
        }
    }
}

impl From<TlsSetupError> for SharedError {
    fn from(error: TlsSetupError) -> Self {
        Self::TlsSetup(Box::new(error))
    }
}

impl SharedError {
    /// Returns true if the command line is wrong, and nothing was started.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Option(OptionError::NoAccelerator { .. }) => false,
            Self::Option(_) | Self::Layout(_) | Self::OnlyTcp { .. } => true,
            _ => false,
        }
    }

    /// Returns the next step for the operator; `None` if the message itself contains it.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::NoServe {
                source: TransportError::Connect { source, .. },
            } => Some(not_connected(source.kind())),
            Self::Tls { source, .. } => after_handshake(source),
            Self::Conversation(ConversationError::Closed) => Some(
                "the log of the process that listens there has the reason; 'hotlift serve --files' accepts no guest and \
                 closes the connection too",
            ),
            _ => None,
        }
    }
}

/// Returns the next step for the operator after a failed TLS handshake; `None` if the message itself contains it.
pub fn after_handshake(error: &TlsError) -> Option<&'static str> {
    match error {
        TlsError::PlaintextPeer => {
            Some("give '--tls DIR' to the command on that host too, or '--insecure' to both")
        }
        TlsError::OursNotValid { .. } => {
            Some("renew it with 'hotlift certs renew', or correct the clock of this host")
        }
        TlsError::NoCertificate => Some(SAME_CA),
        TlsError::Theirs { fault, .. } => match fault {
            Fault::Ended { .. } | Fault::Revoked => {
                Some("renew that certificate with 'hotlift certs renew'")
            }
            Fault::NotYetValid { .. } => Some("compare the clocks of both hosts"),
            Fault::UnknownCa { .. } => Some(SAME_CA),
            Fault::RevocationListEnded { .. } => {
                Some("replace the list of revoked certificates of this host by a current one")
            }
            Fault::NameMismatch { .. } => Some(
                "connect to a name in that certificate, give this name by '--tls-hostname', or make a certificate for the address",
            ),
            Fault::NotAllowed { .. } => {
                Some("add the name to '--tls-authz' if that host may connect")
            }
            _ => None,
        },
        _ => None,
    }
}

/// Returns the next step for the operator after connecting to 'hotlift serve' failed with an error of `kind`.
fn not_connected(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::ConnectionRefused => "start 'hotlift serve' on the destination host first",
        io::ErrorKind::TimedOut => {
            "that host is down, or a firewall drops packets to this port: open it on the destination host"
        }
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            "there is no route to that address, or a firewall rejects it: check the address, 'ip route get' and the firewall"
        }
        _ => "check the name or address of the destination host",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hotlift::error::error_line;
    use hotlift::tls::{Missing, TlsError};

    use super::*;

    #[test]
    fn a_late_handshake_names_the_host_and_the_missing_step() {
        let source = TlsError::TimedOut {
            after: Duration::from_secs(10),
            missing: Missing::Acknowledgement,
        };
        let error = SharedError::Tls {
            host: "198.51.100.2".to_owned(),
            source: Box::new(source),
        };
        assert_eq!(
            error_line(&error),
            "the TLS handshake with 198.51.100.2 failed: the handshake did not complete within 10s; the other host does not \
             acknowledge sent data; the path may drop full-size packets (check the MTU)"
        );
    }

    #[test]
    fn each_cause_of_a_missing_connection_has_its_own_next_step() {
        let advice = |kind: io::ErrorKind| {
            let source = TransportError::Connect {
                uri: "tcp:b:4444".to_owned(),
                source: kind.into(),
            };
            SharedError::NoServe { source }.advice().unwrap()
        };
        assert!(advice(io::ErrorKind::ConnectionRefused).contains("start 'hotlift serve'"));
        assert!(advice(io::ErrorKind::TimedOut).contains("firewall drops"));
        assert!(advice(io::ErrorKind::NetworkUnreachable).contains("no route"));
        // An unknown host name causes this error.
        assert!(advice(io::ErrorKind::Other).contains("name or address"));
    }

    #[test]
    fn a_peer_without_tls_has_a_next_step() {
        let plaintext = SharedError::Tls {
            host: "192.0.2.2".to_owned(),
            source: Box::new(TlsError::PlaintextPeer),
        };
        assert!(plaintext.advice().unwrap().contains("'--tls DIR'"));
    }

    #[test]
    fn a_server_that_closes_the_conversation_may_be_a_file_server() {
        let advice = SharedError::from(ConversationError::Closed).advice();
        assert!(advice.unwrap().contains("serve --files"));
    }
}
