//! Types the steps of the published documents at the monitors of two built-in guests.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::hotlift::{Hotlift, Running};

/// Far above the duration of any step here on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

const PROMPT: &str = "(qemu) ";

/// User at a monitor's socket.
struct Person(UnixStream);

impl Person {
    fn at(path: &Path) -> Self {
        let deadline = Instant::now() + DEADLINE;
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "{}: {error}", path.display()),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut person = Self(stream);
        let greeting = person.read_reply();
        assert!(greeting.starts_with("Hotlift "), "{greeting}");
        person
    }

    /// Returns the output until the next prompt.
    fn read_reply(&mut self) -> String {
        let mut received = Vec::new();
        while !received.ends_with(PROMPT.as_bytes()) {
            let mut byte = [0];
            self.0.read_exact(&mut byte).unwrap_or_else(|error| {
                panic!("{error} after {}", String::from_utf8_lossy(&received))
            });
            received.extend(byte);
        }
        received.truncate(received.len() - PROMPT.len());
        String::from_utf8(received).unwrap().replace("\r\n", "\n")
    }

    /// Types a line, and returns its output.
    fn types(&mut self, line: &str) -> String {
        self.0.write_all(format!("{line}\n").as_bytes()).unwrap();
        self.read_reply()
    }

    /// Types lines that print nothing.
    fn types_all(&mut self, lines: &[&str]) {
        for line in lines {
            assert_eq!(self.types(line), "", "{line}");
        }
    }

    /// Repeats a line until its output contains `words`.
    fn types_until(&mut self, line: &str, words: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let answer = self.types(line);
            if answer.contains(words) {
                return answer;
            }
            assert!(
                !answer.contains("failed") && Instant::now() < deadline,
                "{line}: {answer}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Starts a guest with a monitor, and connects a user to it.
fn guest(dir: &Path, name: &str, flags: &[&str]) -> (Running, Person) {
    let path = dir.join(name);
    let mut args = vec![
        "guest",
        "run",
        "--guest=threads",
        "--ram=64M",
        "--rate=2000",
        "--quiet",
    ];
    args.extend(flags);
    args.extend(["--monitor", path.to_str().unwrap()]);
    let process = Hotlift::start(&args);
    let person = Person::at(&path);
    (process, person)
}

/// Output of `info migrate -a` at the end, of source and destination.
struct Printed {
    source: String,
    destination: String,
}

impl Printed {
    /// Returns the number after `label`, at the source.
    fn number(&self, label: &str) -> f64 {
        let line = self
            .source
            .lines()
            .find_map(|line| line.strip_prefix(label));
        let words = line.unwrap_or_else(|| panic!("no {label} in {}", self.source));
        words.split(' ').next().unwrap().parse().unwrap()
    }
}

/// Types `at_source` and `at_destination`, migrates, and checks that the guest runs there with all of its memory.
fn moves(at_source: &[&str], at_destination: &[&str]) -> Printed {
    let dir = tempfile::tempdir().unwrap();
    let (here, mut source) = guest(dir.path(), "source", &[]);
    let (there, mut destination) = guest(dir.path(), "destination", &["--incoming=defer"]);
    assert_eq!(
        destination.types("info status"),
        "VM status: paused (inmigrate)\n"
    );
    destination.types_all(at_destination);
    destination.types_all(&["migrate_incoming tcp:127.0.0.1:0"]);
    let info = destination.types("info migrate");
    let address = info
        .lines()
        .find_map(|line| line.strip_prefix("\ttcp:"))
        .unwrap_or_else(|| panic!("no address in {info}"));
    source.types_all(at_source);
    source.types_all(&[&format!("migrate -d tcp:{address}")]);
    source.types_until("info migrate", "Migration status: completed\n");
    destination.types_until("info migrate", "Migration status: completed\n");
    let printed = Printed {
        source: source.types("info migrate -a"),
        destination: destination.types("info migrate -a"),
    };
    assert_eq!(
        source.types("info status"),
        "VM status: paused (postmigrate)\n"
    );
    assert_eq!(destination.types("info status"), "VM status: running\n");
    for (mut person, process) in [(source, here), (destination, there)] {
        person.0.write_all(b"quit\n").unwrap();
        let (status, output) = process.wait();
        assert!(status.success(), "{output:?}");
        assert!(
            output
                .iter()
                .any(|line| line.ends_with("no write was lost")),
            "{output:?}"
        );
    }
    printed
}

#[test]
fn the_steps_of_the_multi_thread_document_migrate_a_guest() {
    let dir = tempfile::tempdir().unwrap();
    let (_process, mut source) = guest(dir.path(), "source", &[]);
    let capabilities = source.types("info migrate_capabilities");
    assert!(capabilities.contains("\ncompress: off\n"), "{capabilities}");
    let printed = moves(
        &[
            "migrate_set_capability compress on",
            "migrate_set_parameter compress_threads 12",
            "migrate_set_parameter compress_level 1",
        ],
        &["migrate_set_parameter decompress_threads 3"],
    );
    let first = printed.source.lines().next().unwrap_or_default();
    assert!(
        first.starts_with("Capabilities: ") && first.contains(" compress: on"),
        "{first}"
    );
    assert!(
        printed.number("compression pages: ") > 0.0,
        "{}",
        printed.source
    );
    assert!(
        printed.number("compression rate: ") > 1.0,
        "{}",
        printed.source
    );
    assert!(
        printed.number("compressed size: ") > 0.0,
        "{}",
        printed.source
    );
    for (text, thread, beyond) in [
        (&printed.source, "\"compress_11\"", "\"compress_12\""),
        (&printed.destination, "\"decompress_2\"", "\"decompress_3\""),
    ] {
        assert!(text.contains(thread) && !text.contains(beyond), "{text}");
    }
}

#[test]
fn the_steps_of_the_letters_on_qpl_and_qatzip_migrate_a_guest() {
    for (channels, method) in [("2", "qpl"), ("4", "qatzip"), ("2", "zstd"), ("2", "none")] {
        let channels_line = format!("migrate_set_parameter multifd-channels {channels}");
        let method_line = format!("migrate_set_parameter multifd-compression {method}");
        let printed = moves(
            &[
                "migrate_set_capability multifd on",
                &channels_line,
                "migrate_set_parameter downtime-limit 100",
                "migrate_set_parameter max-bandwidth 100G",
                &method_line,
                "migrate_set_parameter multifd-qatzip-level 1",
            ],
            &[
                "migrate_set_capability multifd on",
                &channels_line,
                &method_line,
            ],
        );
        assert!(
            printed.number("multifd bytes: ") > 0.0,
            "{}",
            printed.source
        );
        let smaller = printed.number("transferred ram: ") < printed.number("normal bytes: ");
        assert_eq!(smaller, method != "none", "{method}: {}", printed.source);
    }
}

#[test]
fn the_steps_of_the_dsa_documents_migrate_a_guest() {
    for steps in [
        &[
            "migrate_set_parameter zero-page-detection dsa-accel",
            "migrate_set_parameter accel-path dsa-model: dsa-model:",
        ][..],
        // Before the seventh version, the device alone selected DSA.
        &["migrate_set_parameter multifd-dsa-accel dsa-model:"][..],
    ] {
        let at_source = [
            &["migrate_set_capability multifd on"][..],
            steps,
            &[
                "migrate_set_parameter multifd-normal-page-ratio 50",
                "migrate_set_parameter multifd-packet-size 256K",
            ],
        ]
        .concat();
        let printed = moves(
            &at_source,
            &[
                "migrate_set_capability multifd on",
                "migrate_set_parameter multifd-packet-size 256K",
            ],
        );
        assert!(
            printed.source.contains("x-hotlift-zero-page-jobs"),
            "{}",
            printed.source
        );
    }
}

#[test]
fn a_foreground_migration_returns_to_the_prompt_and_a_failed_one_keeps_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let (process, mut source) = guest(dir.path(), "source", &[]);
    let answer = source.types("migrate tcp:127.0.0.1:1");
    assert!(answer.contains("Migration status: failed ("), "{answer}");
    assert_eq!(source.types("info status"), "VM status: running\n");
    source.types_all(&["stop"]);
    assert_eq!(source.types("info status"), "VM status: paused\n");
    source.types_all(&["c"]);
    assert_eq!(source.types("info status"), "VM status: running\n");
    source.0.write_all(b"q\n").unwrap();
    let (status, output) = process.wait();
    assert!(status.success(), "{output:?}");
}
