//! Tests the commands that control QEMUs, as far as no QEMU is needed: flags, addresses, hostile peers, signals.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::hotlift::{Hotlift, Running, errors};

/// First message of `hotlift migrate`, for a machine without RAM and vCPUs.
const HELLO: &str = "{\"hotlift\":6,\"role\":\"serve\",\"qemu\":{\"major\":7,\"minor\":2,\"micro\":0},\
    \"machine\":\"none\",\"uuid\":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],\"ram-bytes\":0,\
    \"vcpus\":0,\"differences\":\"refuse\",\"state\":\"running\",\"channels\":2,\"alike\":[]}\n";

/// Starts a `hotlift serve` for a program that is not QEMU, and returns its address.
fn serve() -> (Running, String) {
    let mut serve = Hotlift::start(&["serve", "--listen", "tcp:127.0.0.1:0", "--", "false"]);
    let line = serve.wait_for("listening on tcp:");
    let address = line.rsplit("tcp:").next().unwrap_or_default().to_owned();
    (serve, address)
}

#[test]
fn a_serve_without_its_qemu_does_not_listen() {
    let listen = ["serve", "--listen", "tcp:127.0.0.1:0", "--", "no-such-qemu"];
    let (status, output) = Hotlift::start(&listen).wait();
    assert_eq!(status.code(), Some(1), "{output:?}");
    let expected = "hotlift: cannot run QEMU as 'no-such-qemu': ";
    assert!(output[0].starts_with(expected), "{output:?}");
}

#[test]
fn a_serve_prints_the_port_of_the_pages_and_fails_if_it_is_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("it is bound").port();
    let data_port = format!("--data-port={port}");
    let line = [
        "serve",
        "--listen=tcp:127.0.0.1:0",
        &data_port,
        "--",
        "false",
    ];
    let (status, output) = Hotlift::start(&line).wait();
    assert_eq!(status.code(), Some(1), "{output:?}");
    let expected = format!("hotlift: cannot listen on 'tcp:127.0.0.1:{port}': ");
    assert!(output[0].starts_with(&expected), "{output:?}");
    assert!(output[1].contains("choose another port"), "{output:?}");
    drop(taken);
    Hotlift::start(&line).wait_for(&format!("pages arrive at port {port}"));
}

/// Sends `words` to a `serve`, and returns the answer.
fn exchange(address: &str, words: &[u8]) -> String {
    let stream = TcpStream::connect(address).expect("it listens");
    // `serve` may close the connection before it has read everything, with or without an answer.
    let _ = (&stream).write_all(words);
    answer_on(&stream).unwrap_or_default()
}

/// Returns the first message of a `serve` after its progress.
fn answer_on(stream: &TcpStream) -> std::io::Result<String> {
    let mut lines = BufReader::new(stream).lines();
    let is_answer = |line: &std::io::Result<String>| {
        !line
            .as_ref()
            .is_ok_and(|line| line.contains("\"progress\""))
    };
    lines.find(is_answer).unwrap_or_else(|| Ok(String::new()))
}

#[test]
fn a_serve_answers_a_hello_before_it_starts_its_qemu() {
    let (serve, address) = serve();
    let stream = TcpStream::connect(&address).expect("it listens");
    (&stream).write_all(HELLO.as_bytes()).expect("it reads");
    let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
    let first = lines.next().expect("an answer");
    assert!(first.contains("\"progress\""), "{first}");
    let second = lines.next().expect("another answer");
    assert!(second.contains("QEMU ended before"), "{second}");
    drop(serve);
}

#[test]
fn a_serve_refuses_hostile_sources_with_the_reason_and_keeps_listening() {
    let (mut serve, address) = serve();
    let answer = exchange(&address, b"GET / HTTP/1.1\r\n\r\n");
    assert!(
        answer.contains("refused") && answer.contains("unknown message"),
        "{answer}"
    );
    let answer = exchange(&address, b"{\"hotlift-control\": 99}\n");
    assert!(answer.contains("version 99"), "{answer}");
    let answer = exchange(&address, b"{\"hotlift\": 6, \"role\": \"serve\"}\n");
    assert!(answer.contains("missing field"), "{answer}");
    // Megabytes without a line end: refused at a limit.
    exchange(&address, &vec![b'x'; 8 << 20]);
    serve.wait_for("a message of more than");
    // Closed without a message.
    drop(TcpStream::connect(&address).expect("it listens"));
    serve.wait_for("closed the connection");

    let answer = exchange(&address, HELLO.as_bytes());
    assert!(
        answer.contains("refused") && answer.contains("QEMU ended before"),
        "{answer}"
    );
    serve.signal(Signal::INT);
    let (status, output) = serve.wait();
    assert_eq!(status.code(), Some(130), "{output:?}");
    assert!(
        !output.iter().any(|line| line.contains("panicked")),
        "{output:?}"
    );
}

#[test]
fn a_serve_without_tls_reports_a_source_that_starts_tls() {
    let (mut serve, address) = serve();
    // A TLS record with a client hello: without a line end, and with one.
    for hello in [
        &[0x16, 3, 1, 0, 5, 1, 0, 0, 1, 3][..],
        b"\x16\x03\x01\x00\x02\x01\n",
    ] {
        let answer = exchange(&address, hello);
        assert!(answer.contains("this side does not"), "{answer}");
        serve.wait_for("the other side uses TLS, but this side does not");
    }
}

/// Enough to delay a sequential server for minutes.
const SILENT: usize = 60;

/// Above the time of an answer on a busy machine, and above the timeout of a silent client.
const ANSWER: Duration = Duration::from_secs(60);

#[test]
fn a_serve_answers_a_source_while_many_clients_are_silent() {
    let (serve, address) = serve();
    let silent: Vec<_> = (0..SILENT)
        .map(|_| TcpStream::connect(&address).expect("it listens"))
        .collect();
    let source = TcpStream::connect(&address).expect("it listens");
    source.set_read_timeout(Some(ANSWER)).expect("a time-out");
    (&source)
        .write_all(HELLO.as_bytes())
        .expect("the message is accepted");
    let answer = answer_on(&source).expect("it answers");
    assert!(answer.contains("QEMU ended before"), "{answer}");
    drop((silent, serve));
}

#[test]
fn a_serve_with_too_many_silent_clients_answers_the_latest() {
    let (serve, address) = serve();
    let silent: Vec<_> = (0..200)
        .map(|_| TcpStream::connect(&address).expect("it listens"))
        .collect();
    let answer = exchange(&address, HELLO.as_bytes());
    assert!(answer.contains("QEMU ended before"), "{answer}");
    drop((silent, serve));
}

#[test]
fn a_migration_without_its_other_ends_prints_what_to_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let nowhere = folder.path().join("qmp").display().to_string();
    for command in [
        &["migrate", "--qmp", &nowhere, "--to", "tcp:127.0.0.1:1"][..],
        &["save", "--qmp", &nowhere, "never-written"],
    ] {
        let mut command = Hotlift::start(command);
        // The QEMU may still be starting.
        command.wait_for(&format!("waiting for the QMP socket unix:{nowhere}: "));
        let (status, output) = command.wait();
        let errors = errors(&output);
        assert_eq!(status.code(), Some(1), "{errors:?}");
        assert!(
            errors[0].contains("QEMU at the source: cannot connect"),
            "{errors:?}"
        );
        assert!(errors[1].contains("-qmp unix:PATH,server=on"), "{errors:?}");
    }
}

#[test]
fn a_save_file_that_is_not_one_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).expect("a file");
        path.display().to_string()
    };
    let gzip = [&b"\x1f\x8b\x08\0"[..], &[b'x'; 9000]].concat();
    for (path, words) in [
        (file("text", &[b'x'; 9000]), "this is neither a save file"),
        (file("vm.gz", &gzip), "decompress it first"),
        (file("empty", b""), "is empty"),
    ] {
        for command in [
            &["show", &path][..],
            &["restore", &path, "--qmp=/nowhere"],
            &["restore", "--lazy", &path, "--qmp=/nowhere"],
        ] {
            let (status, output) = Hotlift::start(command).wait();
            let errors = errors(&output);
            assert_eq!(status.code(), Some(1), "{errors:?}");
            assert!(errors[0].contains(words), "{command:?}: {errors:?}");
            assert_eq!(
                errors[0].matches(&path).count(),
                1,
                "{command:?}: {errors:?}"
            );
        }
    }
}

#[test]
fn a_save_into_a_missing_folder_is_refused_before_qemu_is_contacted() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("missing/vm").display().to_string();
    let (status, output) = Hotlift::start(&["save", "--qmp=/nowhere", &file]).wait();
    assert_eq!(status.code(), Some(1), "{output:?}");
    let expected = format!("hotlift: the guest was not saved: cannot write {file}: No such file");
    assert!(output[0].starts_with(&expected), "{output:?}");
}

#[test]
fn a_fifo_in_place_of_a_save_file_is_refused_without_waiting() {
    let folder = tempfile::tempdir().expect("a folder");
    let fifo = folder.path().join("fifo").display().to_string();
    let made = Command::new("mkfifo").arg(&fifo).status();
    assert!(made.expect("mkfifo runs").success());
    let nowhere = folder.path().join("qmp").display().to_string();
    for command in [
        &["show", &fifo][..],
        &["restore", &fifo, "--qmp", &nowhere],
        &["restore", &fifo, "--qmp", &nowhere, "--offset=4096"],
        &["restore", "--lazy", &fifo, "--qmp", &nowhere],
        &["save", "--qmp", &nowhere, &fifo],
    ] {
        let (status, output) = Hotlift::start(command).wait();
        let errors = errors(&output);
        assert_eq!(status.code(), Some(1), "{errors:?}");
        let words = format!("{fifo} is a FIFO, ");
        assert!(errors[0].contains(&words), "{command:?}: {errors:?}");
    }
}

#[test]
fn a_command_line_that_cannot_work_is_refused_before_anything_is_opened() {
    for (command, words) in [
        (
            &["serve", "--listen", "tcp::0"][..],
            "<QEMU|--qmp <ADDRESS>|--files <DIR>>",
        ),
        (&["restore", "f"], "<QEMU|--qmp <ADDRESS>>"),
        (
            &["migrate", "--qmp=q", "--to=unix:/x"],
            "expected tcp:HOST:PORT",
        ),
        (
            &["migrate", "--qmp=q", "--to=tcp:h:80000"],
            "with a port up to 65535",
        ),
        (
            &[
                "migrate",
                "--qmp=q",
                "--to=tcp:h:1",
                "--max-bandwidth",
                "-1",
            ],
            "got '-1'",
        ),
        (
            &["serve", "--listen", "tcp::0", "--qmp", "q", "--", "qemu"],
            "cannot be used with",
        ),
        (
            &[
                "relay",
                "source",
                "--listen",
                "rdma:h:1",
                "--connect",
                "tcp:h:1",
            ],
            "unknown migration",
        ),
        (&["relay", "source", "--listen", "unix:/x"], "--connect"),
        (
            &["migrate", "--qmp", "tcp:4", "--to", "tcp:h:1"],
            "not a QMP address",
        ),
        (
            &[
                "migrate",
                "--qmp",
                "q",
                "--to",
                "tcp:h:1",
                "--channels",
                "0",
            ],
            "between 1 and 255",
        ),
        (
            &[
                "relay",
                "source",
                "--listen",
                "unix:/x",
                "--connect",
                "unix:/y",
                "--uuid",
                "5",
            ],
            "a UUID",
        ),
        (&["save", "--qmp", "q"], "FILE"),
        (
            &["save", "--qmp", "q", "f", "--format", "qcow2"],
            "mapped-ram",
        ),
        (
            &[
                "save",
                "--qmp=q",
                "f",
                "--format=mapped-ram",
                "--method=zstd",
            ],
            "multifd-compression=zstd needs format hotlift",
        ),
        (
            &[
                "save",
                "--qmp=q",
                "f",
                "--format=mapped-ram",
                "--multifd=off",
                "--compress=on",
            ],
            "compress=on needs a stream",
        ),
        (
            &[
                "migrate",
                "--qmp=q",
                "--to=tcp:h:1",
                "--decompress-threads=4",
            ],
            "'hotlift migrate' does not take --decompress-threads: a relay decompresses",
        ),
        (
            &[
                "migrate",
                "--qmp=q",
                "--to=tcp:h:1",
                "--auto-converge",
                "on",
            ],
            "'hotlift migrate' does not take --auto-converge: the source's QEMU",
        ),
        (
            &["save", "--qmp=q", "f", "--mem-prealloc=on"],
            "'hotlift save' does not take --mem-prealloc: the destination's QEMU owns the RAM",
        ),
        (
            &["serve", "--listen=tcp::0", "--qmp=q", "--method=zstd"],
            "'hotlift serve' does not take --method: the sending side",
        ),
        (
            &[
                "relay",
                "destination",
                "--listen=unix:/x",
                "--connect=unix:/y",
                "--compress=on",
                "--channels=4",
            ],
            "multifd-channels=4 needs multifd=on",
        ),
        (&["restore", "f"], "--qmp"),
        (
            &["migrate", "--qmp=q", "--to=tcp:192.0.2.2:0"],
            "cannot connect to port 0",
        ),
        (
            &["relay", "source", "--listen=unix:/x", "--connect=tcp:h:0"],
            "cannot connect to port 0",
        ),
        (
            &["restore", "--lazy", "tcp:h:0/f", "--qmp=q"],
            "cannot connect to port 0",
        ),
        (
            &["guest", "run", "--migrate-to=tcp:h:0"],
            "cannot connect to port 0",
        ),
        (
            &["migrate", "--qmp=q", "--to=tcp:[fe80::1]:4444"],
            "as in tcp:[fe80::1%eth0]:PORT",
        ),
        (
            &["restore", "--lazy", "f", "--max-bandwidth=foo", "--qmp=q"],
            "parameter 'max-bandwidth' expects",
        ),
        (
            &["restore", "--lazy", "f", "--cpu-limit=foo", "--qmp=q"],
            "parameter 'cpu-limit' expects",
        ),
    ] {
        let (status, output) = Hotlift::start(command).wait();
        assert_eq!(status.code(), Some(2), "{command:?}: {output:?}");
        assert!(
            output.iter().any(|line| line.contains(words)),
            "{command:?}: {output:?}"
        );
    }
}

#[test]
fn a_command_line_of_a_qemu_that_cannot_wait_is_refused_before_a_source_comes() {
    for (flag, words) in [
        ("-daemonize", "remove it"),
        ("-incoming", "must be 'defer'"),
    ] {
        let mut serve = Hotlift::start(&[
            "serve",
            "--listen",
            "tcp:127.0.0.1:0",
            "--",
            "qemu",
            flag,
            "tcp::4",
        ]);
        let error = serve.wait_for("hotlift: ");
        assert!(error.contains(words), "{error}");
        let (status, _) = serve.wait();
        assert_eq!(status.code(), Some(1));
    }
}

#[test]
fn a_relay_that_is_interrupted_leaves_no_socket_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("relay");
    let uri = format!("unix:{}", path.display());
    for forever in [false, true] {
        for signal in [Signal::INT, Signal::TERM] {
            let mut args = vec![
                "relay",
                "source",
                "--listen",
                &uri,
                "--connect",
                "tcp:127.0.0.1:1",
            ];
            args.extend(forever.then_some("--forever"));
            let mut relay = Hotlift::start(&args);
            relay.wait_for(&format!("listening on {uri}"));
            assert!(path.exists());
            relay.signal(signal);
            let (status, output) = relay.wait();
            assert_eq!(status.code(), Some(130), "{output:?}");
            assert!(!path.exists());
        }
    }
}

#[test]
fn a_restore_refuses_a_file_that_is_no_save_before_it_starts_qemu() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    for (content, words) in [
        (&b""[..], "is empty"),
        (b"HOTLIFT SAVE? NO", "neither a save file"),
    ] {
        std::fs::write(&file, content).expect("a file");
        let path = file.display().to_string();
        let (status, output) = Hotlift::start(&["restore", &path, "--", "no-such-qemu"]).wait();
        let errors = errors(&output);
        assert_eq!(status.code(), Some(1), "{errors:?}");
        assert!(errors[0].contains(words), "{errors:?}");
    }
}

/// Returns the entries in `place` that begin with the name of a command's folder.
fn folders(place: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(place).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths.filter(|path| path.is_dir()).collect()
}

#[test]
fn the_error_of_a_qemu_that_cannot_start_is_printed_and_no_folder_stays() {
    let place = tempfile::tempdir().expect("a folder");
    let tmpdir = place.path().display().to_string();
    let mut serve = Hotlift::start_with(
        &[
            "serve",
            "--listen=tcp:127.0.0.1:0",
            "--",
            "sh",
            "-c",
            "echo printed the reason; echo and errors >&2; echo qemu-kvm: no such machine >&2; exit 7",
        ],
        &[("TMPDIR", &tmpdir)],
    );
    let line = serve.wait_for("listening on tcp:");
    let answer = exchange(
        line.rsplit("tcp:").next().unwrap_or_default(),
        HELLO.as_bytes(),
    );
    assert!(
        answer.contains("QEMU ended before")
            && answer.contains("(exit status: 7): no such machine"),
        "{answer}"
    );
    serve.signal(Signal::INT);
    let (status, output) = serve.wait();
    assert_eq!(status.code(), Some(130), "{output:?}");
    for words in [
        "printed the reason",
        "and errors",
        "qemu-kvm: no such machine",
    ] {
        assert!(output.iter().any(|line| line == words), "{output:?}");
    }
    let left = folders(place.path());
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_killed_serve_leaves_neither_a_waiting_qemu_nor_a_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let pidfile = folder.path().join("pid");
    let path = pidfile.display().to_string();
    let place = tempfile::tempdir().expect("a folder");
    let tmpdir = place.path().display().to_string();
    let arguments = [
        "serve",
        "--listen",
        "tcp:127.0.0.1:0",
        "--",
        "qemu-system-x86_64",
        "-machine",
        "none",
        "-nodefaults",
        "-display",
        "none",
        "-pidfile",
        &path,
    ];
    if let Err(error) = Command::new("qemu-system-x86_64").arg("-version").output() {
        hotlift_testkit::skip!("qemu", "qemu-system-x86_64: {error}");
        return;
    }
    let mut serve = Hotlift::start_with(&arguments, &[("TMPDIR", &tmpdir)]);
    let line = serve.wait_for("listening on tcp:");
    let stream =
        TcpStream::connect(line.rsplit("tcp:").next().unwrap_or_default()).expect("it listens");
    (&stream).write_all(HELLO.as_bytes()).expect("it reads");
    let answer = answer_on(&stream).expect("it answers");
    assert!(answer.contains("\"ready\""), "{answer}");
    let pid = std::fs::read_to_string(&pidfile).expect("QEMU runs");
    // Empty for a process that has ended and has not been reaped.
    let command_line = Path::new("/proc").join(pid.trim()).join("cmdline");
    let runs = || std::fs::read(&command_line).is_ok_and(|line| !line.is_empty());
    assert!(runs());
    let mine = folders(place.path());
    let mode = std::fs::metadata(&mine[0]).expect("it is there").mode();
    assert_eq!((mine.len(), mode & 0o777), (1, 0o700));
    serve.signal(Signal::KILL);
    let deadline = Instant::now() + Duration::from_secs(60);
    while runs() || !folders(place.path()).is_empty() {
        let left = folders(place.path());
        assert!(
            Instant::now() < deadline,
            "QEMU {} still waits, or there is {left:?}",
            pid.trim()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_reported_reason_comes_from_this_qemu_though_others_share_its_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    // The first bytes of a QEMU file, all that is checked before a QEMU is started.
    let mut file = b"QEVM".to_vec();
    file.resize(4096, 0);
    std::fs::write(path("saved"), file).expect("it is written");
    // Replaces a QEMU with '-msg timestamp=on'.
    let script = format!(
        "echo '2026-11-23T05:16:37.123456Z qemu-system-x86_64: why it ends' >&2\n\
         echo 'qemu-system-x86_64: why another one ends' >>'{}'\n\
         exit 1\n",
        path("log").display()
    );
    std::fs::write(path("script"), script).expect("it is written");
    let log = std::fs::File::create(path("log")).expect("a log");
    let status = Command::new(env!("CARGO_BIN_EXE_hotlift"))
        .arg("restore")
        .arg(path("saved"))
        .args(["--quiet", "--", "sh"])
        .arg(path("script"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .status()
        .expect("hotlift runs");
    let log = std::fs::read_to_string(path("log")).expect("the log");
    assert_eq!(status.code(), Some(1), "{log}");
    let output: Vec<_> = log.lines().collect();
    assert_eq!(output.len(), 3, "nothing is written over: {log}");
    assert!(
        output[2].starts_with("hotlift: QEMU ended") && output[2].ends_with(": why it ends"),
        "{log}"
    );
}
