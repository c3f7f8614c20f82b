//! Tests a built-in guest that is saved to a file, and then runs before its pages are loaded from the file.

use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::probe_userfault;

use crate::hotlift::Hotlift;

/// Far above the start time of a guest.
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn a_built_in_guest_is_saved_and_runs_again_from_its_file() {
    if let Err(error) = probe_userfault() {
        hotlift_testkit::skip!("userfaultfd", "{error}");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let place = |name: &str| folder.path().join(name).display().to_string();
    let sockets = ["there", "here"].map(|name| format!("unix:{}", place(name)));
    let file = place("vm.hotlift");
    let run = |name: &str, more: &[&str]| {
        let socket = format!("unix:{}", place(name));
        let flags = ["guest", "run", "--ram", "16M", "--qmp", &socket];
        let guest = Hotlift::start(&[&flags, more].concat());
        let begun = Instant::now();
        while !folder.path().join(name).exists() {
            assert!(begun.elapsed() < TIMEOUT, "it has no socket");
            thread::sleep(Duration::from_millis(5));
        }
        guest
    };
    let _from = run("there", &[]);
    let save = ["save", &file, "--qmp", &sockets[0], "--method", "zstd"];
    let (status, output) = Hotlift::start(&save).wait();
    assert!(status.success(), "{output:?}");

    let mut to = run("here", &["--incoming", "defer"]);
    let restore = ["restore", "--lazy", &file, "--qmp", &sockets[1]];
    let (status, output) = Hotlift::start(&restore).wait();
    assert!(status.success(), "{output:?}");
    to.signal(rustix::process::Signal::TERM);
    to.wait_for("no write was lost");
}
