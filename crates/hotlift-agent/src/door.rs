//! The agent's port: classifies each connection by its first bytes after the TLS handshake.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hotlift::Listener;
use hotlift::admission::{Admitted, Head, peek_head};
use hotlift::conversation::callers::{Call, Callers, Unheard};
use hotlift::conversation::{Conversation, ConversationError};
use hotlift::error::error_line;

use crate::agent::Agent;
use crate::config::LogLevel;
use crate::error::CarryError;
use crate::incoming;
use crate::messages::{Hello, Message};

/// Request of a peer with a valid certificate.
enum Wish {
    /// Announces a migration or a tunnel.
    Announce(Hello),
    /// Joins an announced migration, or asks about it.
    Belong(Head),
}

/// Serves the agent's port until the agent ends.
///
/// # Errors
/// If the system has no file descriptors left.
pub fn serve(agent: &Arc<Agent>, listener: &Listener) -> io::Result<()> {
    let complain = |why: &str| {
        agent.sessions.count(|totals| totals.tls_failures += 1);
        let text = format!("refused a connection: {why}");
        agent.log.say(LogLevel::Warning, &text);
    };
    let mut callers = Callers::new(listener, Some(Arc::clone(&agent.tls)), &complain)?;
    while !agent.has_ended() {
        let others = [agent.ended_fd()];
        if let Some(call) = callers.next(None, &others, &mut hear) {
            take(agent, call);
        }
    }
    Ok(())
}

fn hear(conversation: &mut Conversation) -> Result<Option<Wish>, ConversationError> {
    if conversation.begun() == 0 {
        match peek_head(conversation.stream()) {
            Head::Partial => return Ok(None),
            Head::Hello | Head::Gone(_) => {}
            head => return Ok(Some(Wish::Belong(head))),
        }
    }
    // The start or the rest of a hello, or the end of the stream.
    let hello = conversation.hear_hello(Duration::ZERO)?;
    Ok(hello.map(Wish::Announce))
}

fn take(agent: &Arc<Agent>, call: Call<Wish>) {
    let Call {
        mut conversation,
        said,
    } = call;
    match said {
        Ok(Wish::Announce(hello)) => announce(agent, conversation, hello),
        Ok(Wish::Belong(head)) => {
            if let Some((stream, _)) = conversation.into_stream() {
                belong(agent, Admitted::seen(stream, Instant::now(), head));
            }
        }
        Err(error) => {
            let peer = conversation.stream().peer_host();
            let reason = error_line(&of_an_agent(error));
            // Errors are ignored, without a wait: the peer may have closed the connection, or may not read.
            let _ = conversation.say(&Message::Refused {
                reason: reason.clone(),
            });
            agent.refuse(&format!("peer={peer} error=\"{reason}\""));
        }
    }
}

/// Converts an error of a conversation into one with an agent: only agents connect to this port.
fn of_an_agent(error: Unheard) -> CarryError {
    match error {
        Unheard::Conversation(source) => CarryError::Conversation(source),
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

/// Passes a connection to its migration, after consuming the token from it.
fn belong(agent: &Agent, mut one: Admitted) {
    let session = match one.head() {
        Head::Token(_) => agent.sessions.find(|session| {
            let pass = session.pass.as_ref();
            pass.is_some_and(|pass| pass.is_shown_by(&one))
        }),
        Head::Question(id) => agent
            .sessions
            .find(|session| session.control.is_asked_about_by(&id)),
        _ => None,
    };
    let peer = one.stream.peer_host();
    let is_token = matches!(one.head(), Head::Token(_));
    let refused = match session {
        Some(session) if !agent.sessions.may_hold(&session) => {
            "too many connections of this peer wait for their migrations"
        }
        Some(_) if is_token && !one.let_pass() => "the connection broke",
        Some(session) => match session.give(one) {
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
                 has ",
            ),
            (
                r#"{"hot":1}"#,
                "the connection to the other agent failed: unknown message",
            ),
        ] {
            let (near, mut far) = connection();
            writeln!(far, "{hello}").unwrap();
            let mut conversation = Conversation::new(near);
            let said = loop {
                match hear(&mut conversation) {
                    Ok(None) => {}
                    Ok(Some(_)) => panic!("{hello} is taken"),
                    Err(error) => break Err(error.into()),
                }
            };
            take(&agent, Call { conversation, said });
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
