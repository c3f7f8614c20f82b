//! Tests `hotlift guest run` in two processes, and the state of the guest after one process has ended.

use crate::hotlift::{Hotlift, Running, errors};
use rustix::process::Signal;
use tempfile::TempDir;

/// A waiting destination and a source about to connect, on a separate UNIX socket.
struct Pair {
    folder: TempDir,
    destination: Running,
}

impl Pair {
    fn new(flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let uri = format!("--incoming=unix:{}", folder.path().join("s").display());
        let mut args = vec!["guest", "run", &uri];
        args.extend(flags);
        if !flags.iter().any(|flag| flag.starts_with("--ram=")) {
            args.push("--ram=64M");
        }
        let mut destination = Hotlift::start(&args);
        destination.wait_for("waiting for a source");
        Self {
            folder,
            destination,
        }
    }

    fn start_source(&self, flags: &[&str]) -> Running {
        let uri = format!(
            "--migrate-to=unix:{}",
            self.folder.path().join("s").display()
        );
        let mut args = vec!["guest", "run", "--ram=64M", "--migrate-after=0", &uri];
        args.extend(flags);
        Hotlift::start(&args)
    }

    /// Asserts that no socket file is left.
    fn assert_clean(&self) {
        let left: Vec<_> = std::fs::read_dir(self.folder.path()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// Most of a minute for the first round, so that it lasts beyond the test's action on a busy machine.
const SLOW: &str = "--max-bandwidth=1M";

#[test]
fn a_guest_moves_from_one_process_to_the_other_and_runs_until_it_is_stopped() {
    let mut pair = Pair::new(&[]);
    let (status, output) = pair.start_source(&["--max-bandwidth=0"]).wait();
    assert!(status.success(), "{}", output.join("\n"));
    pair.destination.wait_for("no write was lost");
    pair.assert_clean();
    pair.destination.signal(Signal::INT);
    pair.destination.wait_for("no write was lost");
    let (status, output) = pair.destination.wait();
    assert!(status.success(), "{}", output.join("\n"));
}

#[test]
fn a_killed_destination_leaves_the_guest_running_at_the_source() {
    for phase in ["setup", "middle"] {
        let pair = Pair::new(&[]);
        if phase == "setup" {
            // The kernel accepts connections for a stopped process.
            pair.destination.signal(Signal::STOP);
        }
        let mut source = pair.start_source(&[SLOW]);
        if phase == "setup" {
            source.wait_for("pages with data");
        } else {
            source.wait_for("active: round 1");
        }
        pair.destination.signal(Signal::KILL);
        source.wait_for("the guest runs here again");
        let (status, output) = source.wait();
        assert_eq!(status.code(), Some(1), "{phase}: {}", output.join("\n"));
        let errors = errors(&output);
        assert!(
            !errors.is_empty() && errors[0].contains("migration failed"),
            "{phase}: {errors:?}"
        );
    }
}

#[test]
fn a_killed_source_ends_the_destination_with_one_line_and_no_files() {
    let pair = Pair::new(&[]);
    let mut source = pair.start_source(&[SLOW]);
    source.wait_for("active: round 1");
    source.signal(Signal::KILL);
    let Pair {
        destination,
        folder,
    } = pair;
    let (status, output) = destination.wait();
    assert_eq!(status.code(), Some(1), "{}", output.join("\n"));
    let errors = errors(&output);
    assert_eq!(errors.len(), 1, "{errors:?}");
    // Between two packets, or within one.
    let ends = ["closed by the other side", "unexpected end of file"];
    assert!(ends.iter().any(|end| errors[0].contains(end)), "{errors:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn ctrl_c_cancels_and_the_guest_keeps_running() {
    let pair = Pair::new(&["--channels=4"]);
    let mut source = pair.start_source(&[SLOW, "--channels=4"]);
    source.wait_for("active: round 1");
    source.signal(Signal::INT);
    source.wait_for("the guest runs here again");
    let (status, output) = source.wait();
    assert_eq!(status.code(), Some(130), "{}", output.join("\n"));
    assert!(errors(&output)[0].contains("cancelled"), "{output:?}");
    let (status, _) = pair.destination.wait();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn a_destination_that_is_interrupted_while_it_waits_leaves_no_socket() {
    let pair = Pair::new(&[]);
    pair.destination.signal(Signal::TERM);
    let Pair {
        destination,
        folder,
    } = pair;
    let (status, _) = destination.wait();
    assert_eq!(status.code(), Some(130));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn settings_that_differ_are_refused_with_both_values_on_both_sides() {
    for (flags, values) in [
        (&["--channels=3"][..], ["multifd-channels", "2", "3"]),
        (
            &["--method=zstd"][..],
            ["multifd-compression", "auto", "zstd"],
        ),
        (&["--ram=32M"][..], ["'pc.ram'", "67108864", "33554432"]),
        (
            &["--guest=threads", "--vcpus=2"][..],
            ["number of vCPUs", "2", "1"],
        ),
    ] {
        let pair = Pair::new(flags);
        let guest = if flags.len() > 1 {
            "--guest=threads"
        } else {
            "--guest=auto"
        };
        let (status, output) = pair.start_source(&["--max-bandwidth=0", guest]).wait();
        assert_eq!(status.code(), Some(1), "{flags:?}: {}", output.join("\n"));
        let (status, theirs) = pair.destination.wait();
        assert_eq!(status.code(), Some(1), "{flags:?}");
        for output in [output, theirs] {
            let line = errors(&output)[0];
            for value in values {
                assert!(line.contains(value), "{flags:?}: {line}");
            }
        }
    }
}

#[test]
fn a_source_without_destination_prints_what_to_start() {
    let folder = tempfile::tempdir().unwrap();
    let uri = format!("--migrate-to=unix:{}", folder.path().join("none").display());
    let (status, output) =
        Hotlift::start(&["guest", "run", "--ram=16M", "--migrate-after=0", &uri]).wait();
    assert_eq!(status.code(), Some(1));
    let errors = errors(&output);
    assert!(errors[0].contains("cannot connect"), "{errors:?}");
    assert!(errors[1].contains("--incoming"), "{errors:?}");
}

#[test]
fn pause_before_switchover_is_refused_where_no_client_can_continue() {
    for args in [
        &[
            "guest",
            "run",
            "--migrate-to=unix:/nonexistent",
            "--pause-before-switchover=on",
        ][..],
        &["demo", "--pause-before-switchover=on"],
    ] {
        let (status, output) = Hotlift::start(args).wait();
        assert_eq!(status.code(), Some(2), "{args:?}: {output:?}");
        assert!(
            errors(&output)[0].contains("needs a monitor"),
            "{args:?}: {output:?}"
        );
    }
}

#[test]
fn invalid_times_and_impossible_guests_are_usage_errors() {
    for (flags, words) in [
        (&["--run-for=-1"][..], "a number of seconds"),
        (&["--handshake-timeout=soon"], "a number of seconds"),
        (&["--vcpus=9"], "1..=8"),
        (&["--ram=16M", "--working-set=64M"], "working set"),
        (
            &["--compress=on", "--channels=4"],
            "multifd-channels=4 needs multifd=on",
        ),
        (
            &["--zero-copy-send=on", "--method=zstd"],
            "zero-copy-send=on needs",
        ),
    ] {
        let args = [&["guest", "run"][..], flags].concat();
        let (status, output) = Hotlift::start(&args).wait();
        assert_eq!(status.code(), Some(2), "{args:?}: {output:?}");
        assert!(errors(&output)[0].contains(words), "{args:?}: {output:?}");
        let help = "'hotlift guest run --help'";
        assert!(output.iter().any(|line| line.contains(help)), "{output:?}");
    }
}
