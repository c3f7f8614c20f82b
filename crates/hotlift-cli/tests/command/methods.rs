//! Tests `hotlift methods`: the list of methods, and the measurement of methods on given memory content.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use hotlift_methods::METHODS;
use hotlift_testkit::qemu::{self, Launched, QMP};
use serde_json::Value;
use tempfile::TempDir;

use crate::hotlift::Hotlift;

fn methods(flags: &[&str]) -> Vec<String> {
    let (status, printed) = Hotlift::start(&[&["methods"], flags].concat()).wait();
    assert!(status.success(), "{printed:?}");
    printed
}

fn json(flags: &[&str]) -> Value {
    let printed = methods(&[&["--json"], flags].concat());
    serde_json::from_str(&printed.join("\n")).expect("JSON")
}

/// Returns the output of a failed command.
fn refused(flags: &[&str], code: i32) -> String {
    let (status, printed) = Hotlift::start(&[&["methods"], flags].concat()).wait();
    assert_eq!(status.code(), Some(code), "{printed:?}");
    printed.join("\n")
}

fn file(folder: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, bytes).expect("write");
    path
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// Returns `bytes` of numbered lines: they compress, and all pages differ.
fn lines(bytes: usize) -> Vec<u8> {
    let lines = (0..).map(|number: u32| format!("this is line {number} of many\n"));
    lines.flat_map(String::into_bytes).take(bytes).collect()
}

/// Returns the methods that process pages.
fn working() -> impl Iterator<Item = &'static str> {
    METHODS.iter().map(|method| method.name).skip(1)
}

#[test]
fn every_method_is_listed_with_its_hardware_and_the_table_fits_80_columns() {
    // Without a terminal and without COLUMNS.
    let (_, printed) = Hotlift::start_with(&["methods"], &[("COLUMNS", "")]).wait();
    for method in METHODS {
        let row = printed
            .iter()
            .find(|line| line.starts_with(&format!("│ {} ", method.name)));
        let row = row.unwrap_or_else(|| panic!("{} is missing: {printed:#?}", method.name));
        let device = method.hardware.unwrap_or("-");
        assert!(row.contains(device), "{row}");
        assert!(printed.iter().any(|line| line.ends_with(method.summary)));
    }
    let widest = printed.iter().map(|line| line.chars().count()).max();
    assert!(widest <= Some(80), "{widest:?}");
    let list = json(&[]);
    let names = list.as_array().expect("a list").iter();
    let names: Vec<_> = names.map(|one| one["method"].as_str()).collect();
    let expected: Vec<_> = METHODS.iter().map(|method| Some(method.name)).collect();
    assert_eq!(names, expected);
}

#[test]
fn every_method_is_measured_both_ways_and_the_table_fits_a_terminal() {
    let folder = TempDir::new().expect("a folder");
    let image = file(&folder, "image", &lines(2 << 20));
    let printed = methods(&["--measure", text(&image)]);
    for name in working() {
        let is_row = |line: &String| line.starts_with(&format!("│ {name} "));
        assert!(printed.iter().any(is_row), "{name}: {printed:#?}");
        let has_done = |line: &String| line.starts_with(&format!("{name:8}"));
        assert!(printed.iter().any(has_done), "{name}: {printed:#?}");
    }
    let widest = printed.iter().map(|line| line.chars().count()).max();
    assert!(widest <= Some(80), "{printed:#?}");
    let result = json(&["--no-accelerators", "--measure", text(&image)]);
    assert_eq!(result["sample"]["memory_bytes"], 2 << 20);
    let methods = result["methods"].as_array().expect("methods");
    for name in working() {
        let mut of = methods.iter().filter(|one| one["method"] == name);
        let measured = of.next().unwrap_or_else(|| panic!("{name}: {result}"));
        assert_eq!(measured["measured_bytes"], 2 << 20, "{measured}");
        assert_eq!(measured["on_device"], false, "{measured}");
        let number = |value: &Value| value.as_f64().expect("a number");
        assert!(number(&measured["ratio"]) > 1.5, "{measured}");
        for way in ["compress", "decompress"] {
            // On the CPU, only its own work delays a thread, so both values are equal.
            let cost = &measured[way];
            let bytes = number(&cost["mb_per_s"]) * number(&cost["core_s_per_gib"]) * 1e6;
            assert!(
                (bytes / f64::from(1 << 30) - 1.0).abs() < 1e-6,
                "{measured}"
            );
        }
    }
    let zstd = methods.iter().filter(|one| one["method"] == "zstd");
    let levels: Vec<_> = zstd.map(|one| one["level"].as_u64()).collect();
    assert_eq!(levels, [Some(1), Some(3), Some(6)]);
}

#[test]
fn the_files_of_a_folder_are_measured_too() {
    let folder = TempDir::new().expect("a folder");
    file(&folder, "lines", &lines(1 << 20));
    let result = json(&["--sample=1M", "--measure", text(folder.path())]);
    let methods = result["methods"].as_array().expect("methods");
    assert!(methods.len() >= working().count(), "{result}");
}

#[test]
fn memory_of_zeros_is_not_measured() {
    let folder = TempDir::new().expect("a folder");
    let zeros = file(&folder, "zeros", &vec![0; 4 << 20]);
    let printed = methods(&["--measure", text(&zeros)]).join("\n");
    assert!(printed.contains("100 % zero"), "{printed}");
    assert!(printed.contains("nothing to compress"), "{printed}");
    let result = json(&["--measure", text(&zeros)]);
    assert_eq!(result["sample"]["zero"], 1024);
    assert_eq!(result["methods"].as_array().map(Vec::len), Some(0));
}

#[test]
fn a_running_process_is_sampled_without_a_change_to_it() {
    let mut guest = Hotlift::start(&[
        "guest",
        "run",
        "--guest=threads",
        "--ram=64M",
        "--zero-share=0.5",
        "--workload=idle",
    ]);
    guest.wait_for("pages with data");
    let pid = guest.pid().to_string();
    let result = json(&["--pid", &pid, "--sample=256M"]);
    let sample = &result["sample"];
    let of = |name: &str| sample[name].as_f64().expect("a number");
    let zero = (of("zero") + of("untouched")) / of("pages");
    assert!((0.4..0.65).contains(&zero), "{sample}");
    let bytes = of("memory_bytes") / f64::from(1 << 20);
    assert!((64.0..80.0).contains(&bytes), "{sample}");
    let name = sample["memory"].as_str().expect("a name");
    assert!(name.contains(&pid) && name.contains("hotlift"), "{name}");
    guest.signal(rustix::process::Signal::INT);
    guest.wait();
}

#[test]
fn a_target_that_cannot_be_measured_is_a_one_line_error() {
    let folder = TempDir::new().expect("a folder");
    let empty = file(&folder, "empty", b"less than a page");
    for (flags, code, words) in [
        (vec!["--pid=4194304"], 1, "there is no process 4194304"),
        (vec!["--measure=/no/file"], 1, "cannot read /no/file"),
        (vec!["--qmp=/no/socket"], 1, "cannot read /no/socket"),
        (vec!["--qmp=tcp:127.0.0.1:1"], 1, "cannot find the process"),
        (
            vec!["--measure", text(&empty)],
            1,
            "has no page of 4096 bytes in it",
        ),
        (
            vec!["--measure", text(&empty), "--sample=0"],
            2,
            "expected 4096 bytes or more",
        ),
        (
            vec!["--measure", text(&empty), "--pid=1"],
            2,
            "cannot be used with",
        ),
        (vec!["--sample=1M"], 2, "--measure <PATH>"),
    ] {
        let printed = refused(&flags, code);
        assert!(printed.contains(words), "{flags:?}: {printed}");
    }
}

#[test]
fn a_qmp_socket_of_something_else_is_not_taken_for_a_qemu() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("some.qmp");
    // The kernel reports the listener, which is this test: its name is cut to 15 bytes, and begins with "command".
    let listener = UnixListener::bind(&path).expect("bind");
    let printed = refused(&["--qmp", text(&path)], 1);
    assert!(
        printed.contains("which is not a QEMU: give --pid"),
        "{printed}"
    );
    drop(listener);
    let printed = refused(&["--qmp", text(&path)], 1);
    assert!(printed.contains("Connection refused"), "{printed}");
}

#[test]
fn a_process_of_another_user_is_refused_with_a_hint() {
    const OTHER_USER: u32 = 65_534;
    if !rustix::process::geteuid().is_root() {
        hotlift_testkit::skip!("root", "only root can become another user");
        return;
    }
    // In a place where it cannot be started.
    let folder = TempDir::new().expect("a folder");
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder.path(), open).expect("chmod");
    let program = folder.path().join("hotlift");
    // Copied by another process: else a child of another test could inherit this file. Linux does not run a program that is
    // open for writing.
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_hotlift"))
        .arg(&program)
        .status();
    assert!(copied.expect("cp").success());
    let output = Command::new(&program)
        .args(["methods", "--pid", &std::process::id().to_string()])
        .uid(OTHER_USER)
        .gid(OTHER_USER)
        .output()
        .expect("hotlift starts");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(
        printed.contains("not allowed to read the memory of process"),
        "{printed}"
    );
    assert!(printed.contains("CAP_SYS_PTRACE"), "{printed}");
}

#[test]
fn a_qemu_is_found_by_its_qmp_socket() {
    let Some(program) = qemu::installed() else {
        return;
    };
    let arguments = ["-machine", "pc", "-accel", "tcg", "-m", "64"];
    let qemu = Launched::bare(&program, &arguments).expect("QEMU starts");
    // It serves one client at a time.
    drop(qemu.connect().expect("QMP"));
    let result = json(&["--qmp", text(&qemu.path(QMP))]);
    let name = result["sample"]["memory"].as_str().expect("a name");
    assert!(name.contains(&qemu.process().pid().to_string()), "{name}");
    // The guest's RAM, not the translated code of TCG, which is a larger mapping.
    assert_eq!(result["sample"]["memory_bytes"], 64 << 20);
}
