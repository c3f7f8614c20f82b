//! Tests the commands `hotlift agent` while no agent is running.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use crate::hotlift::{Hotlift, errors};

/// Less than the timeout of a running agent's answer.
const AT_ONCE: Duration = Duration::from_secs(8);

#[test]
fn a_missing_agent_is_reported_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let refuses = folder.path().join("refuses");
    drop(UnixListener::bind(&refuses).expect("a socket"));
    for socket in [folder.path().join("missing"), refuses] {
        let socket = socket.display().to_string();
        for command in [
            &["status"][..],
            &["list"],
            &["cancel", "1a2b3c4d"],
            &["limit", "1a2b3c4d", "--weight=1"],
        ] {
            let begun = Instant::now();
            let words = [&["agent"], command, &["--control", &socket]].concat();
            let (status, output) = Hotlift::start(&words).wait();
            assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
            assert_eq!(status.code(), Some(1), "{output:?}");
            let errors = errors(&output);
            let expected = format!("hotlift: no agent listens at {socket}: ");
            assert!(errors[0].starts_with(&expected), "{errors:?}");
            assert!(errors[1].contains("--control PATH"), "{errors:?}");
        }
    }
}

#[test]
fn without_a_configuration_file_the_option_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("agent.toml").display().to_string();
    for command in ["check", "rules", "run"] {
        let (status, output) = Hotlift::start(&["agent", command, "--config", &file]).wait();
        assert_eq!(status.code(), Some(1), "{output:?}");
        let errors = errors(&output);
        let expected = format!("hotlift: invalid configuration: cannot read {file}: ");
        assert!(errors[0].starts_with(&expected), "{errors:?}");
        assert!(errors[1].contains("--config FILE"), "{errors:?}");
    }
}
