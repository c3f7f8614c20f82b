//! What waits for a connection sleeps until one comes: an idle process costs nothing.

use std::fs;
use std::thread;
use std::time::Duration;

use hotlift::{Control, file};
use hotlift_testkit::alone;

use super::rig::{Relay, listen, settings, until};

/// How often the thread called `name` has gone to sleep so far; `None` without such a thread.
fn sleeps(name: &str) -> Option<u64> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let mut tasks = tasks.map(|task| task.unwrap().path());
    let is_it = |comm: String| comm.trim_end() == name;
    let task = tasks.find(|task| fs::read_to_string(task.join("comm")).is_ok_and(is_it))?;
    let status = fs::read_to_string(task.join("status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

/// Returns once the thread has slept through a second. Its start may take some, and a thread with a tick never does.
fn sleeps_through(name: &str) {
    const WINDOW: Duration = Duration::from_secs(1);
    until(name, || {
        let before = sleeps(name);
        thread::sleep(WINDOW);
        before.is_some() && before == sleeps(name)
    });
}

#[test]
fn a_relay_that_nobody_uses_never_wakes_and_is_cancelled_at_once() {
    alone!();
    let nobody = "tcp:192.0.2.1:1".parse().unwrap();
    let relay = Relay::start(&nobody, &settings(&[]), true);
    sleeps_through("relay/main");
    relay.control.cancel();
    relay.outcome("cancelled").unwrap_err();
}

#[test]
fn a_file_server_that_nobody_uses_never_wakes_and_is_cancelled_at_once() {
    alone!();
    let (folder, listener, _) = listen(true);
    let control = Control::new();
    thread::scope(|scope| {
        let serves = || file::serve(&listener, None, folder.path(), &control, &|_| ());
        let server = thread::Builder::new().name("server".to_owned());
        let server = server.spawn_scoped(scope, serves).unwrap();
        sleeps_through("server");
        control.cancel();
        server.join().unwrap().unwrap();
    });
}
