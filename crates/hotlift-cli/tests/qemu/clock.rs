//! Tests the clock of a restored guest: the reported delay, and the correction by QEMU's guest agent.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::thread;

use serde_json::Value;

use crate::hotlift::Hotlift;
use crate::need;
use crate::operator::{has_moved, machine, succeeds};
use crate::vm::{PC_10, Release, Vm, folder};

/// Answers as a guest agent, with `set` for `guest-set-time`; returns the set time in nanoseconds.
fn agent(listener: &UnixListener, set: &str) -> u64 {
    let (stream, _) = listener.accept().expect("a client");
    let mut reader = BufReader::new(&stream);
    let mut request = || {
        let mut line = Vec::new();
        reader.read_until(b'\n', &mut line).expect("a line");
        let text = line.strip_prefix(&[0xff]).unwrap_or(&line);
        serde_json::from_slice::<Value>(text).expect("JSON")
    };
    let answer = |line: String| writeln!(&stream, "{line}").expect("it is read");
    let sync = request();
    answer(format!(r#"{{"return": {}}}"#, sync["arguments"]["id"]));
    let time = request();
    assert_eq!(time["execute"], "guest-set-time");
    answer(set.to_owned());
    time["arguments"]["time"].as_u64().expect("a time")
}

#[test]
fn a_restored_guests_clock_is_set_by_its_agent_or_a_warning() {
    let files = folder();
    let path = |name: &str| files.path().join(name).display().to_string();
    let file = path("vm");
    let mut here = need!(Vm::running(Release::V10, &machine(PC_10)));
    let qmp = here.free_qmp();
    succeeds(Hotlift::start(&[
        "save",
        "--qmp",
        &qmp,
        &file,
        "--method=zstd",
    ]));
    let shown = succeeds(Hotlift::start(&["show", &file, "--json"]));
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let paused = shown["info"]["paused"].as_u64().expect("a time");
    let socket = path("agent");
    let listener = UnixListener::bind(&socket).expect("it listens");
    for (mode, set, words) in [
        ("--channels=2", r#"{"return": {}}"#, "clock was set"),
        ("--lazy", r#"{"return": {}}"#, "clock was set"),
        (
            "--channels=2",
            r#"{"error": {"desc": "no such command"}}"#,
            "cannot set the guest's clock: the guest agent refused guest-set-time: no such command",
        ),
    ] {
        let mut there = need!(Vm::waiting(Release::V10, &machine(PC_10)));
        let qmp = there.free_qmp();
        let sync = format!("--sync-time={socket}");
        let output = thread::scope(|scope| {
            let agent = scope.spawn(|| agent(&listener, set));
            let output = succeeds(Hotlift::start(&[
                "restore", &file, "--qmp", &qmp, mode, &sync,
            ]));
            let time = agent.join().expect("the agent") / 1_000_000_000;
            assert!(time >= paused, "{time} is before the save at {paused}");
            output
        });
        assert!(output.contains(words), "{mode}: {output}");
        has_moved(&mut here, &mut there);
    }
}
