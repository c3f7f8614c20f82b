//! Incoming migrations and tunnels, announced by another agent: relays a migration to the destination QEMU.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hotlift::admission::Admitted;
use hotlift::conversation::Conversation;
use hotlift::relay::{
    self, Hooks, Incoming, Outgoing, RelayProgress, RelayReport, RelaySettings, SourceStream,
};
use hotlift::{Address, Listener, Status};
use hotlift_qmp::Uuid;

use crate::agent::Agent;
use crate::config::{WEIGHT, stream};
use crate::dial;
use crate::error::CarryError;
use crate::messages::{Hello, Kind, Message};
use crate::session::{Direction, Session, SessionInfo};
use crate::snapshot::State;
use crate::supervise::{self, Progress};
use crate::tunnel::{self, Limits};

/// Longest time from the other agent's message `Source` until the relay has read the start of the source's stream. A little
/// longer than `SOURCE` in `outgoing`, the other agent's wait for the same source.
const SOURCE: Duration = Duration::from_secs(150);

/// Connect timeout for the server to which a tunnel leads.
const CONNECT: Duration = Duration::from_secs(10);

/// Answers `hello`, and carries the announced migration or tunnel until its end.
pub fn run(agent: &Arc<Agent>, mut conversation: Conversation, hello: &Hello) {
    let outcome = begin(agent, &mut conversation, hello);
    let (session, listener) = match outcome {
        Ok(begun) => begun,
        Err(error) => {
            let reason = hotlift::error::error_line(&error);
            let peer = conversation.stream().peer_host();
            agent.refuse(&format!("id={} peer={peer} error=\"{reason}\"", hello.id));
            let _ = conversation.send(&Message::Refused { reason });
            return;
        }
    };
    let outcome = match hello.kind {
        Kind::Migration => migration(agent, &session, &mut conversation, &listener).map(Some),
        Kind::Tunnel => tunnelled(agent, &session, conversation, &listener).map(|()| None),
    };
    drop(listener);
    agent.ended(&session, outcome);
}

/// Checks the migration or tunnel that `hello` announces, and answers `Ready` to accept it. Returns the new session and the
/// listener of its connections. A refusal is an error.
fn begin(
    agent: &Arc<Agent>,
    conversation: &mut Conversation,
    hello: &Hello,
) -> Result<(Arc<Session>, Listener), CarryError> {
    let to = hello.to;
    let not_here = |why: String| CarryError::NotHere { to, why };
    let ports = agent.config().ports;
    if !ports.contains(to.port()) {
        return Err(not_here(format!("its port is none of {ports} ('ports')")));
    }
    if !dial::is_of_this_host(to.ip()).map_err(CarryError::system("list of addresses"))? {
        return Err(not_here("this host has no such address".to_owned()));
    }
    let (listener, sender) = Listener::queue(false).map_err(CarryError::system("descriptor"))?;
    let token = relay::new_token().map_err(CarryError::system("random number"))?;
    let subject = SessionInfo {
        id: hello.id,
        direction: Direction::Incoming,
        kind: hello.kind,
        to,
        peer: conversation.stream().peer_host(),
        announcer: conversation.stream().peer().cloned(),
    };
    let pass = conversation.pass(token);
    // With the default weight: only the answers in a tunnel share this host's budget.
    let session = Session::new(subject, sender, Some(pass), WEIGHT, &agent.log);
    let session = Arc::new(session);
    agent.sessions.add(&session)?;
    let begun = match hello.kind {
        Kind::Migration => Ok(()),
        // Connects before sending `Ready`: this keeps the order of a tunnel's connections at the server.
        Kind::Tunnel => dial::connect(to, CONNECT)
            .map_err(|source| CarryError::Connect { to, source })
            .and_then(|far| {
                let given = session.deliver(Admitted::new(far, Instant::now()));
                given.map_err(|_| CarryError::OutOfTurn)
            }),
    };
    let answer = Message::Ready { token: Uuid(token) };
    match begun.and_then(|()| Ok(conversation.send(&answer)?)) {
        Ok(()) => Ok((session, listener)),
        Err(error) => {
            agent.not_begun(&session, &error);
            Err(error)
        }
    }
}

fn migration(
    agent: &Agent,
    session: &Session,
    conversation: &mut Conversation,
    listener: &Listener,
) -> Result<RelayReport, CarryError> {
    session.enter(State::Connecting);
    let (channels, method) = source(session, conversation)?;
    session.open();
    let options = stream(channels, &method).map_err(|_| CarryError::OutOfTurn)?;
    session.has_method(options.method_name());
    let settings = RelaySettings {
        outgoing: options,
        limits: agent.config().limits(),
        incoming_pass: session.pass.clone(),
        ..RelaySettings::default()
    };
    let to = session.subject.to;
    let address = Address::Tcp {
        host: to.ip().to_string(),
        port: to.port(),
    };
    let progress = Progress::default();
    let on_source = |_: &SourceStream| progress.has_begun.store(true, Ordering::Release);
    let on_commit = || progress.is_committed.store(true, Ordering::Release);
    let on_progress = |snapshot: &RelayProgress| session.record_progress(snapshot);
    let hooks = Hooks {
        on_source: Some(&on_source),
        on_commit: Some(&on_commit),
        on_progress: Some(&on_progress),
        ..Hooks::default()
    };
    supervise::relay(session, conversation, &progress, (SOURCE, true), &|| {
        let outcome = relay::relay(
            Incoming::Listener(listener),
            &Outgoing::Address(&address),
            &settings,
            &session.control,
            hooks,
        );
        listener.close();
        outcome
    })
}

/// Waits until the other agent sends `Source` (the number of channels and the compression method of the source). No timeout
/// applies while the agent stays connected. Before this message, the destination's libvirt may prepare a guest: this takes
/// minutes if much memory is preallocated.
fn source(session: &Session, conversation: &mut Conversation) -> Result<(u8, String), CarryError> {
    let wake_fd = session
        .control
        .wake_fd()
        .map_err(CarryError::system("descriptor"))?;
    loop {
        if session.control.is_cancelled() {
            return Err(CarryError::Cancelled);
        }
        match conversation.receive(Duration::ZERO)? {
            None => {
                let waited = wake_fd.wait_readable(conversation.stream(), Duration::MAX);
                waited.map_err(CarryError::system("wait"))?;
            }
            Some(Message::Source { channels, method }) => return Ok((channels, method)),
            Some(Message::Failed { reason }) => {
                return Err(CarryError::Refused {
                    reason: hotlift_qmp::one_line(&reason),
                });
            }
            Some(_) => return Err(CarryError::OutOfTurn),
        }
    }
}

fn tunnelled(
    agent: &Agent,
    session: &Session,
    conversation: Conversation,
    listener: &Listener,
) -> Result<(), CarryError> {
    session.enter(State::Of(Status::Active));
    let near = std::cell::Cell::new(conversation.into_stream());
    // The listener has exactly one connection: `begin` made it, to the server.
    let limits = Limits::of(agent);
    tunnel::carry_all(session, listener, &limits, &|| {
        near.take().ok_or(CarryError::OutOfTurn)
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::fixture::{agent, connection, until};

    fn hello(kind: Kind) -> Hello {
        Hello {
            id: crate::messages::Id(7),
            kind,
            // No process listens at this address.
            to: "127.0.0.1:49152".parse().unwrap(),
        }
    }

    #[test]
    fn the_relay_to_a_qemu_has_the_silence_timeout_of_the_configuration() {
        let agent = agent("silence-timeout = \"7s\"");
        let limits = agent.config().limits();
        assert_eq!(limits.silence_timeout, Duration::from_secs(7));
        assert_eq!(
            Limits::of(&agent).silence_timeout,
            Duration::from_secs(7),
            "of a tunnel"
        );
    }

    #[test]
    fn a_session_that_could_not_start_has_failed_and_holds_no_resources() {
        let agent = agent("ports = \"49152-49152\"");
        let (stream, _other) = connection();
        run(&agent, Conversation::new(stream), &hello(Kind::Tunnel));
        assert!(agent.sessions.running().is_empty());
        let ended = agent.sessions.totals().ended;
        assert_eq!(
            ended.get(&["incoming", "tunnel", "failed"]),
            Some(&1),
            "{ended:?}"
        );
    }

    #[test]
    fn an_announced_migration_waits_for_its_source_until_the_announcer_disconnects() {
        let agent = agent("ports = \"49152-49152\"");
        let (stream, announcer) = connection();
        thread::scope(|scope| {
            let runs = scope.spawn(|| {
                run(&agent, Conversation::new(stream), &hello(Kind::Migration));
            });
            let waits = |session: &Session| session.snapshot().state == State::Connecting;
            until("it waits", || agent.sessions.find(waits).is_some());
            drop(announcer);
            until("it ends", || runs.is_finished());
        });
        assert!(agent.sessions.running().is_empty());
    }
}
