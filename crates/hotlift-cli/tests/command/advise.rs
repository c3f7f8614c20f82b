//! `hotlift advise`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use serde_json::Value;
use tempfile::TempDir;

use crate::hotlift::Hotlift;

/// What is advised on a file, or whatever else the flags name.
fn advise(flags: &[&str]) -> Value {
    let flags = [&["advise", "--json", "--no-accelerators"], flags].concat();
    let (status, said) = Hotlift::start(&flags).wait();
    assert!(status.success(), "{said:?}");
    let json = said.iter().find(|line| line.starts_with('{'));
    serde_json::from_str(json.expect("JSON")).expect("JSON")
}

fn recommended(advice: &Value) -> &str {
    advice["candidates"][0]["method"].as_str().expect("a name")
}

/// The one line that a failed command says.
fn refused(flags: &[&str], code: i32) -> String {
    let (status, said) = Hotlift::start(&[&["advise"], flags].concat()).wait();
    assert_eq!(status.code(), Some(code), "{said:?}");
    said.join("\n")
}

/// Numbers that follow each other without a pattern.
fn noise() -> impl FnMut() -> u64 {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

fn file(folder: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, bytes).expect("write");
    path
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// So many bytes of words in random order.
fn words(bytes: usize) -> Vec<u8> {
    let mut noise = noise();
    let words: Vec<String> = (0..4000)
        .map(|_| {
            let letters = (0..3 + noise() % 8).map(|_| char::from(b'a' + (noise() % 26) as u8));
            letters.collect()
        })
        .collect();
    let mut text = String::new();
    while text.len() < bytes {
        // Some words are much more common than others.
        let rank = noise() % 4000 * (noise() % 4000) / 4000;
        text.push_str(&words[usize::try_from(rank).expect("small")]);
        text.push(' ');
    }
    text.truncate(bytes);
    text.into_bytes()
}

#[test]
fn zeros_are_not_compressed_but_found() {
    let folder = TempDir::new().expect("a folder");
    let zeros = file(&folder, "zeros", &vec![0; 4 << 20]);
    let advice = advise(&["--file", text(&zeros), "--bandwidth=100mbit"]);
    assert_eq!(recommended(&advice), "none");
    assert_eq!(advice["zero_page_detection"], "multifd");
    assert_eq!(advice["sample"]["zero"], 1024);
    let wire = &advice["candidates"][0]["prediction"]["wire_bytes"];
    assert!(wire.as_f64() < Some(100e3), "{wire}");
}

#[test]
fn random_bytes_are_not_compressed_on_any_link() {
    let folder = TempDir::new().expect("a folder");
    let mut noise = noise();
    let bytes: Vec<u8> = (0..1 << 20).flat_map(|_| noise().to_le_bytes()).collect();
    let random = file(&folder, "random", &bytes);
    for link in ["10mbit", "100gbit"] {
        let advice = advise(&["--file", text(&random), "--bandwidth", link]);
        assert_eq!(recommended(&advice), "none", "{link}");
    }
}

#[test]
fn text_is_compressed_on_a_slow_link_and_sent_as_it_is_where_none_limits() {
    let folder = TempDir::new().expect("a folder");
    let words = file(&folder, "words", &words(8 << 20));
    let slow = advise(&["--file", text(&words), "--bandwidth=10mbit", "--ram=1G"]);
    assert_eq!(recommended(&slow), "zstd");
    assert_eq!(slow["reasons"].as_array().map(Vec::len), Some(5));
    let command = slow["command"].as_str().expect("a command");
    assert!(
        command.starts_with("hotlift migrate --qmp VM.qmp"),
        "{command}"
    );
    assert!(command.contains("--method zstd --level"), "{command}");
    assert_eq!(slow["qmp"][1]["arguments"]["multifd-compression"], "zstd");
    assert_eq!(slow["qmp"][1]["arguments"]["max-bandwidth"], 1_250_000);
    let fast = advise(&["--file", text(&words), "--ram=1G"]);
    assert_eq!(recommended(&fast), "none");
    assert!(
        fast["machine"]["bandwidth"].is_null(),
        "{}",
        fast["machine"]
    );
}

#[test]
fn a_guest_that_no_method_can_follow_is_said_not_to_converge() {
    let folder = TempDir::new().expect("a folder");
    let words = file(&folder, "words", &words(2 << 20));
    let flags = ["--file", text(&words), "--bandwidth=1mbit", "--ram=4G"];
    let advice = advise(&[&flags[..], &["--dirty-rate=500000"]].concat());
    assert_eq!(advice["candidates"][0]["prediction"]["converges"], false);
    let command = advice["command"].as_str().expect("a command");
    assert!(command.contains("--auto-converge on"), "{command}");
    // And the text says so, in as many lines.
    let said = Hotlift::start(&[&["advise"], &flags[..], &["--dirty-rate=500000"]].concat())
        .wait()
        .1;
    assert!(
        said.iter().any(|line| line.contains("does not converge")),
        "{said:#?}"
    );
    assert_eq!(
        said.iter().filter(|line| line.starts_with("  - ")).count(),
        5
    );
    let widest = said
        .iter()
        .take_while(|line| !line.contains(": "))
        .map(|line| line.chars().count())
        .max();
    assert!(widest <= Some(110), "{widest:?}");
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
    let advice = advise(&["--pid", &pid, "--sample=256M", "--bandwidth=1gbit"]);
    let of = |name: &str| advice["load"][name].as_f64().expect("a share");
    let untouched = of("untouched_share");
    assert!(
        (0.4..0.65).contains(&(of("zero_share") + untouched)),
        "{advice}"
    );
    let ram = advice["sample"]["ram_bytes"].as_u64();
    assert!(ram >= Some(64 << 20) && ram < Some(80 << 20), "{ram:?}");
    let name = advice["sample"]["memory"].as_str().expect("a name");
    assert!(name.contains(&pid) && name.contains("hotlift"), "{name}");
    guest.signal(rustix::process::Signal::INT);
    guest.wait();
}

#[test]
fn what_cannot_be_sampled_is_said_in_a_line() {
    let folder = TempDir::new().expect("a folder");
    let empty = file(&folder, "empty", b"less than a page");
    for (flags, code, words) in [
        (vec!["--pid=4194304"], 1, "there is no process 4194304"),
        (vec!["--file=/no/such/file"], 1, "cannot read /no/such/file"),
        (
            vec!["--file", text(&empty)],
            1,
            "has no page of 4096 bytes in it",
        ),
        (
            vec!["--file", text(folder.path()), "--sample=0"],
            2,
            "expected 4096 bytes or more",
        ),
        (
            vec!["--file", text(&empty), "--bandwidth=fast"],
            2,
            "expected a rate as in 10gbit",
        ),
        (
            vec!["--file", text(&empty), "--pid=1"],
            2,
            "cannot be used with",
        ),
        (vec![], 2, "--pid"),
    ] {
        let said = refused(&flags, code);
        assert!(said.contains(words), "{flags:?}: {said}");
    }
}

#[test]
fn a_qmp_socket_of_something_else_is_not_taken_for_a_qemu() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("some.qmp");
    // The kernel tells who listens, and that is this test: its name is cut to 15 bytes, and begins with "command".
    let listener = UnixListener::bind(&path).expect("bind");
    let said = refused(&["--qmp", text(&path)], 1);
    assert!(said.contains("which is no QEMU: give --pid"), "{said}");
    drop(listener);
    let said = refused(&["--qmp", text(&path)], 1);
    assert!(said.contains("tells no process"), "{said}");
}

#[test]
fn a_process_of_somebody_else_is_refused_with_what_would_help() {
    const NOBODY: u32 = 65_534;
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: wants to be root, to become somebody else");
        return;
    }
    // Where nobody can start it.
    let folder = TempDir::new().expect("a folder");
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder.path(), open).expect("chmod");
    let program = folder.path().join("hotlift");
    // By another process: whatever another test starts meanwhile would inherit this one's open file, and a program
    // that somebody may write to is not run.
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_hotlift"))
        .arg(&program)
        .status();
    assert!(copied.expect("cp").success());
    let output = Command::new(&program)
        .args(["advise", "--pid", &std::process::id().to_string()])
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("hotlift starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("not allowed to read the memory of process"),
        "{said}"
    );
    assert!(said.contains("CAP_SYS_PTRACE"), "{said}");
}

#[test]
fn a_reader_who_has_gone_is_an_error_in_a_line() {
    let folder = TempDir::new().expect("a folder");
    let zeros = file(&folder, "zeros", &vec![0; 1 << 20]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_hotlift"))
        .args(["advise", "--no-accelerators", "--file", text(&zeros)])
        .stdout(writer)
        .output()
        .expect("hotlift starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot write the result"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}

/// A QEMU, ended when it goes out of scope.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_qemu_is_found_behind_its_qmp_socket_and_asked_for_its_dirty_rate() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("vm.qmp");
    let qemu = Command::new("qemu-system-x86_64")
        .args([
            "-machine",
            "pc",
            "-accel",
            "tcg",
            "-m",
            "64",
            "-nodefaults",
            "-display",
            "none",
        ])
        .arg("-qmp")
        .arg(format!("unix:{},server=on,wait=off", path.display()))
        .spawn();
    let Ok(qemu) = qemu.map(Qemu) else {
        eprintln!("skipped: no qemu-system-x86_64 (package qemu-system-x86)");
        return;
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while std::os::unix::net::UnixStream::connect(&path).is_err() {
        assert!(std::time::Instant::now() < deadline, "QEMU does not listen");
        std::thread::yield_now();
    }
    let advice = advise(&["--qmp", text(&path), "--bandwidth=1gbit"]);
    let name = advice["sample"]["memory"].as_str().expect("a name");
    assert!(name.contains(&qemu.0.id().to_string()), "{name}");
    assert!(
        advice["reasons"][3]
            .as_str()
            .is_some_and(|line| !line.contains("not known")),
        "{advice}"
    );
    let command = advice["command"].as_str().expect("a command");
    assert!(command.contains(text(&path)), "{command}");
}
