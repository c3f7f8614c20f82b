//! Tests a migration that the Python client `qemu.qmp` controls.

use std::path::PathBuf;
use std::process::Command;

use serde_json::json;

use hotlift_testkit::qemu::cache;
use hotlift_testkit::skip;

use crate::machine::{Machine, Program};

#[test]
fn pythons_qemu_qmp_connects_sets_migrates_follows_events_and_queries() {
    let set = std::env::var_os("HOTLIFT_QEMU_QMP").filter(|path| !path.is_empty());
    let package = set.map_or_else(|| cache().join("qemu-qmp-0.0.6"), PathBuf::from);
    if !package.is_dir() {
        skip!("qemu-qmp", "not there; scripts/qemu-qmp fetches it");
        return;
    }
    let mut destination = Machine::waiting(Program::Hotlift);
    destination.set_capabilities(&["multifd"]);
    let uri = destination.listen();
    let source = Machine::start(Program::Hotlift, &[]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/monitor/qemu_qmp.py");
    let run = Command::new("python3")
        .env("PYTHONPATH", package)
        .arg(script)
        .arg(source.folder.path().join("qmp"))
        .arg(&uri)
        .output()
        .expect("python3");
    let output = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{output}");
    destination.reaches("completed");
    let status = destination.execute("query-status", &json!({}));
    assert_eq!(status["running"], true);
}
