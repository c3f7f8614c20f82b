//! Session of one client: greeting, negotiation, commands.

use std::io::{self, Read};
use std::sync::Arc;
use std::thread;

use serde_json::{Map, Value, json};

use super::commands::{Commands, Refusal};
use super::framing::{Found, Framing};
use super::outbox::{Events, Outbox, line};
use crate::http::HTTP;
use crate::lines::Socket;

/// Message to a client that connects when [`MAX_CLIENTS`](super::MAX_CLIENTS) are connected.
pub const TOO_MANY_CLIENTS: &[u8] =
    b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"too many clients: end another one first\"}}\r\n";

/// Error for a TCP peer whose first bytes are not QMP.
const NO_QMP: &str = "the first bytes are not QMP: the connection is closed";

/// Number of bytes requested by each read.
const CHUNK: usize = 4 << 10;

/// Serves `socket` until its client disconnects or exceeds a limit. The greeting contains `version`, in the format of the
/// answer of `query-version`.
///
/// Invalid input is answered with an error, as in QEMU. On TCP, invalid input before the negotiation also ends the connection:
/// every program on the host, and every web page in its browsers, can connect to a TCP socket. HTTP always ends the connection.
///
/// # Errors
/// The system's error if the client cannot be served; [`io::ErrorKind::InvalidData`] if the peer does not send QMP.
pub fn serve_client(
    socket: Socket,
    version: &Value,
    commands: &dyn Commands,
    events: &Events,
) -> io::Result<()> {
    let socket = Arc::new(socket);
    let outbox = Arc::new(Outbox::default());
    thread::scope(|scope| {
        let name = "qmp/write".to_owned();
        thread::Builder::new()
            .name(name)
            .spawn_scoped(scope, || outbox.write_to(&socket))?;
        let mut session = Session {
            commands,
            negotiated: false,
        };
        let _gone = DisconnectGuard(events, &outbox);
        session.run(version, &socket, &outbox, events)
    })
}

/// When dropped, removes the client and ends its writer thread, even after a panic in a command.
struct DisconnectGuard<'a>(&'a Events, &'a Arc<Outbox>);

impl Drop for DisconnectGuard<'_> {
    fn drop(&mut self) {
        self.0.remove(self.1);
        self.1.finish();
    }
}

struct Session<'a> {
    commands: &'a dyn Commands,
    negotiated: bool,
}

impl Session<'_> {
    fn run(
        &mut self,
        version: &Value,
        socket: &Arc<Socket>,
        outbox: &Arc<Outbox>,
        events: &Events,
    ) -> io::Result<()> {
        // The capability for out-of-band commands is not offered, since the server executes none.
        let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
        if !outbox.answer(line(&greeting)) {
            return Ok(());
        }
        let is_tcp = matches!(**socket, Socket::Tcp(_));
        let mut framing = Framing::default();
        let mut chunk = [0; CHUNK];
        loop {
            let length = match (&**socket).read(&mut chunk) {
                Ok(0) => return Ok(()),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Ok(()),
            };
            framing.push(&chunk[..length]);
            while let Some(found) = framing.next() {
                let was_negotiated = self.negotiated;
                let must_be_qmp = is_tcp && !was_negotiated;
                let reject = |why: &'static str| {
                    outbox.answer(line(&refused(None, &Refusal::generic(why))));
                    Err(io::Error::new(io::ErrorKind::InvalidData, why))
                };
                let (answer, is_end) = match found {
                    Found::Http => return reject(HTTP),
                    Found::Nonsense(_) if must_be_qmp => return reject(NO_QMP),
                    Found::Value(value) if must_be_qmp && !value.is_object() => {
                        return reject(NO_QMP);
                    }
                    Found::Value(request) => (self.answer(&request), false),
                    Found::Nonsense(why) => (refused(None, &Refusal::generic(why)), false),
                    Found::TooMuch(why) => (refused(None, &Refusal::generic(why)), true),
                };
                if !outbox.answer(line(&answer)) || is_end {
                    return Ok(());
                }
                if self.negotiated && !was_negotiated {
                    events.add(outbox, socket);
                }
            }
        }
    }

    fn answer(&mut self, request: &Value) -> Value {
        let id = request.get("id");
        match self.run_request(request) {
            Ok(value) => with_id(json!({ "return": value }), id),
            Err(refusal) => refused(id, &refusal),
        }
    }

    fn run_request(&mut self, request: &Value) -> Result<Value, Refusal> {
        let Value::Object(members) = request else {
            return Err(Refusal::generic("QMP input must be a JSON object"));
        };
        let (command, arguments) = request_of(members)?;
        if members.contains_key("exec-oob") {
            return Err(Refusal::generic(format!(
                "The command {command} does not support OOB"
            )));
        }
        match (self.negotiated, command) {
            (false, "qmp_capabilities") => {
                negotiate(arguments)?;
                self.negotiated = true;
                Ok(json!({}))
            }
            (false, _) => Err(Refusal::not_found(
                "Expecting capabilities negotiation with 'qmp_capabilities'",
            )),
            (true, "qmp_capabilities") => Err(Refusal::not_found(
                "Capabilities negotiation is already complete, command ignored",
            )),
            (true, _) => self.commands.execute(command, arguments),
        }
    }
}

/// Returns the command and the arguments of a request. Refuses invalid members with QEMU's texts.
fn request_of(members: &Map<String, Value>) -> Result<(&str, &Value), Refusal> {
    let wrong =
        |name: &str, what: &str| Refusal::generic(format!("QMP input member '{name}' {what}"));
    let mut command = None;
    let mut arguments = &Value::Null;
    for (name, value) in members {
        match name.as_str() {
            "id" => {}
            "execute" | "exec-oob" => {
                let text = value
                    .as_str()
                    .ok_or_else(|| wrong(name, "must be a string"))?;
                if command.is_some() {
                    return Err(wrong("execute", "clashes with 'exec-oob'"));
                }
                command = Some(text);
            }
            "arguments" if value.is_object() => arguments = value,
            "arguments" => return Err(wrong(name, "must be an object")),
            _ => return Err(wrong(name, "is unexpected")),
        }
    }
    let command = command.ok_or_else(|| Refusal::generic("QMP input lacks member 'execute'"))?;
    Ok((command, arguments))
}

/// Executes `qmp_capabilities`. The server offers no capability, so a request to enable one is refused.
fn negotiate(arguments: &Value) -> Result<(), Refusal> {
    let Value::Object(arguments) = arguments else {
        return Ok(());
    };
    for (name, value) in arguments {
        match (name.as_str(), value.as_array()) {
            ("enable", Some(wanted)) => {
                if let Some(first) = wanted.first() {
                    return Err(Refusal::generic(format!(
                        "QMP capability {} not available",
                        first.as_str().unwrap_or("of that type")
                    )));
                }
            }
            ("enable", None) => {
                return Err(Refusal::generic(
                    "Invalid parameter type for 'enable', expected: array",
                ));
            }
            _ => {
                return Err(Refusal::generic(format!(
                    "Parameter '{name}' is unexpected"
                )));
            }
        }
    }
    Ok(())
}

fn refused(id: Option<&Value>, refusal: &Refusal) -> Value {
    with_id(json!({ "error": refusal.to_json() }), id)
}

fn with_id(mut answer: Value, id: Option<&Value>) -> Value {
    if let Some(id) = id {
        answer["id"] = id.clone();
    }
    answer
}
