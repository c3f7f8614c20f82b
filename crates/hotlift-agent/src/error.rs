//! Why the agent, or something that it carries, failed.

use std::net::SocketAddr;
use std::path::PathBuf;

use hotlift::MigrationError;
use hotlift::conversation::ConversationError;
use hotlift::conversation::callers::Unheard;
use hotlift::tls::{TlsError, TlsSetupError};
use hotlift::transport::TransportError;
use hotlift_monitor::MonitorError;
use hotlift_terminal::error::TerminalError;

use crate::config::ConfigError;

/// What to do where there is no configuration.
const NO_FILE: &str = "name a file with --config FILE; each key has a default, so that an empty one will do; the packages \
                       have an example with all keys as /etc/hotlift/agent.toml, the sources as packaging/agent.toml";

/// What ends the agent.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The configuration.
    #[error("bad configuration")]
    Config(#[from] ConfigError),
    /// The certificates.
    #[error("the agent needs certificates ('hotlift certs' makes them; key 'tls')")]
    Tls(#[source] Box<TlsSetupError>),
    /// Certificates that other agents refuse, or with which this one refuses others.
    #[error(
        "the certificates in {} have problems: {count} (named above; 'hotlift certs show --dir {}' shows all of them)",
        dir.display(),
        dir.display()
    )]
    Certificates {
        /// Their folder.
        dir: PathBuf,
        /// Problems that were found.
        count: usize,
    },
    /// A port that it needs.
    #[error("cannot listen")]
    Listen(#[source] TransportError),
    /// Something that the system is asked for.
    #[error("cannot have {what}")]
    System {
        /// What.
        what: &'static str,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The rules that redirect.
    #[error("cannot redirect migrations to the agent")]
    Rules(#[from] RulesError),
    /// Something of this host keeps migrations from the agent.
    #[error(
        "not all migrations of this host come to the agent, problems found: {count} (named above; with plaintext = \"refuse\" they fail; \
         change the rules that are named, or 'ports', 'users' and 'destinations' in agent.toml)"
    )]
    NotRedirected {
        /// Problems that were found.
        count: usize,
    },
    /// The control socket.
    #[error("cannot serve the control socket")]
    Control(#[from] MonitorError),
    /// What commands share.
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    /// A thread that it cannot do without.
    #[error("the agent has ended because its thread '{part}' did (the log says why)")]
    Lost {
        /// Its name.
        part: &'static str,
    },
}

impl AgentError {
    /// What to do next, where that is not plain from the error.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Config(error) if error.is_no_file() => Some(NO_FILE),
            _ => None,
        }
    }

    /// Something of the system's, for [`Result::map_err`].
    pub fn system(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

/// Why the rules are not in force.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// The tool.
    #[error("cannot run '{tool}' (it is in the package {package})")]
    Run {
        /// Which.
        tool: &'static str,
        /// Where it is from.
        package: &'static str,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// What it says.
    #[error(
        "'nft' refuses (it needs CAP_NET_ADMIN, and the kernel's nft_redir, nft_socket, nft_reject_inet, nft_fib_inet \
         and nft_log): {said}"
    )]
    Refused {
        /// Its words, in one line.
        said: String,
    },
    /// Nobody of `users`.
    #[error("none of the users {users} is one of this host's (key 'users')")]
    NoUser {
        /// Those that were looked for.
        users: String,
    },
    /// The kernel tells of no changes.
    #[error("the kernel does not tell of changes of nftables (that needs CAP_NET_ADMIN)")]
    Watch(#[source] std::io::Error),
    /// Its own connections would come back to it.
    #[error(
        "the agent runs as one of 'users', and cannot mark its own connections (CAP_NET_ADMIN), which would be \
         redirected, too"
    )]
    NoMark(#[source] std::io::Error),
}

/// Why a migration or a tunnel did not get through.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// The agent takes nothing new.
    #[error("the agent is to end, and takes nothing new")]
    Ending,
    /// It was cancelled while it waited for a place.
    #[error("it was cancelled before it began")]
    Cancelled,
    /// Its source was cancelled while it waited for a place.
    #[error("its source has closed its connections before it began")]
    Deserted,
    /// It did not end when it was cancelled: its QEMU was told that the destination has loaded the guest, and has not closed
    /// its connection.
    #[error(
        "the agent ends before it is known which QEMU has the guest: if the destination's does not run it, 'cont' at the \
         source (libvirt does so by itself)"
    )]
    Unsettled,
    /// Nobody answers at the agent's port.
    #[error("no agent answers for {to}, and plaintext = \"refuse\"")]
    NoAgent {
        /// Where it was to go.
        to: SocketAddr,
        /// Why not.
        #[source]
        source: TransportError,
    },
    /// It is not known whether an agent is there, or one should be.
    #[error(
        "the agent for {to} cannot be reached, which is no reason to go unencrypted (see its host, this host's limits and \
         routes, and [peers])"
    )]
    AgentUnreached {
        /// Where it was to go.
        to: SocketAddr,
        /// Why not.
        #[source]
        source: TransportError,
    },
    /// Somebody who is not who he should be.
    #[error("the TLS handshake with the other agent has failed")]
    Tls(#[from] TlsError),
    /// The conversation with it.
    #[error("talking to the other agent failed")]
    Conversation(#[from] ConversationError),
    /// A peer without a hello, or one too many.
    #[error("the other agent was dropped before its hello")]
    Unannounced(#[source] Unheard),
    /// It said nothing.
    #[error("the other agent did not answer in time")]
    Silent,
    /// It said no.
    #[error("the other agent refuses: {reason}")]
    Refused {
        /// Why, in one line.
        reason: String,
    },
    /// It said something else.
    #[error("the other agent said something out of turn")]
    OutOfTurn,
    /// What the other agent asks for is not what an agent does.
    #[error("{to} is no address of a migration on this host: {why}")]
    NotHere {
        /// Where it was to go.
        to: SocketAddr,
        /// Why not.
        why: String,
    },
    /// The destination's QEMU, or its NBD server.
    #[error("cannot connect to {to}")]
    Connect {
        /// Where.
        to: SocketAddr,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The relay.
    #[error(transparent)]
    Relay(#[from] MigrationError),
    /// The relays of both hosts.
    #[error("{own}; the other agent: {other}", own = own.chain())]
    Both {
        /// That of this one.
        own: Box<MigrationError>,
        /// That of the other, in one line.
        other: String,
    },
    /// The system.
    #[error("the system gives no {what}")]
    System {
        /// What.
        what: &'static str,
        /// Its reason.
        #[source]
        source: std::io::Error,
    },
}

impl CarryError {
    /// Something of the system's, for [`Result::map_err`].
    pub fn system(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
