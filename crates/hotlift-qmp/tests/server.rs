//! Tests the server's guarantees for clients, and its protection against them.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hotlift_qmp::server::{
    BoundSocket, Clients, Commands, Events, MAX_CLIENTS, MAX_EVENTS_WAITING, Refusal,
    TOO_MANY_CLIENTS, serve_client,
};
use hotlift_testkit::alone;
use hotlift_testkit::alone::resident;
use serde_json::{Value, json};
use tempfile::TempDir;

const DEADLINE: Duration = Duration::from_secs(60);

/// Length of an answer that exceeds the kernel's buffers, in bytes.
const LONG: usize = 1 << 20;

/// Returns its arguments, and counts its calls.
#[derive(Default)]
struct Echo(AtomicU64);

impl Commands for Echo {
    fn execute(&self, command: &str, arguments: &Value) -> Result<Value, Refusal> {
        self.0.fetch_add(1, Ordering::Relaxed);
        match command {
            "echo" => Ok(arguments.clone()),
            "long" => Ok("y".repeat(LONG).into()),
            "refuse" => Err(Refusal::generic("as was asked for")),
            _ => Err(Refusal::no_command(command)),
        }
    }
}

struct Served {
    folder: TempDir,
    commands: Arc<Echo>,
    events: Events,
    clients: Option<Clients>,
}

impl Served {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        let events = Events::new();
        let (for_clients, commands) = (events.clone(), Arc::new(Echo::default()));
        let echo = Arc::clone(&commands);
        let serve = Arc::new(move |socket| {
            let _ = serve_client(
                socket,
                &json!({ "package": "test" }),
                &*commands,
                &for_clients,
            );
        });
        let clients = Clients::serve(BoundSocket::Unix(listener), TOO_MANY_CLIENTS, serve);
        Self {
            folder,
            commands: echo,
            events,
            clients: Some(clients.unwrap()),
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    /// Connects a client that has negotiated.
    fn client(&self) -> Conversation {
        let mut client = Conversation::new(&self.path());
        assert_eq!(client.receive()["QMP"]["version"]["package"], "test");
        let answer = client.ask(r#"{"execute":"qmp_capabilities"}"#);
        assert_eq!(answer, json!({ "return": {} }));
        client
    }

    /// Checks that a client is served before the deadline: others may still be disconnecting.
    fn lives(&self) {
        let start = Instant::now();
        loop {
            let mut client = Conversation::new(&self.path());
            if client.receive().get("QMP").is_some() {
                return;
            }
            assert!(start.elapsed() < DEADLINE, "no client is served any more");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

struct Conversation(BufReader<UnixStream>);

impl Conversation {
    fn new(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        Self(BufReader::new(stream))
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line:?}"))
    }

    fn ask(&mut self, text: &str) -> Value {
        self.send(text.as_bytes());
        self.receive()
    }

    /// Returns true if the other side has closed, after any last message.
    fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

fn error(class: &str, desc: &str) -> Value {
    json!({ "class": class, "desc": desc })
}

#[test]
fn the_negotiation_comes_first_and_once() {
    let served = Served::new();
    let mut client = Conversation::new(&served.path());
    assert_eq!(client.receive()["QMP"]["capabilities"], json!([]));
    let answer = client.ask(r#"{"execute":"echo","id":7}"#);
    let expecting = "Expecting capabilities negotiation with 'qmp_capabilities'";
    assert_eq!(
        answer,
        json!({ "id": 7, "error": error("CommandNotFound", expecting) })
    );
    let answer = client.ask(r#"{"execute":"qmp_capabilities","arguments":{"enable":["oob"]}}"#);
    assert_eq!(answer["error"]["class"], "GenericError");
    for (arguments, desc) in [
        (
            r#"{"enable":"oob"}"#,
            "Invalid parameter type for 'enable', expected: array",
        ),
        (r#"{"x":1}"#, "Parameter 'x' is unexpected"),
    ] {
        let request = format!(r#"{{"execute":"qmp_capabilities","arguments":{arguments}}}"#);
        assert_eq!(client.ask(&request)["error"], error("GenericError", desc));
    }
    assert_eq!(
        client.ask(r#"{"execute":"qmp_capabilities","arguments":{"enable":[]}}"#),
        json!({ "return": {} })
    );
    let again = client.ask(r#"{"execute":"qmp_capabilities"}"#);
    let complete = "Capabilities negotiation is already complete, command ignored";
    assert_eq!(again["error"], error("CommandNotFound", complete));
    assert_eq!(
        client.ask(r#"{"execute":"echo","arguments":{"a":1}}"#),
        json!({ "return": { "a": 1 } })
    );
}

#[test]
fn an_id_of_any_kind_is_returned_and_errors_have_qemus_text() {
    let served = Served::new();
    let mut client = served.client();
    for id in [
        "1",
        "\"x\"",
        "null",
        "[1,{\"a\":[]}]",
        "{\"b\":2.5}",
        "true",
    ] {
        let answer = client.ask(&format!(r#"{{"execute":"refuse","id":{id}}}"#));
        let back = answer.get("id").expect("an id, if it is null, too");
        assert_eq!(back.to_string(), id);
        assert_eq!(answer["error"], error("GenericError", "as was asked for"));
    }
    for (request, class, desc) in [
        (
            r#"{"execute":"nope"}"#,
            "CommandNotFound",
            "The command nope has not been found",
        ),
        (
            r#"{"exec-oob":"echo"}"#,
            "GenericError",
            "The command echo does not support OOB",
        ),
        (
            r#"{"execute":"a","exec-oob":"b"}"#,
            "GenericError",
            "QMP input member 'execute' clashes with 'exec-oob'",
        ),
        (
            r#"{"foo":1}"#,
            "GenericError",
            "QMP input member 'foo' is unexpected",
        ),
        (
            r#"{"execute":1}"#,
            "GenericError",
            "QMP input member 'execute' must be a string",
        ),
        (
            r#"{"execute":"echo","arguments":1}"#,
            "GenericError",
            "QMP input member 'arguments' must be an object",
        ),
        ("{}", "GenericError", "QMP input lacks member 'execute'"),
        ("[1]", "GenericError", "QMP input must be a JSON object"),
    ] {
        assert_eq!(
            client.ask(request)["error"],
            error(class, desc),
            "{request}"
        );
    }
}

#[test]
fn every_negotiated_client_receives_every_event_with_its_time() {
    let served = Served::new();
    let mut two = [served.client(), served.client()];
    let mut silent = Conversation::new(&served.path());
    silent.receive();
    // The answer proves that the client receives events.
    for client in &mut two {
        client.ask(r#"{"execute":"echo"}"#);
    }
    served.events.send("STOP", None);
    served
        .events
        .send("MIGRATION", Some(&json!({ "status": "setup" })));
    for client in &mut two {
        let stop = client.receive();
        assert_eq!(stop["event"], "STOP");
        assert!(stop["timestamp"]["seconds"].as_u64().unwrap() > 1_700_000_000);
        assert!(stop["timestamp"]["microseconds"].as_u64().unwrap() < 1_000_000);
        assert!(stop.get("data").is_none());
        assert_eq!(client.receive()["data"]["status"], "setup");
    }
    let first = silent.ask(r#"{"execute":"qmp_capabilities"}"#);
    assert_eq!(first, json!({ "return": {} }), "an event came before");
}

#[test]
fn events_keep_their_order_however_late_a_client_reads_them() {
    let served = Served::new();
    let mut client = served.client();
    client.ask(r#"{"execute":"echo"}"#);
    // More than the kernel's buffers hold, but less than the queue.
    let count = MAX_EVENTS_WAITING / 2;
    for number in 0..count {
        let data = json!({ "number": number, "padding": "x".repeat(1000) });
        served.events.send("E", Some(&data));
    }
    for number in 0..count {
        assert_eq!(client.receive()["data"]["number"], number);
    }
}

#[test]
fn no_event_precedes_the_reply_to_the_negotiation() {
    let served = Served::new();
    for _ in 0..40 {
        let mut client = Conversation::new(&served.path());
        client.receive();
        std::thread::scope(|scope| {
            // Fewer than the number that disconnects a client that has not read yet.
            scope.spawn(|| (0..MAX_EVENTS_WAITING / 2).for_each(|_| served.events.send("E", None)));
            let answer = client.ask(r#"{"execute":"qmp_capabilities"}"#);
            assert_eq!(answer, json!({ "return": {} }));
        });
    }
}

#[test]
fn nothing_is_kept_for_a_client_that_has_gone() {
    let served = Served::new();
    let mut client = served.client();
    client.ask(r#"{"execute":"echo"}"#);
    let are_kept = || format!("{:?}", served.events).contains("Outbox");
    assert!(are_kept(), "it listens");
    drop(client);
    let start = Instant::now();
    while are_kept() {
        assert!(start.elapsed() < DEADLINE, "its events are kept");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_client_that_does_not_read_is_dropped_and_senders_never_block() {
    alone!();
    let served = Served::new();
    let mut deaf = served.client();
    let mut other = served.client();
    deaf.ask(r#"{"execute":"echo"}"#);
    other.ask(r#"{"execute":"echo"}"#);
    let data = json!({ "padding": "x".repeat(1000) });
    // More than the queue and the kernel's buffers of a UNIX socket hold.
    let (count, before) = (4 * MAX_EVENTS_WAITING, resident());
    for _ in 0..count {
        served.events.send("E", Some(&data));
        assert_eq!(other.receive()["event"], "E");
    }
    assert!(resident() < before + (32 << 20));
    assert!(deaf.is_closed());
    served.lives();
}

#[test]
fn a_client_that_sends_commands_without_reading_uses_bounded_memory() {
    alone!();
    let served = Served::new();
    let mut client = served.client();
    let before = resident();
    let request = format!(
        r#"{{"execute":"echo","arguments":{{"x":"{}"}}}}"#,
        "y".repeat(10_000)
    );
    let stream = client.0.get_mut();
    stream
        .set_write_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let written = (0..10_000).take_while(|_| stream.write_all(request.as_bytes()).is_ok());
    assert!(written.count() < 1000, "all was taken, and nothing read");
    assert!(resident() < before + (32 << 20));
    served.lives();
}

#[test]
fn a_request_of_a_hundred_megabytes_is_refused_with_bounded_memory() {
    alone!();
    for begin in [&b"{\"x\":\""[..], b"{\"x\":[", b""] {
        let served = Served::new();
        let mut client = served.client();
        let before = resident();
        let _ = client.0.get_mut().write_all(begin);
        let zeros = vec![b'0'; 1 << 20];
        let mut taken = 0;
        while taken < 100 && client.0.get_mut().write_all(&zeros).is_ok() {
            taken += 1;
        }
        assert!(taken < 100, "all of it was read");
        assert!(resident() < before + (32 << 20));
        let output = client.receive();
        assert_eq!(
            output["error"],
            error("GenericError", "JSON token size limit exceeded")
        );
        served.lives();
    }
}

#[test]
fn deep_json_and_truncated_characters_are_refused() {
    let served = Served::new();
    let mut client = served.client();
    client.send(&b"[".repeat(100_000));
    let output = client.receive();
    assert_eq!(
        output["error"],
        error("GenericError", "JSON nesting depth limit exceeded")
    );
    assert!(client.is_closed());
    let mut client = served.client();
    client.send(b"{\"execute\":\"echo\",\"id\":\"\xc3\"}");
    let output = client.receive();
    let invalid = "JSON parse error, invalid UTF-8 sequence in string";
    assert_eq!(output["error"], error("GenericError", invalid));
    assert_eq!(
        client.ask(r#"{"execute":"echo"}"#),
        json!({ "return": null })
    );
}

#[test]
fn a_client_may_disconnect_at_any_byte() {
    let served = Served::new();
    let conversation =
        "{\"execute\":\"qmp_capabilities\"}{\"execute\":\"echo\",\"arguments\":{\"é\":1}}";
    for end in 0..conversation.len() {
        let mut client = Conversation::new(&served.path());
        client.send(&conversation.as_bytes()[..end]);
        if end % 2 == 0 {
            client.receive();
        }
    }
    served.lives();
}

#[test]
fn a_thousand_connections_are_served_up_to_the_limit_and_the_others_get_an_error() {
    alone!();
    let served = Served::new();
    let before = resident();
    let mut kept = Vec::new();
    let mut refused = 0;
    for _ in 0..1000 {
        let mut client = Conversation::new(&served.path());
        if client.receive().get("QMP").is_some() {
            kept.push(client);
        } else {
            assert!(client.is_closed());
            refused += 1;
        }
    }
    assert_eq!((kept.len(), refused), (MAX_CLIENTS, 1000 - MAX_CLIENTS));
    for client in &mut kept {
        client.ask(r#"{"execute":"qmp_capabilities"}"#);
        assert_eq!(
            client.ask(r#"{"execute":"echo"}"#),
            json!({ "return": null })
        );
    }
    assert!(resident() < before + (64 << 20));
    drop(kept);
    served.lives();
}

#[test]
fn a_client_can_read_replies_after_the_server_ended() {
    let mut served = Served::new();
    let mut client = served.client();
    client.send(br#"{"execute":"long"}"#);
    let start = Instant::now();
    while served.commands.0.load(Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < DEADLINE, "it is not executed");
        std::thread::sleep(Duration::from_millis(1));
    }
    let clients = served.clients.take();
    let ending = std::thread::spawn(move || drop(clients));
    while UnixStream::connect(served.path()).is_ok() {
        assert!(start.elapsed() < DEADLINE, "it still listens");
    }
    let text = client.receive()["return"].as_str().map(str::len);
    assert_eq!(text, Some(LONG));
    assert!(client.is_closed());
    ending.join().unwrap();
}

#[test]
fn a_server_that_ends_sends_its_replies_and_closes() {
    let mut served = Served::new();
    let mut client = served.client();
    let mut idle = served.client();
    let answer = client.ask(r#"{"execute":"echo","id":1}"#);
    assert_eq!(answer["id"], 1);
    drop(served.clients.take());
    assert!(idle.is_closed() && client.is_closed());
    // No connection is needed: the kernel's list of sockets shows it.
    let path = served.path().display().to_string();
    let start = Instant::now();
    while std::fs::read_to_string("/proc/net/unix")
        .unwrap()
        .contains(&path)
    {
        assert!(start.elapsed() < DEADLINE, "it still listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(UnixStream::connect(served.path()).is_err());
}

/// Starts a server on a loopback address; returns its address.
fn on_tcp() -> (Arc<Echo>, Clients, std::net::SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (commands, events) = (Arc::new(Echo::default()), Events::new());
    let echo = Arc::clone(&commands);
    let serve = Arc::new(move |socket| {
        let _ = serve_client(socket, &json!({ "package": "test" }), &*commands, &events);
    });
    let clients = Clients::serve(BoundSocket::Tcp(listener), TOO_MANY_CLIENTS, serve);
    (echo, clients.unwrap(), address)
}

/// Returns the server's answer to `bytes` until it closes the connection; `None` if it does not.
fn answer_to(mut stream: impl Read + Write, bytes: &[u8]) -> Option<String> {
    // The server may have closed before everything was written.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => None,
        Ok(_) | Err(_) => Some(String::from_utf8_lossy(&answer).into_owned()),
    }
}

const NEGOTIATE_AND_ECHO: &str =
    "{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"echo\",\"arguments\":{}}\n";

/// Returns a browser's request for `fetch(url, {method: 'POST', mode: 'no-cors', body})`.
fn post(body: &str) -> Vec<u8> {
    format!(
        "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain;charset=UTF-8\r\n\
         Content-Length: {}\r\nOrigin: http://example.org\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[test]
fn an_http_request_is_not_obeyed_on_either_kind_of_socket() {
    let (echo, _clients, address) = on_tcp();
    let served = Served::new();
    // The whole request, and parts from its headers or body on, as after a proxy that has removed the rest.
    let whole = post(NEGOTIATE_AND_ECHO);
    let from_host = &whole[b"POST / HTTP/1.1\r\n".len()..];
    for bytes in [&whole[..], from_host] {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        answer_to(stream, bytes).expect("the connection is closed");
        let stream = UnixStream::connect(served.path()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let output = answer_to(stream, bytes).expect("the connection is closed");
        assert!(!output.contains("return"), "{output}");
    }
    for commands in [&echo, &served.commands] {
        assert_eq!(
            commands.0.load(Ordering::Relaxed),
            0,
            "a browser was obeyed"
        );
    }
    served.lives();
}

#[test]
fn on_tcp_invalid_input_closes_only_connections_without_negotiation() {
    let (echo, _clients, address) = on_tcp();
    let connect = || {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    };
    for strange in ["hello\n", "\u{16}\u{3}\u{1} ", "[1]", "{\"x\"]\n", "7 "] {
        let bytes = [strange, NEGOTIATE_AND_ECHO].concat();
        answer_to(connect(), bytes.as_bytes()).expect("the connection is closed");
        assert_eq!(echo.0.load(Ordering::Relaxed), 0, "{strange:?}");
    }
    // An object with a wrong command is QMP, and typing errors of a negotiated client are tolerated.
    let mut client = BufReader::new(connect());
    let mut ask = |text: &str| {
        client.get_mut().write_all(text.as_bytes()).unwrap();
        let mut line = String::new();
        client.read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap_or_else(|_| panic!("{line:?}"))
    };
    assert!(ask("").get("QMP").is_some());
    for (text, is_error) in [
        ("{\"execute\":\"echo\"}\n", true),
        ("{\"execute\":\"qmp_capabilities\"}\n", false),
        ("hello\n", true),
        ("{\"execute\":\"echo\"}\n", false),
    ] {
        assert_eq!(ask(text).get("error").is_some(), is_error, "{text}");
    }
}
