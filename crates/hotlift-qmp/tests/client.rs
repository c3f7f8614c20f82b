//! Tests the QMP client with a scripted QEMU and with a real one.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hotlift_qmp::{Client, MAX_LINE, MAX_QUEUED_EVENTS, Qemu, QmpAddress, QmpError};
use hotlift_testkit::qemu::{self, Launched, Release};
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(30);

const GREETING: &str = r#"{"QMP":{"version":{"qemu":{"micro":2,"minor":0,"major":10},"package":""},"capabilities":["oob"]}}"#;

/// A fake QEMU at its own socket; runs `script` with a single connection.
struct Fake {
    address: QmpAddress,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

struct Peer {
    reader: BufReader<UnixStream>,
    stream: UnixStream,
}

impl Peer {
    fn send(&mut self, line: &str) {
        let _ = self.stream.write_all(line.as_bytes());
        let _ = self.stream.write_all(b"\r\n");
    }

    /// Reads the next command and its id.
    fn receive(&mut self) -> (String, Value, Value) {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        let value: Value = serde_json::from_str(&line).unwrap_or_default();
        let command = value["execute"].as_str().unwrap_or_default().to_owned();
        (command, value["id"].clone(), value["arguments"].clone())
    }

    fn answer(&mut self, id: &Value, value: &Value) {
        self.send(&json!({ "return": value, "id": id }).to_string());
    }

    /// Greets and negotiates as QEMU does.
    fn greet(&mut self) {
        self.send(GREETING);
        let (command, id, _) = self.receive();
        assert_eq!(command, "qmp_capabilities");
        self.answer(&id, &json!({}));
    }
}

impl Fake {
    fn new(script: impl FnOnce(&mut Peer) + Send + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let reader = BufReader::new(stream.try_clone().unwrap());
            script(&mut Peer { reader, stream });
        });
        Self {
            address: QmpAddress::Unix(path),
            thread: Some(thread),
            _folder: folder,
        }
    }

    fn connect(&self) -> Result<Client, QmpError> {
        Client::connect(&self.address, LONG)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !thread::panicking()
        {
            panic!("the script failed");
        }
    }
}

#[test]
fn a_reply_is_distinguished_from_earlier_events_which_are_kept() {
    let fake = Fake::new(|peer| {
        peer.greet();
        let (command, id, arguments) = peer.receive();
        assert_eq!(
            (command.as_str(), &arguments["uri"]),
            ("migrate", &json!("unix:/a"))
        );
        peer.send(
            r#"{"timestamp":{"seconds":7,"microseconds":500000},"event":"MIGRATION","data":{"status":"setup"}}"#,
        );
        peer.send(r#"{"timestamp":{"seconds":-1,"microseconds":-1},"event":"STOP"}"#);
        peer.answer(&id, &json!({"a": 1}));
    });
    let mut client = fake.connect().unwrap();
    assert_eq!(client.greeting()["version"]["qemu"]["major"], 10);
    let answer = client
        .execute("migrate", &json!({"uri": "unix:/a"}))
        .unwrap();
    assert_eq!(answer, json!({"a": 1}));
    let event = client.poll_event().unwrap().unwrap();
    assert_eq!(event.name, "MIGRATION");
    assert_eq!(event.data["status"], "setup");
    assert_eq!(event.at, Some(Duration::from_millis(7500)));
    let event = client.wait_event(LONG).unwrap().unwrap();
    assert_eq!(
        (event.name.as_str(), event.at, event.data),
        ("STOP", None, json!({}))
    );
}

#[test]
fn a_wait_ends_with_an_event_after_the_latest_reply_or_another_descriptor() {
    let (other, ends) = io::pipe().unwrap();
    let fake = Fake::new(move |peer| {
        peer.greet();
        let (_, id, _) = peer.receive();
        peer.send(r#"{"event":"STOP"}"#);
        peer.answer(&id, &json!(1));
        drop(ends);
        let (_, id, _) = peer.receive();
        peer.answer(&id, &json!(2));
        peer.send(r#"{"event":"RESUME"}"#);
    });
    let mut client = fake.connect().unwrap();
    let never = Instant::now() + Duration::from_secs(365 * 86_400);
    client.execute("a", &Value::Null).unwrap();
    client.wait_for_event(&[other.as_fd()], never);
    client.execute("b", &Value::Null).unwrap();
    client.wait_for_event(&[], never);
    assert!(client.guest_events().has_run);
    while !client.is_closed() {
        client.wait_for_event(&[], never);
    }
    // The end of the connection is not an event.
    client.wait_for_event(&[], Instant::now());
    client.wait_for_event(&[other.as_fd()], never);
}

#[test]
fn a_command_with_many_arguments_is_sent_before_its_first_answer_is_read() {
    let fake = Fake::new(|peer| {
        peer.greet();
        let asked: Vec<_> = (0..3).map(|_| peer.receive()).collect();
        peer.send(r#"{"event":"STOP"}"#);
        for (command, id, arguments) in asked {
            assert_eq!(command, "qom-get");
            match arguments["property"].as_str() {
                Some("b") => peer.send(
                    &json!({"error": {"class": "GenericError", "desc": "none"}, "id": id})
                        .to_string(),
                ),
                _ => peer.answer(&id, &arguments["property"]),
            }
        }
    });
    let mut client = fake.connect().unwrap();
    let arguments = ["a", "b", "c"].map(|name| json!({ "property": name }));
    let answers = client.execute_each("qom-get", &arguments).unwrap();
    assert_eq!(answers, [Some(json!("a")), None, Some(json!("c"))]);
    assert_eq!(client.poll_event().unwrap().unwrap().name, "STOP");
    // The connection breaks: no answers arrive.
    assert!(client.execute_each("qom-get", &arguments).is_err());
}

#[test]
fn the_cause_of_a_shutdown_is_known_after_qemu_closed_the_connection() {
    let fake = Fake::new(|peer| {
        peer.greet();
        peer.send(r#"{"event":"RESUME"}"#);
        peer.send(r#"{"event":"SHUTDOWN","data":{"guest":true,"reason":"guest-shutdown"}}"#);
    });
    let mut client = fake.connect().unwrap();
    drop(fake);
    // The command is written to a closed socket.
    let error = client.execute("query-status", &Value::Null).unwrap_err();
    assert!(matches!(error, QmpError::Closed { .. }), "{error}");
    let guest = client.guest_events();
    assert!(guest.has_run);
    assert_eq!(guest.end().as_deref(), Some("the guest powered off"));
}

#[test]
fn received_events_are_found_after_the_connection_ended() {
    let fake = Fake::new(|peer| {
        peer.greet();
        let (_, id, _) = peer.receive();
        peer.send(r#"{"event": "RESUME"}"#);
        peer.answer(&id, &json!({}));
        peer.send(r#"{"event": "STOP"}"#);
    });
    let mut client = fake.connect().unwrap();
    assert_eq!(client.peer(), Some(std::process::id()));
    client.execute("cont", &Value::Null).unwrap();
    // The script has ended; everything it sent has arrived.
    drop(fake);
    assert!(client.has_run().unwrap());
    assert_eq!(client.poll_event().unwrap().unwrap().name, "RESUME");
}

#[test]
fn events_may_precede_the_greeting_and_replies_may_not() {
    let fake = Fake::new(|peer| {
        peer.send(r#"{"timestamp":{"seconds":7,"microseconds":0},"event":"RESUME"}"#);
        peer.greet();
    });
    let mut client = fake.connect().unwrap();
    assert_eq!(client.greeting()["version"]["qemu"]["major"], 10);
    assert_eq!(client.poll_event().unwrap().unwrap().name, "RESUME");
    let fake = Fake::new(|peer| peer.send(r#"{"return": {}}"#));
    let error = fake.connect().unwrap_err();
    assert!(matches!(error, QmpError::Protocol { .. }), "{error}");
}

#[test]
fn a_refusal_has_command_class_and_text_in_one_line() {
    let fake = Fake::new(|peer| {
        peer.greet();
        let (_, id, _) = peer.receive();
        let error = json!({"class": "GenericError", "desc": "no\nuri\u{1b}[2J"});
        peer.send(&json!({"id": id, "error": error}).to_string());
        let (_, id, _) = peer.receive();
        peer.answer(&id, &json!({}));
    });
    let mut client = fake.connect().unwrap();
    let error = client.execute("migrate", &Value::Null).unwrap_err();
    assert_eq!(
        error.to_string(),
        "QEMU refused migrate: no uri [2J (GenericError)"
    );
    assert!(!error.is_disconnected());
    client.execute("query-status", &Value::Null).unwrap();
}

#[test]
fn a_late_reply_is_not_taken_for_that_of_the_next_command() {
    let fake = Fake::new(|peer| {
        peer.greet();
        let (_, late, _) = peer.receive();
        let (_, id, _) = peer.receive();
        peer.answer(&late, &json!("late"));
        peer.answer(&id, &json!("in time"));
    });
    let mut client = fake.connect().unwrap();
    client.set_timeout(Duration::from_millis(50));
    let error = client.execute("query-migrate", &Value::Null).unwrap_err();
    assert!(matches!(error, QmpError::Timeout { .. }), "{error}");
    assert!(!error.is_disconnected());
    client.set_timeout(LONG);
    assert_eq!(
        client.execute("query-status", &Value::Null).unwrap(),
        "in time"
    );
}

#[test]
fn every_protocol_violation_is_an_error_with_its_cause() {
    let deep = "[".repeat(100_000);
    let cases: [(&str, &str); 8] = [
        ("garbage", "not JSON"),
        (deep.as_str(), "not JSON"),
        ("[1]", "not an object"),
        ("{}", "neither an answer nor an event"),
        (r#"{"event": 5}"#, "without a name"),
        (
            r#"{"id": 2, "error": {"class": "x"}}"#,
            "without a description",
        ),
        (r#"{"id": 99, "return": {}}"#, "another command"),
        (GREETING, "second greeting"),
    ];
    for (line, problem) in cases {
        let line = line.to_owned();
        let fake = Fake::new(move |peer| {
            peer.greet();
            peer.receive();
            peer.send(&line);
        });
        let mut client = fake.connect().unwrap();
        let error = client.execute("query-status", &Value::Null).unwrap_err();
        assert!(matches!(error, QmpError::Protocol { .. }), "{error}");
        assert!(error.to_string().contains(problem), "{error}");
        assert!(error.is_disconnected());
    }
}

#[test]
fn a_line_without_end_is_refused_at_the_limit() {
    let fake = Fake::new(|peer| {
        peer.greet();
        peer.receive();
        let chunk = vec![b'x'; 1 << 20];
        // Ends when the client has disconnected.
        while peer.stream.write_all(&chunk).is_ok() {}
    });
    let mut client = fake.connect().unwrap();
    let error = client.execute("query-status", &Value::Null).unwrap_err();
    assert!(error.to_string().contains(&MAX_LINE.to_string()), "{error}");
    drop(client);
}

#[test]
fn of_a_flood_of_events_the_newest_are_kept() {
    let fake = Fake::new(|peer| {
        peer.greet();
        let (_, id, _) = peer.receive();
        for number in 0..MAX_QUEUED_EVENTS + 5 {
            peer.send(&json!({"event": "E", "data": number}).to_string());
        }
        peer.answer(&id, &json!({}));
    });
    let mut client = fake.connect().unwrap();
    client.execute("query-status", &Value::Null).unwrap();
    assert_eq!(client.poll_event().unwrap().unwrap().data, 5);
}

#[test]
fn a_qemu_that_exits_is_distinguished_from_a_silent_one() {
    let fake = Fake::new(|peer| {
        peer.greet();
        peer.receive();
    });
    let mut client = fake.connect().unwrap();
    let error = client.execute("query-status", &Value::Null).unwrap_err();
    assert!(matches!(error, QmpError::Closed { .. }), "{error}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    let _held = UnixListener::bind(&path).unwrap();
    let error = Client::connect(&QmpAddress::Unix(path), Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, QmpError::Timeout { .. }), "{error}");
    let nowhere = QmpAddress::Unix(folder.path().join("none"));
    let mut why = None;
    let on_retry = |error: &io::Error| why = Some(error.kind());
    let error =
        Client::connect_with_notice(&nowhere, Duration::from_secs(1), on_retry).unwrap_err();
    assert!(matches!(error, QmpError::Connect { .. }), "{error}");
    assert_eq!(why, Some(io::ErrorKind::NotFound));
}

#[test]
fn a_capability_an_old_qemu_lacks_may_be_switched_off_but_not_on() {
    let fake = Fake::new(|peer| {
        peer.greet();
        let (_, id, _) = peer.receive();
        peer.answer(
            &id,
            &json!({"qemu": {"major": 7, "minor": 2, "micro": 22}, "package": ""}),
        );
        let known = json!([{"capability": "multifd", "state": false}]);
        for _ in 0..2 {
            let (command, id, arguments) = peer.receive();
            match command.as_str() {
                "query-migrate-capabilities" => peer.answer(&id, &known),
                _ => {
                    assert_eq!(
                        arguments["capabilities"],
                        json!([{"capability": "multifd", "state": true}])
                    );
                    peer.answer(&id, &json!({}));
                }
            }
        }
        let (_, id, _) = peer.receive();
        peer.answer(&id, &known);
    });
    let mut qemu = Qemu::connect(&fake.address, LONG).unwrap();
    qemu.set_capabilities(&[("multifd", true), ("mapped-ram", false)])
        .unwrap();
    let error = qemu.set_capabilities(&[("mapped-ram", true)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "QEMU 7.2.22 has no migration capability 'mapped-ram'"
    );
}

#[test]
fn a_real_qemu_accepts_all_commands_of_a_migration() {
    for program in [qemu::installed(), Release::V11.program()] {
        let Some(program) = program else {
            continue;
        };
        queries_and_sets(&program);
    }
}

fn queries_and_sets(program: &Path) {
    let uuid = "00112233-4455-6677-8899-aabbccddeeff";
    let arguments = [
        "-machine",
        "none",
        "-S",
        "-uuid",
        uuid,
        "-incoming",
        "defer",
    ];
    let mut real = Launched::bare(program, &arguments).unwrap();
    let mut qemu = real.connect().unwrap();
    assert!(qemu.version().major >= 7);
    assert_eq!(qemu.query_status().unwrap().status, "inmigrate");
    assert_eq!(qemu.machine_type().unwrap().as_deref(), Some("none"));
    let uuid = qemu.query_uuid().unwrap().0;
    assert_eq!((uuid[0], uuid[1], uuid[15]), (0x00, 0x11, 0xff));
    assert_eq!(qemu.query_migrate().unwrap().status(), "none");
    let threads = qemu.query_migration_threads().unwrap();
    let version = (qemu.version().major, qemu.version().minor);
    let knows_them = ((8, 0)..(11, 1)).contains(&version);
    assert_eq!(threads, knows_them.then(Vec::new));

    qemu.set_capabilities(&[("multifd", true), ("events", true), ("x-no-such", false)])
        .unwrap();
    let capabilities = qemu.query_capabilities().unwrap();
    assert!(capabilities.contains(&("multifd".to_owned(), true)));
    qemu.set_parameters(&json!({"multifd-channels": 3, "max-bandwidth": 0}))
        .unwrap();
    assert_eq!(qemu.query_parameters().unwrap()["multifd-channels"], 3);
    let error = qemu
        .set_parameters(&json!({"multifd-channels": 0}))
        .unwrap_err();
    assert!(error.to_string().contains("between 1 and 255"), "{error}");

    let socket = real.path("incoming");
    qemu.migrate_incoming(&format!("unix:{}", socket.display()), true)
        .unwrap();
    let setup = qemu.wait_event(LONG).unwrap().unwrap();
    assert_eq!(
        (setup.name.as_str(), setup.data),
        ("MIGRATION", json!({"status": "setup"}))
    );
    assert!(setup.at.is_some() && socket.exists());
    qemu.migrate_cancel().unwrap();
    qemu.quit().unwrap();
    real.process_mut().wait(LONG).unwrap();
}
