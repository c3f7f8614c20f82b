//! A thread that waits sleeps until something happens: an idle process costs nothing.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::Duration;

use hotlift::{Control, Status, file};
use hotlift_testkit::alone;
use hotlift_wire::main_channel::MainEvent;

use super::log::{Event, Log};
use super::recording::Recording;
use super::rig::{DEADLINE, Relay, destination, listen, settings, until};
use super::source::{Ending, play};

/// Time in which no thread wakes up: longer than any periodic wait of the product.
const WINDOW: Duration = Duration::from_secs(10);

/// Wake-ups in [`WINDOW`] that have a reason, by thread. The watch of a relay samples its connections to other hosts
/// every 2.5 s, since a peer that lost its power shows in the kernel's unanswered keepalives alone.
const WITH_REASON: [(&str, u64); 1] = [("relay/watch", 4)];

/// The times that each thread with one of these `names` has gone to sleep so far, by thread and name.
fn sleeps(names: &[&str]) -> BTreeMap<(String, String), u64> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let tasks = tasks.filter_map(|task| {
        let task = task.unwrap().path();
        let name = fs::read_to_string(task.join("comm")).ok()?;
        let name = name.trim_end().to_owned();
        let status = fs::read_to_string(task.join("status")).ok()?;
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        let id = task.file_name()?.to_string_lossy().into_owned();
        names
            .iter()
            .any(|one| name.starts_with(one))
            .then(|| ((id, name), line.trim().parse().unwrap()))
    });
    tasks.collect()
}

/// Asserts that no thread of these names wakes up in [`WINDOW`], once what starts has come to rest.
fn sleep_through(names: &[&str]) {
    let is_periodic = |name: &str| WITH_REASON.iter().any(|(periodic, _)| *periodic == name);
    until("the threads have come to rest", || {
        let mut before = sleeps(names);
        thread::sleep(Duration::from_secs(1));
        let mut after = sleeps(names);
        for threads in [&mut before, &mut after] {
            threads.retain(|(_, name), _| !is_periodic(name));
        }
        !before.is_empty() && before == after
    });
    let before = sleeps(names);
    thread::sleep(WINDOW);
    let after = sleeps(names);
    assert!(before.keys().eq(after.keys()), "{before:?}, {after:?}");
    for (thread, count) in &after {
        let allowed = WITH_REASON.iter().find(|(name, _)| *name == thread.1);
        let allowed = allowed.map_or(0, |(_, most)| *most);
        let woken = count - before[thread];
        assert!(woken <= allowed, "{} wakes up {woken} times", thread.1);
    }
}

#[test]
fn what_waits_never_wakes_and_is_cancelled_at_once() {
    alone!();
    let recording = Recording::small_multifd(2);
    let ends = recording.events();
    let mut ends = ends
        .iter()
        .filter(|(_, event)| *event == MainEvent::RamEos)
        .map(|(at, _)| *at);
    // The first is that of the set-up.
    let quiet = Ending::FallsSilentAt(ends.nth(1).unwrap());
    let log = Log::default();
    let mut way = settings(&[("multifd-compression", "zstd")]);
    way.outgoing.handshake_timeout = 10 * DEADLINE;
    let channels = way.outgoing.channels();
    let (_there, destination) = destination(&recording, channels, None, &log);
    let active = Relay::start(&destination.address, &way, true);
    let to = active.address.clone();
    let unused = Relay::start(&"tcp:192.0.2.1:1".parse().unwrap(), &settings(&[]), true);
    let (folder, listener, _) = listen(true);
    let serving = Control::new();
    thread::scope(|scope| {
        let serves = || file::serve(&listener, None, folder.path(), &serving, &|_| ());
        let server = thread::Builder::new().name("server".to_owned());
        let server = server.spawn_scoped(scope, serves).unwrap();
        let arriving = scope.spawn(|| destination.run());
        let playing = scope.spawn(|| play(&recording, &to, quiet, &log));
        until("RAM", || active.control.status() == Status::Active);
        sleep_through(&["relay/", "server", "files/"]);
        let (control, unused_control) = (active.control.clone(), unused.control.clone());
        for control in [&control, &unused_control, &serving] {
            control.cancel();
        }
        active.outcome("an active relay").unwrap_err();
        unused.outcome("an unused relay").unwrap_err();
        server.join().unwrap().unwrap();
        log.note(Event::RelaysEnded);
        playing.join().unwrap();
        arriving.join().unwrap();
    });
}
