//! `hotlift advise`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use hotlift_testkit::qemu::{self, Launched, QMP};
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
    assert_eq!(advice["zero_pages"]["mode"], "multifd");
    let cpu = |which: &str| advice["zero_pages"][which].as_f64().expect("seconds");
    assert!(
        cpu("cpu_without_s") > cpu("cpu_with_s"),
        "sending zeros is found to cost more: {}",
        advice["zero_pages"]
    );
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
    assert!(
        !command.contains("auto-converge"),
        "migrate refuses it: {command}"
    );
    // And the text says so, in as many lines.
    let said = Hotlift::start(&[&["advise"], &flags[..], &["--dirty-rate=500000"]].concat())
        .wait()
        .1;
    for words in ["does not converge", "auto-converge"] {
        assert!(said.join(" ").contains(words), "{words}: {said:#?}");
    }
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
            vec!["--file", text(folder.path())],
            2,
            "how much RAM its files are to fill: give --ram",
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
        hotlift_testkit::skip!("root", "only root can become somebody else");
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

#[test]
fn a_qemu_is_found_behind_its_qmp_socket_and_asked_for_its_dirty_rate() {
    let Some(program) = qemu::installed() else {
        return;
    };
    let arguments = ["-machine", "pc", "-accel", "tcg", "-m", "64"];
    let qemu = Launched::bare(&program, &arguments).expect("QEMU starts");
    // It serves one client at a time.
    drop(qemu.connect().expect("QMP"));
    let path = qemu.path(QMP);
    let advice = advise(&["--qmp", text(&path), "--bandwidth=1gbit"]);
    let name = advice["sample"]["memory"].as_str().expect("a name");
    assert!(name.contains(&qemu.process().pid().to_string()), "{name}");
    // Its RAM, and not the translated code of TCG, which is a larger mapping.
    assert_eq!(advice["sample"]["ram_bytes"], 64 << 20);
    assert!(
        advice["reasons"][3]
            .as_str()
            .is_some_and(|line| !line.contains("not known")),
        "{advice}"
    );
    let command = advice["command"].as_str().expect("a command");
    assert!(command.contains(text(&path)), "{command}");
    // Its guest is one of relays, so they are in the figures.
    assert!(advice["machine"]["relays"].is_object(), "{advice}");
    assert!(advice["beyond"].is_null(), "{advice}");
    // And it takes what it is to be told.
    let mut qmp = qemu.connect().expect("QMP");
    let commands = advice["qmp"].as_array().expect("commands");
    assert_eq!(commands.len(), 2);
    for command in commands {
        let name = command["execute"].as_str().expect("a name");
        let taken = qmp.client().execute(name, &command["arguments"]);
        assert!(taken.is_ok(), "{command}: {taken:?}");
    }
}

#[test]
fn an_old_qemu_is_told_of_nothing_that_came_later() {
    let folder = TempDir::new().expect("a folder");
    let words = file(&folder, "words", &words(1 << 20));
    let flags = ["--file", text(&words), "--ram=1G", "--bandwidth=100mbit"];
    let of = |version: &str| advise(&[&flags[..], &[version]].concat());
    let old = of("--to-qemu=7.2");
    assert_eq!(old["zero_pages"]["mode"], "legacy");
    assert_eq!(
        old["qmp"][1]["arguments"]["zero-page-detection"],
        Value::Null
    );
    assert!(old["command"].is_null(), "no relay is there: {old}");
    let new = of("--to-qemu=10.0");
    assert_eq!(
        new["qmp"][1]["arguments"]["zero-page-detection"],
        new["zero_pages"]["mode"]
    );
    for advice in [&old, &new] {
        let candidates = advice["candidates"].as_array().expect("candidates");
        let eligible = |method: &str| {
            let mut of = candidates
                .iter()
                .filter(|choice| choice["method"] == method);
            of.all(|choice| choice["eligible"] == true)
        };
        assert!(eligible("zstd") && !eligible("lz4"), "{candidates:?}");
    }
}

#[test]
fn relays_and_memory_that_is_there_already_are_in_the_figures_if_said() {
    let folder = TempDir::new().expect("a folder");
    let words = file(&folder, "words", &words(1 << 20));
    let flags = ["--file", text(&words), "--ram=4G"];
    // What a GiB takes of both sides, and the figures that it was predicted with: each call measures anew.
    let cpu_of_none = |more: &[&str]| {
        let advice = advise(&[&flags[..], more].concat());
        let candidates = advice["candidates"].as_array().expect("candidates");
        let none = candidates.iter().find(|choice| choice["method"] == "none");
        let prediction = &none.expect("none")["prediction"];
        let of = |side: &str| prediction[side].as_f64().expect("seconds");
        let mut machine = advice["machine"].clone();
        if advice["zero_pages"]["mode"] == "none" {
            machine["look"] = 0.0.into();
        }
        let cpu = (of("source_cpu_s") + of("destination_cpu_s")) / 4.0;
        (cpu, machine)
    };
    let sum = |of: &Value, names: &[&str]| -> f64 {
        let numbers = names
            .iter()
            .map(|name| of[*name].as_f64().expect("a number"));
        numbers.sum()
    };
    let (cpu, machine) = cpu_of_none(&[]);
    let all = sum(&machine, &["look", "send", "receive", "first_touch"]);
    assert!((cpu - all).abs() < 0.01, "{cpu}: {machine}");
    let (cpu, machine) = cpu_of_none(&["--mem-prealloc"]);
    let all = sum(&machine, &["look", "send", "receive"]);
    assert!((cpu - all).abs() < 0.01, "{cpu}: {machine}");
    let (cpu, machine) = cpu_of_none(&["--relays"]);
    let all = sum(&machine, &["look", "first_touch"])
        + sum(&machine["relays"], &["send", "near", "far", "receive"]);
    assert!((cpu - all).abs() < 0.01, "{cpu}: {machine}");
}

/// A `hotlift` that serves, and where.
fn serving(flags: &[&str], says: &str) -> (Hotlift, String) {
    let mut other = Hotlift::start(flags);
    let line = other.wait_for(says);
    let port: String = line
        .rsplit("tcp:")
        .next()
        .and_then(|rest| rest.split(';').next())
        .and_then(|rest| rest.rsplit(':').next())
        .map(|port| port.chars().take_while(char::is_ascii_digit).collect())
        .expect("a port");
    (other, format!("tcp:127.0.0.1:{port}"))
}

#[test]
fn the_link_and_the_other_host_are_measured_where_hotlift_waits_and_it_goes_on_waiting() {
    let folder = TempDir::new().expect("a folder");
    let words = file(&folder, "words", &words(4 << 20));
    for (flags, says) in [
        (&["bench", "--serve=tcp:127.0.0.1:0"][..], "waiting for"),
        (
            &[
                "serve",
                "--listen=tcp:127.0.0.1:0",
                "--",
                "qemu-system-x86_64",
            ],
            "listening on",
        ),
    ] {
        let (mut other, to) = serving(flags, says);
        let advice = advise(&[
            "--file",
            text(&words),
            "--ram=1G",
            "--channels=2",
            "--to",
            &to,
        ]);
        let far = &advice["other"];
        assert!(far["bandwidth"].as_f64() > Some(0.0), "{far}");
        assert_eq!(far["connections"], 2, "{far}");
        // This host's loopback limits nothing, and its cores are here once.
        assert_eq!(far["over_loopback"], true, "{far}");
        assert_eq!(advice["machine"]["same_host"], true);
        assert!(advice["machine"]["bandwidth"].is_null(), "{advice}");
        // What decoding takes is the other host's word.
        let decoders = far["decoders"].as_array().expect("decoders");
        let zstd = |list: &Value| list["method"] == "zstd" && list["level"] == 1;
        let theirs = decoders.iter().find(|one| zstd(one)).expect("zstd");
        let candidates = advice["candidates"].as_array().expect("candidates");
        let ours = candidates.iter().find(|one| zstd(one)).expect("zstd");
        assert_eq!(ours["costs"]["content"]["decode"], theirs["decode"]);
        let command = advice["command"].as_str().expect("a command");
        assert!(command.contains(&format!("--to {to} ")), "{command}");
        other.wait_for("a survey:");
        // Whoever comes next is heard.
        let answer = Asking::for_connections(&to, 0).hear();
        assert_eq!(answer["message"], "refused", "{answer}");
        other.signal(rustix::process::Signal::INT);
        other.wait();
    }
}

/// Answers one connection with `lines`, the first once something has been said, and ends.
fn peer(lines: &'static [&'static str]) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let to = format!("tcp:{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept()?;
        std::io::Read::read(&mut stream, &mut [0; 4096])?;
        for line in lines {
            std::io::Write::write_all(&mut stream, line.as_bytes())?;
        }
        // Its end comes with the other side's.
        std::io::copy(&mut stream, &mut std::io::sink())
    });
    to
}

#[test]
fn a_peer_that_is_no_hotlift_is_an_error_in_a_line() {
    let folder = TempDir::new().expect("a folder");
    let zeros = file(&folder, "zeros", &vec![0; 1 << 20]);
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let nobody = format!("tcp:{}", free.local_addr().expect("an address"));
    drop(free);
    for (to, code, words) in [
        (nobody, 1, "cannot reach"),
        ("unix:/tmp/x".to_owned(), 1, "--to takes tcp:HOST:PORT"),
        (peer(&["HTTP/1.1 400 Bad Request\r\n"]), 1, "not understood"),
        (
            peer(&["{\"message\":\"refused\",\"reason\":\"no\\u001b[2J\"}\n"]),
            1,
            "refuses: no",
        ),
        (
            peer(&["{\"message\":\"ready\",\"port\":1,\"token\":\"+1\",\"boot\":\"\"}\n"]),
            1,
            "its token is not what a hotlift",
        ),
        (
            peer(&[
                "{\"message\":\"received\",\"bytes\":1,\"seconds\":1,\"all_bytes\":1,\"cpu_s\":0}\n",
                "{\"message\":\"received\",\"bytes\":1,\"seconds\":1,\"all-bytes\":1,\"cpu-s\":0}\n",
            ]),
            1,
            "not understood",
        ),
        (
            peer(&[
                "{\"message\":\"received\",\"bytes\":1,\"seconds\":1,\"all-bytes\":1,\"cpu-s\":0}\n",
            ]),
            1,
            "its first answer is not what a hotlift",
        ),
    ] {
        let said = refused(&["--file", text(&zeros), "--to", &to], code);
        assert!(said.contains(words), "{to}: {said}");
        assert!(said.lines().count() <= 2, "and what to do: {said}");
        assert!(!said.contains('\u{1b}'), "{said:?}");
    }
}

/// A survey as somebody asks for it who is no `hotlift advise`.
struct Asking {
    lines: std::io::Lines<std::io::BufReader<std::net::TcpStream>>,
}

impl Asking {
    fn for_connections(to: &str, count: i32) -> Self {
        let stream = std::net::TcpStream::connect(&to["tcp:".len()..]).expect("it listens");
        let request = format!("{{\"hotlift-survey\":1,\"connections\":{count}}}\n");
        std::io::Write::write_all(&mut &stream, request.as_bytes()).expect("said");
        let lines = std::io::BufRead::lines(std::io::BufReader::new(stream));
        Self { lines }
    }

    fn hear(&mut self) -> Value {
        let line = self.lines.next().expect("a line").expect("a line");
        serde_json::from_str(&line).expect("JSON")
    }
}

#[test]
fn a_survey_takes_what_it_was_promised_for_its_own_time_and_nobody_elses() {
    use std::io::Write as _;
    let (other, to) = serving(&["bench", "--serve=tcp:127.0.0.1:0"], "waiting for");
    for count in [0, 17, -1] {
        let answer = Asking::for_connections(&to, count).hear();
        assert_eq!(answer["message"], "refused", "{answer}");
    }
    let mut asking = Asking::for_connections(&to, 1);
    let ready = asking.hear();
    assert_eq!(ready["message"], "ready", "{ready}");
    let port = ready["port"].as_u64().expect("a port");
    let connect = || std::net::TcpStream::connect(format!("127.0.0.1:{port}")).expect("it listens");
    // A stranger does not know the token: it is not the one connection that is waited for.
    let mut stranger = connect();
    stranger.write_all(&[7; 4096]).expect("said");
    let token = ready["token"].as_str().expect("a token");
    let number = u128::from_str_radix(token, 16).expect("digits");
    let mut silent = connect();
    silent.write_all(&number.to_be_bytes()).expect("said");
    // It says nothing more, and is not waited for longer than any other.
    let received = asking.hear();
    assert_eq!(received["all-bytes"], 0, "{received}");
    assert_eq!(asking.hear()["message"], "measured");
    other.signal(rustix::process::Signal::INT);
    other.wait();
}
