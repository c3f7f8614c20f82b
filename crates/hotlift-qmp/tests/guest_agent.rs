//! Tests setting the guest's clock with a scripted guest agent.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hotlift_qmp::{GuestAgentError, set_guest_time};
use serde_json::Value;

/// Timeout that no step reaches, on any machine.
const LONG: Duration = Duration::from_secs(60);

/// Runs `script` with the single connection of an agent's socket; returns the requests that the script has read.
fn agent(
    script: impl FnOnce(&mut BufReader<UnixStream>) -> Vec<Value> + Send + 'static,
) -> (tempfile::TempDir, PathBuf, JoinHandle<Vec<Value>>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("agent");
    let listener = UnixListener::bind(&path).expect("it listens");
    let script = thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a client");
        script(&mut BufReader::new(stream))
    });
    (folder, path, script)
}

/// Reads the next request. A byte before the first resets the agent's parser.
fn request(reader: &mut BufReader<UnixStream>) -> Value {
    let mut line = Vec::new();
    reader.read_until(b'\n', &mut line).expect("a line");
    let text = line.strip_prefix(&[0xff]).unwrap_or(&line);
    serde_json::from_slice(text).expect("JSON")
}

fn answer(reader: &BufReader<UnixStream>, line: &str) {
    let mut stream = reader.get_ref();
    stream.write_all(line.as_bytes()).expect("it is read");
    stream.write_all(b"\n").expect("it is read");
}

#[test]
fn the_time_is_sent_after_replies_to_an_earlier_client() {
    let (_folder, path, script) = agent(|reader| {
        let sync = request(reader);
        answer(reader, r#"{"return": {"an": "earlier client's"}}"#);
        answer(
            reader,
            r#"{"error": {"class": "GenericError", "desc": "JSON parse error"}}"#,
        );
        answer(
            reader,
            &format!(r#"{{"return": {}}}"#, sync["arguments"]["id"]),
        );
        let set = request(reader);
        answer(reader, r#"{"return": {}}"#);
        vec![sync, set]
    });
    let at = Duration::new(1_700_000_000, 5);
    set_guest_time(&path, || at, LONG).expect("it is set");
    let requests = script.join().expect("the script");
    assert_eq!(requests[0]["execute"], "guest-sync");
    assert_eq!(requests[1]["execute"], "guest-set-time");
    assert_eq!(
        requests[1]["arguments"]["time"],
        1_700_000_000_000_000_005_u64
    );
}

#[test]
fn an_agent_that_refuses_closes_or_is_silent_is_an_error_with_its_reason() {
    let (_folder, path, script) = agent(|reader| {
        let sync = request(reader);
        answer(
            reader,
            &format!(r#"{{"return": {}}}"#, sync["arguments"]["id"]),
        );
        request(reader);
        answer(
            reader,
            r#"{"error": {"desc": "Command guest-set-time has been disabled\u001b"}}"#,
        );
        Vec::new()
    });
    let error = set_guest_time(&path, || LONG, LONG).expect_err("it refuses");
    assert!(error.to_string().contains("has been disabled"), "{error}");
    script.join().expect("the script");

    let (_folder, path, script) = agent(|reader| vec![request(reader)]);
    let error = set_guest_time(&path, || LONG, LONG).expect_err("it closes");
    assert!(matches!(error, GuestAgentError::Closed { .. }), "{error}");
    script.join().expect("the script");

    // The kernel accepts the connection, but no agent answers.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("agent");
    let _listener = UnixListener::bind(&path).expect("it listens");
    let error = set_guest_time(&path, || LONG, Duration::from_millis(50)).expect_err("silence");
    assert!(matches!(error, GuestAgentError::Timeout { .. }), "{error}");
    drop(folder);
    let error = set_guest_time(&path, || LONG, LONG).expect_err("no socket");
    assert!(matches!(error, GuestAgentError::Connect { .. }), "{error}");
}

#[test]
fn a_reply_that_is_too_long_or_no_json_is_refused() {
    for line in [
        "[1]".to_owned(),
        "no json".to_owned(),
        "x".repeat(100 << 10),
    ] {
        let (_folder, path, script) = agent(move |reader| {
            let sync = request(reader);
            let mut stream = reader.get_ref();
            // The client may disconnect before the end.
            let _ = stream.write_all(line.as_bytes());
            let _ = stream.write_all(b"\n");
            vec![sync]
        });
        let error = set_guest_time(&path, || LONG, LONG).expect_err("no answer");
        assert!(matches!(error, GuestAgentError::Protocol { .. }), "{error}");
        script.join().expect("the script");
    }
}
