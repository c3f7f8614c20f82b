//! Tests a guest in doubt (it may run at the destination): the source keeps the guest, and the operator settles it
//! manually.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::hotlift::{Hotlift, Running};
use crate::lost_message::loses_final_message;

/// Returns a source in doubt, its destination, and the QMP address that the source prints.
fn in_doubt() -> (Running, Running, String) {
    // Short timeouts: the source's query gets no answer, and the destination waits for this query in vain.
    let flags = [
        "guest",
        "run",
        "--ram=32M",
        "--multifd=off",
        "--settle-timeout=1",
        "--handshake-timeout=10",
    ];
    let mut destination = Hotlift::start(&[&flags[..], &["--incoming=tcp:127.0.0.1:0"]].concat());
    let line = destination.wait_for("waiting for a source at ");
    let to = line.rsplit(' ').next().expect("an address");
    let uri = format!("--migrate-to={}", loses_final_message(to));
    let mut source = Hotlift::start(&[&flags[..], &["--max-bandwidth=0", &uri]].concat());
    let line = source.wait_for("hotlift settle --qmp ");
    let (_, command) = line
        .split_once("hotlift settle --qmp ")
        .expect("it was seen");
    let qmp = command.split(' ').next().expect("an address").to_owned();
    destination.wait_for("no write was lost");
    source.wait_for("is kept here, paused and complete");
    (source, destination, qmp)
}

fn settle(qmp: &str, how: &str) {
    let (status, output) = Hotlift::start(&["settle", "--qmp", qmp, how]).wait();
    assert!(status.success(), "{how}: {}", output.join("\n"));
}

#[test]
fn a_guest_in_doubt_is_kept_and_its_copy_ends_by_hotlift_settle() {
    let (source, destination, qmp) = in_doubt();
    // A closed terminal does not settle the guest.
    source.signal(Signal::HUP);
    source.signal(Signal::HUP);
    settle(&qmp, "--there");
    let (status, output) = source.wait();
    assert_eq!(status.code(), Some(3), "{}", output.join("\n"));
    destination.signal(Signal::INT);
    assert!(destination.wait().0.success());
}

#[test]
fn a_guest_in_doubt_continues_intact_once_its_copy_is_declared_absent() {
    let (mut source, destination, qmp) = in_doubt();
    destination.signal(Signal::KILL);
    destination.wait();
    settle(&qmp, "--here");
    source.wait_for("the guest runs here again");
    // It runs: there is nothing left to settle.
    let (status, output) = Hotlift::start(&["settle", "--qmp", &qmp, "--there"]).wait();
    assert_eq!(status.code(), Some(1), "{}", output.join("\n"));
    source.signal(Signal::INT);
    source.wait_for("no write was lost");
    let (status, output) = source.wait();
    assert_eq!(status.code(), Some(1), "{}", output.join("\n"));
    let folder = std::path::Path::new(&qmp).parent().expect("a folder");
    assert!(!folder.exists(), "{} is left", folder.display());
}

#[test]
fn a_signal_ends_a_process_whose_guest_is_in_doubt_with_its_exit_code() {
    let (source, destination, _) = in_doubt();
    source.signal(Signal::TERM);
    let (status, output) = source.wait();
    assert_eq!(status.code(), Some(3), "{}", output.join("\n"));
    drop(destination);
}

/// Serves a QEMU with a migration in state `migration`, which keeps the guest paused until 'cont', for one client.
fn left_paused(socket: &Path, migration: &'static str) {
    let listener = UnixListener::bind(socket).expect("it listens");
    thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a client");
        serve(&stream, migration);
    });
}

fn serve(mut stream: &UnixStream, migration: &str) {
    let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 0 }, "package": "" });
    let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
    writeln!(stream, "{greeting}").expect("it reads");
    let mut runs = false;
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let command: Value = serde_json::from_str(&line).expect("JSON");
        let answer = match command["execute"].as_str().expect("a command") {
            "query-version" => version.clone(),
            "query-status" if runs => json!({ "status": "running", "running": true }),
            "query-status" => json!({ "status": "postmigrate", "running": false }),
            "query-migrate" => json!({ "status": migration }),
            name => {
                runs |= name == "cont";
                json!({})
            }
        };
        let answer = json!({ "return": answer, "id": command["id"] });
        writeln!(stream, "{answer}").expect("it reads");
    }
}

#[test]
fn continuing_a_guest_whose_migration_completed_warns_of_two_guests() {
    let folder = tempfile::tempdir().expect("a folder");
    for (migration, warns) in [("completed", true), ("failed", false)] {
        let socket = folder.path().join(migration);
        left_paused(&socket, migration);
        let qmp = socket.display().to_string();
        let (status, output) = Hotlift::start(&["settle", "--qmp", &qmp, "--here"]).wait();
        assert!(status.success(), "{output:?}");
        let is_warning = |line: &String| line.contains("both write to the same disks");
        assert_eq!(output.iter().any(is_warning), warns, "{output:?}");
        assert_eq!(
            output.last().map(String::as_str),
            Some("the guest runs here")
        );
    }
}
