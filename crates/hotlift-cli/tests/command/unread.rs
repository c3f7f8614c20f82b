//! Tests that a command continues its work if the reader of its output closes the pipe or stops reading.

use std::fs::File;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::pipe::pipe;
use tempfile::TempDir;

use crate::hotlift::Hotlift;

/// Far above the duration of a command here on a busy machine.
const DEADLINE: Duration = Duration::from_secs(90);

/// State of the reader of a command's output.
#[derive(Debug, Clone, Copy)]
enum Reader {
    /// The other end of the pipe is closed.
    Gone,
    /// The pipe is full and not read.
    Asleep,
    /// The disk is full.
    Full,
}

impl Reader {
    /// Returns both streams of a command, and the file that keeps them in this state.
    fn streams(self) -> (Stdio, Stdio, Option<File>) {
        if let Self::Full = self {
            let full = || {
                File::options()
                    .write(true)
                    .open("/dev/full")
                    .expect("it is there")
            };
            return (full().into(), full().into(), None);
        }
        let (reader, writer) = pipe().expect("a pipe");
        if let Self::Asleep = self {
            fcntl_setfl(&writer, OFlags::NONBLOCK).expect("it is a pipe");
            while rustix::io::write(&writer, &[b'x'; 4096]).is_ok() {}
            fcntl_setfl(&writer, OFlags::empty()).expect("it is a pipe");
        }
        let reader = matches!(self, Self::Asleep).then(|| File::from(reader));
        let other = writer.try_clone().expect("a second descriptor");
        (writer.into(), other.into(), reader)
    }
}

const READERS: [Reader; 3] = [Reader::Gone, Reader::Asleep, Reader::Full];

/// Command with its output to `reader`; killed on drop.
struct Unread {
    child: Child,
    _reader: Option<File>,
}

impl Unread {
    fn start(args: &[&str], reader: Reader) -> Self {
        let (stdout, stderr, keeps) = reader.streams();
        let child = Command::new(env!("CARGO_BIN_EXE_hotlift"))
            .args(args)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .expect("hotlift starts");
        Self {
            child,
            _reader: keeps,
        }
    }

    fn wait(mut self, what: &str) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it was started") {
                return status;
            }
            assert!(start.elapsed() < DEADLINE, "{what} does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_result_for_a_closed_standard_output_is_a_failure() {
    for command in ["advise", "methods", "--version", "demo --help"] {
        let line = format!("exec \"$0\" {command} >&-");
        let ran = Command::new("sh")
            .args(["-c", &line, env!("CARGO_BIN_EXE_hotlift")])
            .output()
            .expect("a shell");
        let output = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(1), "{command}: {output}");
        assert!(
            output.contains("hotlift: cannot write the result: Bad file descriptor"),
            "{command}: {output}"
        );
    }
    // Discarded output is the operator's choice.
    let ran = Command::new(env!("CARGO_BIN_EXE_hotlift"))
        .arg("advise")
        .stdout(
            File::options()
                .read(true)
                .write(true)
                .open("/dev/null")
                .expect("it is there"),
        )
        .status()
        .expect("hotlift starts");
    assert!(ran.success());
}

fn socket() -> (TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let uri = format!("unix:{}", folder.path().join("s").display());
    (folder, uri)
}

#[test]
fn a_source_whose_output_is_not_read_moves_its_guest() {
    for reader in READERS {
        let (_folder, uri) = socket();
        let incoming = format!("--incoming={uri}");
        let mut destination =
            Hotlift::start(&["guest", "run", "--ram=32M", "--run-for=0", &incoming]);
        destination.wait_for("waiting for a source");
        let to = format!("--migrate-to={uri}");
        let source = ["guest", "run", "--ram=32M", "--max-bandwidth=0", &to];
        let status = Unread::start(&source, reader).wait(&format!("{reader:?}: the source"));
        assert_eq!(status.code(), Some(0), "{reader:?}");
        let (status, output) = destination.wait();
        assert!(status.success(), "{reader:?}: {}", output.join("\n"));
    }
}

#[test]
fn a_destination_whose_output_is_not_read_gets_its_guest() {
    for reader in READERS {
        let (folder, uri) = socket();
        let incoming = format!("--incoming={uri}");
        let arguments = ["guest", "run", "--ram=32M", "--run-for=0", &incoming];
        let destination = Unread::start(&arguments, reader);
        let start = Instant::now();
        while !folder.path().join("s").exists() {
            assert!(start.elapsed() < DEADLINE, "{reader:?}: it does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        let to = format!("--migrate-to={uri}");
        let source = ["guest", "run", "--ram=32M", "--max-bandwidth=0", &to];
        let (status, output) = Hotlift::start(&source).wait();
        assert!(status.success(), "{reader:?}: {}", output.join("\n"));
        let status = destination.wait(&format!("{reader:?}: the destination"));
        assert_eq!(status.code(), Some(0), "{reader:?}");
    }
}

#[test]
fn a_result_that_cannot_be_written_is_an_error_and_no_panic() {
    for reader in READERS {
        for arguments in [
            &["methods"][..],
            &["demo", "--ram=16M", "--method=none", "--quiet"],
        ] {
            let what = format!("{reader:?}: {arguments:?}");
            let status = Unread::start(arguments, reader).wait(&what);
            assert_eq!(status.code(), Some(1), "{what}");
        }
    }
}
