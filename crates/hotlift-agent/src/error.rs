//! Errors of the agent and of the migrations that it carries.

use std::net::SocketAddr;
use std::path::PathBuf;

use hotlift::MigrationError;
use hotlift::conversation::ConversationError;
use hotlift::conversation::callers::DropReason;
use hotlift::tls::{TlsError, TlsSetupError};
use hotlift::transport::TransportError;
use hotlift_monitor::MonitorError;
use hotlift_terminal::error::TerminalError;

use crate::config::ConfigError;

/// Advice if the configuration file is missing.
const NO_FILE: &str = "name a file with --config FILE; it may be empty, as each key has a default; an example with all keys \
                       is /etc/hotlift/agent.toml of the packages, packaging/agent.toml of the sources";

/// Errors that end the agent.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Invalid configuration.
    #[error("invalid configuration")]
    Config(#[from] ConfigError),
    /// Missing or unusable certificates.
    #[error(
        "the agent needs certificates ('hotlift certs' makes them; 'tls' in the configuration names their folder)"
    )]
    Tls(#[source] Box<TlsSetupError>),
    /// With the agent's certificates, handshakes with other agents would fail.
    #[error(
        "the certificates in {0} have {count} {problems}, listed above; 'hotlift certs show --dir {0}' lists all certificates",
        dir.display(),
        problems = problems(*count)
    )]
    Certificates {
        /// Certificate folder.
        dir: PathBuf,
        /// Number of problems found.
        count: usize,
    },
    /// A port cannot be opened.
    #[error(transparent)]
    Listen(TransportError),
    /// The system could not provide a resource.
    #[error("cannot create {what}")]
    System {
        /// Description of the resource.
        what: &'static str,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The redirect rules cannot be installed.
    #[error("cannot redirect migrations to the agent")]
    Rules(#[from] RulesError),
    /// Because of this host's setup, some migrations do not reach the agent.
    #[error(
        "some migrations of this host bypass the agent ({count} {problems}, listed above), and fail if plaintext = \"refuse\"; \
         change the listed rules, or 'ports', 'users' and 'destinations' in agent.toml",
        problems = problems(*count)
    )]
    NotRedirected {
        /// Number of problems found.
        count: usize,
    },
    /// The control socket cannot be opened.
    #[error("cannot serve the control socket")]
    Control(#[from] MonitorError),
    /// An error that other commands have, too.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// A critical thread ended early.
    #[error("the agent ended because its thread '{part}' ended (the log has the reason)")]
    Lost {
        /// Name of the thread.
        part: &'static str,
    },
}

impl AgentError {
    /// Returns the next step for the operator; `None` if the message itself contains it.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Config(error) if error.is_missing() => Some(NO_FILE),
            _ => None,
        }
    }

    /// Returns a function that converts a system error to [`Self::System`], for [`Result::map_err`].
    pub fn system(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

/// Errors of the nftables rules.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// A program cannot be started.
    #[error("cannot run '{tool}' (it is in the package {package})")]
    Run {
        /// The program.
        tool: &'static str,
        /// Package of the program.
        package: &'static str,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// nft rejected the rules.
    #[error(
        "'nft' failed (it needs CAP_NET_ADMIN, and the kernel's nft_redir, nft_socket, nft_reject_inet, nft_fib_inet and \
         nft_log): {message}"
    )]
    Refused {
        /// nft's error message, in one line.
        message: String,
    },
    /// None of `users` exists on this host.
    #[error("this host has none of the users {users} (key 'users')")]
    NoUser {
        /// The configured users.
        users: String,
    },
    /// The kernel refused to report changes of nftables.
    #[error("the kernel does not report changes of nftables (that needs CAP_NET_ADMIN)")]
    Watch(#[source] std::io::Error),
    /// The agent cannot mark its own connections, so the rules would redirect them to the agent.
    #[error(
        "the agent runs as one of 'users', but cannot mark its own connections (CAP_NET_ADMIN), so they would be redirected too"
    )]
    NoMark(#[source] std::io::Error),
}

/// Returns the noun after `count`.
const fn problems(count: usize) -> &'static str {
    if count == 1 { "problem" } else { "problems" }
}

/// Errors of a migration or a tunnel.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// The agent is ending and accepts nothing new.
    #[error("the agent is shutting down and accepts no new migrations")]
    Ending,
    /// A tunnel was cancelled, or a migration that waited for a slot.
    #[error("cancelled")]
    Cancelled,
    /// A migration waited for a slot, and the source closed its connections in the meantime.
    #[error("the source closed its connections before the migration began")]
    Deserted,
    /// The agent ended before a cancelled migration did. The migration's QEMU has received SHUT(0) (the destination loaded the
    /// guest), and has not closed its connection.
    #[error(
        "the agent ended before it knew which QEMU has the guest; if the destination's QEMU does not run it, send 'cont' to \
         the source's QEMU (libvirt does this itself)"
    )]
    Unsettled,
    /// No process listens at the port of the agent for `to`, and the configuration refuses unencrypted migrations.
    #[error(
        "no agent answers for {to}, and plaintext = \"refuse\" allows no migration without one"
    )]
    NoAgent {
        /// Destination of the migration.
        to: SocketAddr,
        /// The connection error.
        #[source]
        source: TransportError,
    },
    /// The agent cannot be reached, but may exist: the error does not exclude it, or the key `peers` names an agent.
    #[error(
        "cannot reach the agent for {to}, and a migration without it would be unencrypted (check that host, this host's routes \
         and limit of open files, and [peers] in agent.toml)"
    )]
    AgentUnreached {
        /// Destination of the migration.
        to: SocketAddr,
        /// The connection error.
        #[source]
        source: TransportError,
    },
    /// The TLS handshake failed.
    #[error("the TLS handshake with the other agent failed")]
    Tls(#[from] TlsError),
    /// The conversation with the other agent failed.
    #[error("the connection to the other agent failed")]
    Conversation(#[from] ConversationError),
    /// The peer sent no valid hello (the first message) in time, or exceeded a limit before the hello.
    #[error("closed the connection of the other agent before its hello")]
    Unannounced(#[source] DropReason),
    /// The other agent did not answer the hello in time.
    #[error("the other agent did not answer in time")]
    Silent,
    /// The other agent, or this agent, refused the migration or tunnel.
    #[error("the other agent refuses: {reason}")]
    Refused {
        /// The reason, in one line.
        reason: String,
    },
    /// The other agent sent a message that is not allowed at this point.
    #[error("the other agent sent an unexpected message")]
    OutOfTurn,
    /// The requested destination address is not on this host, or the port is not a migration port.
    #[error("{to} is not an address for migrations on this host: {why}")]
    NotHere {
        /// The requested destination.
        to: SocketAddr,
        /// The reason.
        why: String,
    },
    /// The agent cannot connect to the destination's QEMU or NBD server.
    #[error("cannot connect to {to}")]
    Connect {
        /// Address of the QEMU or of the server.
        to: SocketAddr,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The relay of this host failed.
    #[error(transparent)]
    Relay(#[from] MigrationError),
    /// The relays of both hosts failed.
    #[error("{own}; the other agent: {other}", own = own.chain())]
    Both {
        /// Error of this host's relay.
        own: Box<MigrationError>,
        /// Error of the other host's relay, in one line.
        other: String,
    },
    /// The system could not provide a resource.
    #[error("cannot create {what}")]
    System {
        /// Description of the resource.
        what: &'static str,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
}

impl CarryError {
    /// Returns a function that converts a system error to [`Self::System`], for [`Result::map_err`].
    pub fn system(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
