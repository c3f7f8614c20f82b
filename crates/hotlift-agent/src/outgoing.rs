//! Outgoing migrations and tunnels: connections of this host's QEMUs, carried through the agent of the destination host.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hotlift::conversation::Conversation;
use hotlift::relay::{
    Hooks, Incoming, Outgoing, RelayProgress, RelayReport, RelaySettings, SourceStream,
};
use hotlift::transport::{Stream, TransportError};
use hotlift::{Address, Listener, Status, options};
use hotlift_qmp::one_line;

use crate::agent::Agent;
use crate::config::{Config, LogLevel, Plaintext};
use crate::dial;
use crate::error::CarryError;
use crate::messages::{Hello, Kind, Message};
use crate::session::Session;
use crate::snapshot::State;
use crate::supervise::{self, Progress};
use crate::tunnel::{self, Limits, RemoteEnd};

/// Longest wait for the other agent's answer to a hello. The other agent first checks an address, or connects on its own host.
const ANSWER: Duration = Duration::from_secs(30);

/// Longest wait for a source's first bytes: for a large VM, QEMU needs up to a minute to start the dirty log before it sends.
const SOURCE: Duration = Duration::from_secs(120);

/// Connect timeout for a destination without an agent.
const DIRECT: Duration = Duration::from_secs(30);

/// Result of an attempt to connect to the other agent.
enum Reached {
    Agent(Conversation, Address),
    /// No process listens at the port of the other agent.
    Nobody(TransportError),
}

/// Carries the connections of `listener` to the destination of `session`, until the session ends. Returns the relay's report;
/// `None` for data that no relay carries.
///
/// # Errors
/// [`CarryError`].
pub fn run(
    agent: &Agent,
    session: &Arc<Session>,
    listener: &Listener,
) -> Result<Option<RelayReport>, CarryError> {
    match session.subject.kind {
        Kind::Migration => migration(agent, session, listener),
        Kind::Tunnel => tunnelled(agent, session, listener).map(|()| None),
    }
}

fn migration(
    agent: &Agent,
    session: &Arc<Session>,
    listener: &Listener,
) -> Result<Option<RelayReport>, CarryError> {
    let most = || agent.config().migrations;
    let _place = agent.sessions.wait_for_slot(session, most)?;
    session.enter(State::Connecting);
    let config = agent.config();
    let to = session.subject.to;
    let (mut conversation, address) = match reach(agent, &config, to)? {
        Reached::Agent(conversation, address) => (conversation, address),
        Reached::Nobody(source) => {
            allow_plaintext(&config, session, source)?;
            tunnel::carry_all(session, listener, &Limits::of(agent), &|| direct(to))?;
            return Ok(None);
        }
    };
    let token = match ask(&mut conversation, session, Kind::Migration)? {
        Message::Ready { token } => token.0,
        Message::Refused { reason } => return Err(refused(&reason)),
        _ => return Err(CarryError::OutOfTurn),
    };
    let options = agent.options();
    session.has_method(options.method_name());
    let settings = RelaySettings {
        outgoing: options,
        limits: options::Limits {
            handshake_timeout: SOURCE,
            ..config.limits()
        },
        outgoing_pass: Some(conversation.pass(token)),
        outgoing_tls: Some(Arc::clone(&agent.tls)),
        ..RelaySettings::default()
    };
    session.control.share_rate(&agent.shares.rate);
    agent.share();
    let progress = Progress::default();
    let sender = conversation.sender();
    let on_source = |source: &SourceStream| {
        progress.has_begun.store(true, Ordering::Release);
        // Send errors are ignored: without this message the other agent's relay does not begin, and then this relay fails.
        let _ = sender.send(&Message::Source {
            channels: source.channels,
            method: source.method.to_owned(),
        });
    };
    let on_progress = |snapshot: &RelayProgress| session.record_progress(snapshot);
    let hooks = Hooks {
        on_source: Some(&on_source),
        on_progress: Some(&on_progress),
        ..Hooks::default()
    };
    let report = supervise::relay(
        session,
        &mut conversation,
        &progress,
        (SOURCE, false),
        &|| {
            let outcome = hotlift::relay::relay(
                Incoming::Listener(listener),
                &Outgoing::Address(&address),
                &settings,
                &session.control,
                hooks,
            );
            // Closes the listener before the other agent's final message, for which the next migration must not wait. After a
            // failure, the connections that remain most likely belong to this migration, and its QEMU has abandoned them.
            let rest = listener.close();
            if outcome.is_ok() {
                agent.give_back(rest, to);
            }
            outcome
        },
    )?;
    Ok(Some(report))
}

fn tunnelled(agent: &Agent, session: &Arc<Session>, listener: &Listener) -> Result<(), CarryError> {
    session.enter(State::Of(Status::Active));
    let config = agent.config();
    let to = session.subject.to;
    let open = || match reach(agent, &config, to)? {
        Reached::Agent(conversation, _) => through(conversation, session),
        Reached::Nobody(source) => {
            allow_plaintext(&config, session, source)?;
            direct(to)
        }
    };
    tunnel::carry_all(session, listener, &Limits::of(agent), &open)
}

/// Opens a connection to the destination of `session` through the agent there.
fn through(mut conversation: Conversation, session: &Session) -> Result<RemoteEnd, CarryError> {
    match ask(&mut conversation, session, Kind::Tunnel)? {
        Message::Ready { .. } => conversation.into_stream().ok_or(CarryError::OutOfTurn),
        Message::Refused { reason } => Err(refused(&reason)),
        _ => Err(CarryError::OutOfTurn),
    }
}

/// Connects to `to` without an agent.
fn direct(to: SocketAddr) -> Result<RemoteEnd, CarryError> {
    let stream: Result<Stream, _> = dial::connect(to, DIRECT);
    stream
        .map(|stream| (stream, Vec::new()))
        .map_err(|source| CarryError::Connect { to, source })
}

/// Connects to the agent of the host `to`. Returns `Nobody` only if no process listens there and the key `peers` names no
/// agent. All other failures are errors, since the caller may send unencrypted data after `Nobody`.
fn reach(agent: &Agent, config: &Config, to: SocketAddr) -> Result<Reached, CarryError> {
    let address = config.agent_of(to.ip());
    let stream = match address.connect(config.agent_timeout.0) {
        Ok(stream) => stream,
        Err(source) if has_no_listener(&source) && !config.names_agent_of(to.ip()) => {
            return Ok(Reached::Nobody(source));
        }
        Err(source) => return Err(CarryError::AgentUnreached { to, source }),
    };
    let secured = stream.secure(&agent.tls, Some(address.host()));
    let secured =
        secured.inspect_err(|_| agent.sessions.count(|totals| totals.tls_failures += 1))?;
    Ok(Reached::Agent(Conversation::new(secured), address))
}

/// Returns true if `error` shows that no process listens: the connection was refused, or timed out. Other errors do not show
/// this: no file descriptors, no route, an unknown name.
fn has_no_listener(error: &TransportError) -> bool {
    let TransportError::Connect { source, .. } = error else {
        return false;
    };
    matches!(
        source.kind(),
        ErrorKind::ConnectionRefused | ErrorKind::TimedOut
    )
}

fn ask(
    conversation: &mut Conversation,
    session: &Session,
    kind: Kind,
) -> Result<Message, CarryError> {
    conversation.send_hello(&Hello {
        id: session.subject.id,
        kind,
        to: session.subject.to,
    })?;
    conversation.receive(ANSWER)?.ok_or(CarryError::Silent)
}

fn refused(reason: &str) -> CarryError {
    CarryError::Refused {
        reason: one_line(reason),
    }
}

/// Returns an error if the configuration refuses connections to a host without an agent. Logs a warning otherwise.
fn allow_plaintext(
    config: &Config,
    session: &Session,
    source: TransportError,
) -> Result<(), CarryError> {
    let to = session.subject.to;
    match config.plaintext {
        Plaintext::Refuse => Err(CarryError::NoAgent { to, source }),
        Plaintext::Allow => {
            let why = hotlift::error::error_line(&source);
            let text =
                format!("no agent at the destination, so the migration is not encrypted: {why}");
            session.log(LogLevel::Warning, &text);
            session.enter(State::PassedThrough);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::fixture::agent;

    /// Returns a loopback port without a listening process.
    fn closed_port() -> u16 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.local_addr().unwrap().port()
    }

    #[test]
    fn only_a_refused_or_timed_out_connection_to_an_unnamed_agent_means_no_listener() {
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 49152));
        // The kernel never connects to a broadcast address: the error is EACCES or ENETUNREACH.
        let broadcast = SocketAddr::from((Ipv4Addr::BROADCAST, 49152));
        let port = closed_port();
        for (lines, to, is_nobody) in [
            (String::new(), loopback, true),
            (
                "[peers]\n\"127.0.0.0/8\" = \"127.0.0.1\"".to_owned(),
                loopback,
                false,
            ),
            (
                "[peers]\n\"127.0.0.1\" = \"no-such-host.invalid\"".to_owned(),
                loopback,
                false,
            ),
            (String::new(), broadcast, false),
        ] {
            let agent = agent(&format!(
                "agent-port = {port}\nplaintext = \"allow\"\n{lines}"
            ));
            let reached = reach(&agent, &agent.config(), to);
            let found = match &reached {
                Ok(Reached::Nobody(_)) => true,
                Err(CarryError::AgentUnreached { .. }) => false,
                Ok(Reached::Agent(..)) | Err(_) => panic!("{lines} {to}"),
            };
            assert_eq!(found, is_nobody, "{lines} {to}");
        }
        for (errno, found) in [
            (rustix::io::Errno::CONNREFUSED, true),
            (rustix::io::Errno::TIMEDOUT, true),
            (rustix::io::Errno::MFILE, false),
            (rustix::io::Errno::NETUNREACH, false),
            (rustix::io::Errno::HOSTUNREACH, false),
        ] {
            let error = TransportError::Connect {
                uri: String::new(),
                source: errno.into(),
            };
            assert_eq!(has_no_listener(&error), found, "{errno}");
        }
    }
}
