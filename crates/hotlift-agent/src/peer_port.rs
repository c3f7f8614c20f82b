//! The port at which the agent listens for other agents. Classifies each connection by its first bytes after the TLS handshake.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Listener;
use hotlift::admission::{Admitted, ConnectionClass, peek_class};
use hotlift::conversation::callers::{Call, Callers, DropReason};
use hotlift::conversation::{Conversation, ConversationError};
use hotlift::error::error_line;

use crate::agent::Agent;
use crate::config::LogLevel;
use crate::error::CarryError;
use crate::incoming;
use crate::messages::{Hello, Message};

/// Purpose of a connection from a peer with a valid certificate.
enum PeerRequest {
    /// Announces a new migration or tunnel.
    Announce(Hello),
    /// Joins an announced migration with its token, or asks about its outcome.
    Belong(ConnectionClass),
}

/// Accepts connections at the agent's port until the agent ends.
///
/// # Errors
/// If the system has no file descriptors left.
pub fn serve(agent: &Arc<Agent>, listener: &Listener) -> io::Result<()> {
    let report_failure = |why: &str| {
        agent.sessions.count(|totals| totals.tls_failures += 1);
        let text = format!("refused a connection: {why}");
        agent.log.write(LogLevel::Warning, &text);
    };
    let mut callers = Callers::new(listener, Some(Arc::clone(&agent.tls)), &report_failure)?;
    while !agent.has_ended() {
        let others = [agent.ended_fd()];
        if let Some(call) = callers.next(None, &others, &mut receive) {
            take(agent, call);
        }
    }
    Ok(())
}

fn receive(conversation: &mut Conversation) -> Result<Option<PeerRequest>, ConversationError> {
    if conversation.buffered_len() == 0 {
        match peek_class(conversation.stream()) {
            ConnectionClass::Partial => return Ok(None),
            ConnectionClass::Hello | ConnectionClass::Gone(_) => {}
            head => return Ok(Some(PeerRequest::Belong(head))),
        }
    }
    // The connection has ended, or has sent a part of a hello.
    let hello = conversation.receive_hello(Duration::ZERO)?;
    Ok(hello.map(PeerRequest::Announce))
}

fn take(agent: &Arc<Agent>, call: Call<PeerRequest>) {
    let Call {
        mut conversation,
        request,
    } = call;
    match request {
        Ok(PeerRequest::Announce(hello)) => announce(agent, conversation, hello),
        Ok(PeerRequest::Belong(head)) => {
            if let Some((stream, _)) = conversation.into_stream() {
                belong(agent, Admitted::seen(stream, Instant::now(), head));
            }
        }
        Err(error) => {
            let peer = conversation.stream().peer_host();
            let reason = error_line(&of_an_agent(error));
            // Errors are ignored, and the send does not wait: the peer may have closed the connection, or may not read.
            let _ = conversation.send(&Message::Refused {
                reason: reason.clone(),
            });
            agent.refuse(&format!("peer={peer} error=\"{reason}\""));
        }
    }
}

/// Converts an error before the hello to the agent's error type: only agents connect to this port.
fn of_an_agent(error: DropReason) -> CarryError {
    match error {
        DropReason::Conversation(source) => CarryError::Conversation(source),
        other => CarryError::Unannounced(other),
    }
}

fn announce(agent: &Arc<Agent>, conversation: Conversation, hello: Hello) {
    let of_thread = Arc::clone(agent);
    let started = thread::Builder::new()
        .name("agent/in".to_owned())
        .spawn(move || incoming::run(&of_thread, conversation, &hello));
    if let Err(error) = started {
        agent.refuse(&format!("error=\"no thread: {error}\""));
    }
}

/// Passes a connection to the migration to which its token or question belongs.
fn belong(agent: &Agent, mut one: Admitted) {
    let session = match one.head() {
        ConnectionClass::Token(_) => agent.sessions.find(|session| {
            let pass = session.pass.as_ref();
            pass.is_some_and(|pass| pass.is_presented_by(&one))
        }),
        ConnectionClass::Question(id) => agent.sessions.find(|session| session.control.has_id(&id)),
        _ => None,
    };
    let peer = one.stream.peer_host();
    let is_token = matches!(one.head(), ConnectionClass::Token(_));
    let refused = match session {
        Some(session) if !agent.sessions.may_hold(&session) => {
            "too many connections of this peer wait for their migrations"
        }
        Some(_) if is_token && !one.consume_token() => "the connection broke",
        Some(session) => match session.deliver(one) {
            Ok(()) => return,
            Err(_) => "its migration has ended",
        },
        None => "it belongs to no migration",
    };
    agent.refuse(&format!("peer={peer} error=\"{refused}\""));
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};

    use super::*;
    use crate::fixture::{agent, connection};

    #[test]
    fn an_agent_with_another_protocol_gets_the_reason() {
        let agent = agent("");
        for (hello, words) in [
            (
                r#"{"hotlift":99,"new":1}"#,
                "the connection to the other agent failed: the other side has version 99 of the control protocol, this side \
                 has version ",
            ),
            (
                r#"{"hot":1}"#,
                "the connection to the other agent failed: the other side sent an unknown message",
            ),
        ] {
            let (near, mut far) = connection();
            writeln!(far, "{hello}").unwrap();
            let mut conversation = Conversation::new(near);
            let request = loop {
                match receive(&mut conversation) {
                    Ok(None) => {}
                    Ok(Some(_)) => panic!("{hello} is taken"),
                    Err(error) => break Err(error.into()),
                }
            };
            take(
                &agent,
                Call {
                    conversation,
                    request,
                },
            );
            let mut answer = String::new();
            BufReader::new(far).read_line(&mut answer).unwrap();
            match serde_json::from_str(&answer).unwrap() {
                Message::Refused { reason } => assert!(reason.contains(words), "{reason}"),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(agent.sessions.totals().refusals, 2);
    }
}
