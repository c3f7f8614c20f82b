//! Tests `serve --files` and its clients, without a VM.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use serde_json::{Value, json};

use crate::hotlift::{Hotlift, errors};

fn show(at: &str) -> (Option<i32>, String) {
    let (status, output) = Hotlift::start(&["show", at]).wait();
    let errors: Vec<_> = errors(&output).into_iter().cloned().collect();
    (status.code(), errors.join("\n"))
}

#[test]
fn a_server_prints_its_events_as_lines_of_json() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = format!("--files={}", folder.path().display());
    let uri = format!("unix:{}", folder.path().join("socket").display());
    let listen = format!("--listen={uri}");
    let mut serve = Hotlift::start(&["serve", &listen, &files, "--json"]);
    serve.wait_for("listening");
    let (code, output) = show(&format!("{uri}/missing"));
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("no save file has that name"), "{output}");
    serve.wait_for("refused");
    serve.signal(Signal::TERM);
    let (status, output) = serve.wait();
    assert!(status.success(), "{output:?}");
    let events: Vec<Value> = output
        .iter()
        .map(|line| serde_json::from_str(line).expect("a line of JSON"))
        .collect();
    assert_eq!(
        events,
        [
            json!({ "event": "listening", "address": uri }),
            json!({
                "event": "refused",
                "host": "this host",
                "reason": "missing: no save file has that name",
            }),
        ]
    );
}

#[test]
fn a_client_of_another_role_is_refused_and_the_log_names_the_servers_role() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let files = format!("--files={}", folder.path().display());
    let listen = format!("--listen=unix:{}", socket.display());
    let mut serve = Hotlift::start(&["serve", &listen, &files]);
    serve.wait_for("listening");
    let mut source = UnixStream::connect(&socket).expect("it listens");
    source
        .write_all(b"{\"hotlift-control\":4}\n")
        .expect("it is read");
    serve.wait_for("it requests no file, and this 'hotlift serve --files' accepts no guest");
}

#[test]
fn a_server_without_its_folder_does_not_listen() {
    let place = tempfile::tempdir().expect("a folder");
    let listen = format!("--listen=unix:{}", place.path().join("socket").display());
    let file = place.path().join("file");
    fs::write(&file, "").expect("a file");
    for folder in [place.path().join("missing"), file] {
        let files = format!("--files={}", folder.display());
        let (status, output) = Hotlift::start(&["serve", &listen, &files]).wait();
        assert_eq!(status.code(), Some(1), "{output:?}");
        let expected = format!("hotlift: cannot inspect {}: ", folder.display());
        assert!(output[0].starts_with(&expected), "{output:?}");
    }
}

/// Returns the file descriptors of a process with their targets.
fn descriptors(pid: i32) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let paths = entries.map(|entry| entry.expect("a descriptor").path());
    // A descriptor that was closed in the meantime does not count.
    let read = |path: PathBuf| {
        let number = path.file_name()?.to_str()?.parse().ok()?;
        Some((number, fs::read_link(&path).ok()?))
    };
    paths.filter_map(read).collect()
}

#[test]
fn a_server_short_of_file_descriptors_does_not_report_a_missing_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = format!("--files={}", folder.path().display());
    let uri = format!("unix:{}", folder.path().join("socket").display());
    let mut serve = Hotlift::start(&["serve", &format!("--listen={uri}"), &files]);
    serve.wait_for("listening");
    // Once it has opened the folder, it needs no further files.
    let open = loop {
        let open = descriptors(serve.pid());
        if open.iter().any(|(_, path)| path == folder.path()) {
            break open;
        }
        thread::yield_now();
    };
    let free = (0..).find(|number| open.iter().all(|(taken, _)| taken != number));
    // Enough for a connection, but not for an additional file.
    let limit = Rlimit {
        current: free.map(|number| number + 1),
        ..getrlimit(Resource::Nofile)
    };
    let pid = Pid::from_raw(serve.pid());
    let before = prlimit(pid, Resource::Nofile, limit).expect("a limit");
    let missing = format!("{uri}/missing");
    let (_, output) = show(&missing);
    assert!(output.contains("cannot send it now"), "{output}");
    assert!(output.contains("Too many open files"), "{output}");
    prlimit(pid, Resource::Nofile, before).expect("a limit");
    let (_, output) = show(&missing);
    assert!(output.contains("no save file has that name"), "{output}");
}

#[test]
fn ctrl_c_ends_commands_that_wait_for_a_silent_file_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let silent = UnixListener::bind(&socket).expect("it listens");
    let file = format!("unix:{}/vm", socket.display());
    for command in [
        &["show", &file][..],
        &["restore", &file, "--qmp=/nowhere"],
        &["restore", "--lazy", &file, "--qmp=/nowhere"],
    ] {
        let waiting = Hotlift::start(command);
        let (mut stream, _) = silent.accept().expect("it connects");
        stream.read_exact(&mut [0]).expect("it asks");
        waiting.signal(Signal::INT);
        let (status, output) = waiting.wait();
        assert_eq!(status.code(), Some(130), "{command:?}: {output:?}");
    }
}
