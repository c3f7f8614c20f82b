//! Tests a process that is killed in the last round, or while its child processes run.

use std::fs;
use std::time::{Duration, Instant};

use hotlift_testkit::proxy::units::{Action, Fault, Unit, Units};
use hotlift_testkit::proxy::{Proxy, Socket};
use rustix::process::Signal;

use crate::hotlift::{Hotlift, Running, errors};

/// Far above the duration of any step here on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Polls until `done`.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < DEADLINE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Records of the main channel that are sent while the guest is paused: the mark of the last round, and a device.
const LAST_ROUND: [&str; 2] = ["End section #1", "device payload #1"];

/// Starts a migration between two processes that is held before `name` on main.
fn held_before(name: &str) -> (Running, Proxy<Units>, Running) {
    // Time that a complete destination waits for the query of a dead source.
    let patience = ["--settle-timeout=1", "--handshake-timeout=10"];
    let incoming = ["guest", "run", "--ram=32M", "--incoming=tcp:127.0.0.1:0"];
    let mut destination = Hotlift::start(&[&incoming[..], &patience].concat());
    let line = destination.wait_for("waiting for a source at ");
    let address = line.split_whitespace().last().unwrap().parse().unwrap();
    let unit = Unit {
        socket: Some(Socket::Main),
        back: false,
        name: name.to_owned(),
    };
    let action = Action::Hold;
    let rule = Units::new(Some(Fault { unit, action }));
    let (proxy, to) = Proxy::loopback(&address, rule).unwrap();
    let uri = format!("--migrate-to={to}");
    let flags = [
        "guest",
        "run",
        "--ram=32M",
        "--migrate-after=0",
        "--max-bandwidth=0",
        &uri,
    ];
    let source = Hotlift::start(&flags);
    until("the last round does not come", || proxy.is_held());
    (source, proxy, destination)
}

#[test]
fn a_destination_killed_in_the_last_round_leaves_the_guest_at_the_source() {
    for name in LAST_ROUND {
        let (mut source, proxy, destination) = held_before(name);
        destination.signal(Signal::KILL);
        source.wait_for("the guest runs here again");
        proxy.release();
        let (status, output) = source.wait();
        assert_eq!(status.code(), Some(1), "{name}: {}", output.join("\n"));
        let errors = errors(&output);
        assert_eq!(errors.len(), 1, "{name}: {errors:?}");
        assert!(errors[0].contains("migration failed"), "{name}: {errors:?}");
        let _ = proxy.finish();
    }
}

#[test]
fn a_source_killed_in_the_last_round_starts_no_partial_guest() {
    for name in LAST_ROUND {
        let (source, proxy, destination) = held_before(name);
        source.signal(Signal::KILL);
        proxy.release();
        let (status, output) = destination.wait();
        assert_eq!(status.code(), Some(1), "{name}: {}", output.join("\n"));
        let errors = errors(&output);
        assert_eq!(errors.len(), 1, "{name}: {errors:?}");
        assert!(
            !output.iter().any(|line| line.contains("runs here")),
            "{name}: {output:?}"
        );
        drop(source);
        let _ = proxy.finish();
    }
}

/// Returns the processes whose parent is `parent`.
fn children(parent: i32) -> Vec<i32> {
    let parent_of = |pid: i32| -> Option<i32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in brackets, may contain any character.
        stat.rsplit_once(')')?
            .1
            .split_whitespace()
            .nth(1)?
            .parse()
            .ok()
    };
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| parent_of(*pid) == Some(parent))
        .collect()
}

#[test]
fn a_killed_demo_leaves_no_process() {
    let flags = ["demo", "--ram=64M", "--method=none", "--max-bandwidth=1M"];
    let mut demo = Hotlift::start(&flags);
    demo.wait_for("active: round 1");
    let left = children(demo.pid());
    assert_eq!(left.len(), 2, "{left:?}");
    demo.signal(Signal::KILL);
    until("a child keeps running", || {
        left.iter().all(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // There may be no parent to reap them.
            stat.is_empty() || stat.contains(") Z ")
        })
    });
}
