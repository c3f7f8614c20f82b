//! Files on a server read like local files, whatever happens to the connections.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::fs::{FileExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hotlift_net::transport::{Address, Stream};
use hotlift_testkit::pki::Pki;
use hotlift_testkit::proxy::{Ending, Proxy};
use hotlift_wire::file_ranges::{Answer, Open, READ_LEN, Read, Reply, VERSION};

use super::{folder, read, save};
use crate::control::Control;
use crate::ends::file::server::{ConnectionQuota, serve_some};
use crate::ends::file::{
    BlockFile, FileError, Location, RemoteFile, ServerEvent, describe, inspect,
};
use crate::error::file::ServerError;
use crate::error::{MigrationError, error_line};
use crate::lock::lock;
use crate::tls::Tls;

const LONG: Duration = Duration::from_secs(60);

/// A server of a folder, stopped on drop.
struct Serving {
    address: Address,
    control: Control,
    thread: Option<JoinHandle<()>>,
    output: Arc<Mutex<Vec<String>>>,
}

impl Serving {
    fn start(folder: &Path, at: &Address, tls: Option<Arc<Tls>>) -> Self {
        Self::with_places(folder, at, tls, (64, LONG))
    }

    /// Starts a server with the given number of places, and the given idle time until a place can be taken away.
    fn with_places(
        folder: &Path,
        at: &Address,
        tls: Option<Arc<Tls>>,
        (places, idle): (usize, Duration),
    ) -> Self {
        let listener = at.listen().unwrap();
        let address = listener.address().unwrap();
        let control = Control::new();
        let output = Arc::new(Mutex::new(Vec::new()));
        let (folder, ends, log) = (folder.to_owned(), control.clone(), Arc::clone(&output));
        let thread = thread::spawn(move || {
            let on_event = |event| {
                lock(&log).push(match event {
                    ServerEvent::Begun(visit) => format!("{} begins", visit.name),
                    ServerEvent::Ended(visit) => format!("{} ends: {}", visit.name, visit.bytes),
                    ServerEvent::Refused { reason, .. } => format!("refused: {reason}"),
                    event => format!("{event:?}"),
                });
            };
            let quota = ConnectionQuota {
                max_total: places,
                max_per_visitor: places,
                idle,
            };
            serve_some(&listener, tls, &folder, &ends, (&on_event, quota)).unwrap();
        });
        Self {
            address,
            control,
            thread: Some(thread),
            output,
        }
    }

    fn unix(folder: &Path) -> Self {
        let path = folder.join("socket");
        Self::start(folder, &Address::Unix { path }, None)
    }

    /// Returns a file on the server.
    fn file(&self, name: &str) -> RemoteFile {
        RemoteFile {
            address: self.address.clone(),
            name: name.to_owned(),
            tls: None,
        }
    }

    /// Stops the server, and returns its events.
    fn end(mut self) -> Vec<String> {
        self.join();
        lock(&self.output).clone()
    }

    fn join(&mut self) {
        self.control.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.join();
    }
}

fn open(file: &RemoteFile) -> Result<BlockFile, FileError> {
    BlockFile::open_at(&Location::Server(file.clone()), &Control::new())
}

/// Returns the error of opening a file.
fn refusal(file: &RemoteFile) -> FileError {
    match open(file) {
        Ok(_) => panic!("{file} is handed out"),
        Err(error) => error,
    }
}

/// Encodes the request to open file `vm`.
fn question() -> Vec<u8> {
    let mut bytes = Vec::new();
    let open = Open {
        version: VERSION,
        visitor: 1,
        name: "vm",
    };
    open.encode(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_file_reads_over_every_transport_as_from_the_disk() {
    let folder = folder();
    let expected = save(&folder.path().join("vm"), "zstd");
    let tcp = || "tcp:127.0.0.1:0".parse().unwrap();
    let socket = folder.path().join("s");
    for (at, tls) in [
        (Address::Unix { path: socket }, None),
        (tcp(), None),
        (tcp(), Some(Pki::new().tls("localhost"))),
    ] {
        let serving = Serving::start(folder.path(), &at, tls.clone());
        let mut remote = serving.file("vm");
        if let Address::Tcp { host, .. } = &mut remote.address {
            "localhost".clone_into(host);
        }
        remote.tls = tls;
        let location = Location::Server(remote.clone());
        let control = Control::new();
        let info = inspect(&location, &control).unwrap();
        assert_eq!(
            info.machine,
            inspect(&folder.path().join("vm"), &control)
                .unwrap()
                .machine
        );
        let here = describe(&folder.path().join("vm"), true, &control).unwrap();
        assert_eq!(describe(&location, true, &control).unwrap(), here);
        let file = open(&remote).unwrap();
        // Several threads read concurrently, each over its own connection.
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| assert_eq!(read(&file, 0).unwrap(), expected));
            }
        });
        drop(file);
        let output = serving.end();
        assert!(
            output.iter().all(|line| line.starts_with("vm ")),
            "{output:?}"
        );
        let count = |word: &str| output.iter().filter(|line| line.contains(word)).count();
        assert_eq!((count("begins"), count("ends")), (3, 3), "{output:?}");
    }
}

#[test]
fn only_save_files_directly_in_the_folder_are_served() {
    let outside = folder();
    save(&outside.path().join("vm"), "none");
    let folder = folder();
    let inside = |name: &str| folder.path().join(name);
    save(&inside("vm"), "none");
    let whole = fs::read(inside("vm")).unwrap();
    fs::write(inside("cut"), &whole[..whole.len() - 1]).unwrap();
    fs::write(inside("text"), "no save file, but long enough to be one").unwrap();
    fs::write(inside("empty"), "").unwrap();
    fs::copy(inside("vm"), inside(".hidden")).unwrap();
    fs::create_dir(inside("folder")).unwrap();
    fs::copy(inside("vm"), inside("folder").join("vm")).unwrap();
    symlink(outside.path().join("vm"), inside("link")).unwrap();
    symlink("vm", inside("inner")).unwrap();
    let made = Command::new("mkfifo").arg(inside("fifo")).status();
    assert!(made.unwrap().success());
    let serving = Serving::unix(folder.path());
    for name in [
        "..",
        ".",
        ".hidden",
        "folder",
        "folder/vm",
        "../vm",
        "link",
        "inner",
        "fifo",
        "none",
        "/vm",
        "socket",
        "v\0m",
    ] {
        let error = refusal(&serving.file(name));
        let is_refused =
            matches!(&error, FileError::Refused { reason, .. } if reason.contains("no save file"));
        assert!(is_refused, "{name}: {error}");
    }
    for (name, reason) in [
        ("cut", "cut short"),
        ("empty", "cut short"),
        ("text", "neither a save file"),
    ] {
        let error = refusal(&serving.file(name)).to_string();
        assert!(error.contains(reason), "{name}: {error}");
    }
    open(&serving.file("vm")).unwrap();
}

#[test]
fn unknown_clients_get_the_reason_and_take_no_slots_from_others() {
    let folder = folder();
    save(&folder.path().join("vm"), "none");
    let tls = Pki::new().tls("localhost");
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let serving = Serving::start(folder.path(), &at, Some(tls));
    // A client without TLS at a server with TLS.
    let error = error_line(&refusal(&serving.file("vm")));
    assert!(error.contains("accepts only TLS"), "{error}");
    // A client with another CA.
    let mut other = serving.file("vm");
    other.tls = Some(Pki::new().tls("localhost"));
    let error = error_line(&refusal(&other));
    assert!(error.contains("signed by a CA"), "{error}");
    drop(serving);

    let serving = Serving::unix(folder.path());
    let open_none = question();
    let mut newer = b"HLFO".to_vec();
    newer.extend_from_slice(&9_u32.to_be_bytes());
    let too_much = [&open_none[..], &[0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0, 0, 0]].concat();
    for words in [&b"GET / HTTP/1.1\r\n\r\n"[..], &newer, &too_much, b"HLFO"] {
        let stream = serving.address.connect(LONG).unwrap();
        stream.set_read_timeout(LONG).unwrap();
        (&stream).write_all(words).unwrap();
        if words.len() < 8 {
            stream.shutdown(Shutdown::Write);
        }
        let mut answer = Vec::new();
        // The connection may end with a reset, because not all sent bytes were read.
        let _ = (&stream).read_to_end(&mut answer);
        if words == newer {
            let (reply, _) = Reply::decode(&answer).unwrap();
            assert!(matches!(reply, Reply::Refused { text, .. } if text.contains("version")));
        }
    }
    open(&serving.file("vm")).unwrap();

    // A peer that is no file server.
    let socket = folder.path().join("other");
    let listener = UnixListener::bind(&socket).unwrap();
    let answering = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        (&stream).write_all(b"{\"QMP\": {}}\r\n").unwrap();
        // Stays until the client leaves: a write to a closed socket is another error.
        let _ = (&stream).read_to_end(&mut Vec::new());
    });
    let other = RemoteFile {
        address: Address::Unix { path: socket },
        ..serving.file("vm")
    };
    let error = error_line(&refusal(&other));
    assert!(error.contains("not 'hotlift serve --files'"), "{error}");
    answering.join().unwrap();
}

#[test]
fn a_lost_server_is_awaited_and_reading_continues_with_the_same_file() {
    let folder = folder();
    let expected = save(&folder.path().join("vm"), "zstd");
    let serving = Serving::unix(folder.path());
    let file = open(&serving.file("vm")).unwrap();
    file.persist(LONG);
    drop(serving);
    thread::scope(|scope| {
        let reading = scope.spawn(|| read(&file, 0));
        while !file.remote().unwrap().is_lost() {
            thread::yield_now();
        }
        let _serving = Serving::unix(folder.path());
        assert_eq!(reading.join().unwrap().unwrap(), expected);
        assert!(!file.remote().unwrap().is_lost());
    });
}

#[test]
fn connections_are_restored_wherever_they_are_cut() {
    let folder = folder();
    let expected = save(&folder.path().join("vm"), "zstd");
    let serving = Serving::unix(folder.path());
    let Address::Unix { path: behind } = &serving.address else {
        panic!("a UNIX socket");
    };
    let between = folder.path().join("between");
    let proxy = Proxy::unix(&between, behind).unwrap();
    let remote = RemoteFile {
        address: Address::Unix { path: between },
        ..serving.file("vm")
    };
    for after in [1, 3, 5, 700, 20_000] {
        let file = open(&remote).unwrap();
        file.persist(LONG);
        proxy.cut(Ending::Fin, after);
        assert_eq!(read(&file, 0).unwrap(), expected, "after {after} bytes");
    }
    // Without a retry timeout it is an error.
    let file = open(&remote).unwrap();
    proxy.cut(Ending::Fin, 1);
    let error = read(&file, 0).unwrap_err();
    assert!(
        matches!(error, MigrationError::File(FileError::Server { .. })),
        "{error}"
    );
}

#[test]
fn another_file_under_the_name_is_refused_after_the_connection_was_lost() {
    let folder = folder();
    save(&folder.path().join("vm"), "zstd");
    let serving = Serving::unix(folder.path());
    let file = open(&serving.file("vm")).unwrap();
    file.persist(LONG);
    // An open file keeps its content.
    save(&folder.path().join("vm"), "zstd");
    read(&file, 1).unwrap();
    drop(serving);
    let _serving = Serving::unix(folder.path());
    let error = read(&file, 0).unwrap_err();
    assert!(
        matches!(error, MigrationError::File(FileError::OtherFile { .. })),
        "{error}"
    );
}

#[test]
fn a_wait_for_a_server_ends_by_its_timeout_or_once_no_reader_is_left() {
    let folder = folder();
    save(&folder.path().join("vm"), "zstd");
    let serving = Serving::unix(folder.path());
    let [impatient, patient] = [Duration::from_millis(1), LONG].map(|timeout| {
        let file = open(&serving.file("vm")).unwrap();
        file.persist(timeout);
        file
    });
    drop(serving);
    let error = read(&impatient, 0).unwrap_err();
    let MigrationError::File(FileError::Lost { source, .. }) = error else {
        panic!("{error}");
    };
    assert!(matches!(*source, ServerError::Connect(_)), "{source}");
    thread::scope(|scope| {
        let reading = scope.spawn(|| read(&patient, 0));
        while !patient.remote().unwrap().is_lost() {
            thread::yield_now();
        }
        patient.remote().unwrap().cancel_reads();
        assert!(reading.join().unwrap().is_err());
    });
}

/// Returns a client that has opened file `vm` and reads nothing; `None` if the server had no place for it.
fn idle(at: &Address) -> Option<Stream> {
    let stream = at.connect(LONG).unwrap();
    stream.set_read_timeout(LONG).unwrap();
    (&stream).write_all(&question()).unwrap();
    let mut answer = [0; 21];
    (&stream).read_exact(&mut answer[..5]).ok()?;
    if answer[4] > 0 {
        return None;
    }
    (&stream).read_exact(&mut answer[5..]).unwrap();
    Some(stream)
}

#[test]
fn a_full_server_is_reported_and_existing_readers_wait_for_a_slot() {
    let folder = folder();
    let expected = save(&folder.path().join("vm"), "zstd");
    let path = folder.path().join("socket");
    let serving = Serving::with_places(
        folder.path(),
        &Address::Unix { path: path.clone() },
        None,
        (2, LONG),
    );
    let between = folder.path().join("between");
    let proxy = Proxy::unix(&between, &path).unwrap();
    let file = open(&RemoteFile {
        address: Address::Unix { path: between },
        ..serving.file("vm")
    });
    let file = file.unwrap();
    file.persist(LONG);
    let first = idle(&serving.address).unwrap();
    let error = error_line(&refusal(&serving.file("vm")));
    assert!(error.contains("too many clients"), "{error}");
    // The reader loses its connection, and another client takes the place.
    proxy.cut(Ending::Fin, 0);
    let second = loop {
        if let Some(second) = idle(&serving.address) {
            break second;
        }
        thread::yield_now();
    };
    thread::scope(|scope| {
        let reading = scope.spawn(|| read(&file, 0));
        while !file.remote().unwrap().is_lost() {
            thread::yield_now();
        }
        drop(second);
        assert_eq!(reading.join().unwrap().unwrap(), expected);
    });
    drop(first);
}

#[test]
fn an_unused_slot_goes_to_a_new_client_and_its_reader_gets_another() {
    let folder = folder();
    let expected = save(&folder.path().join("vm"), "zstd");
    let at = Address::Unix {
        path: folder.path().join("socket"),
    };
    let serving = Serving::with_places(folder.path(), &at, None, (1, Duration::ZERO));
    // Before `persist` reads do not wait for a server: its loss is an immediate error.
    let file = open(&serving.file("vm")).unwrap();
    let _others = [(); 2].map(|()| {
        loop {
            if let Some(other) = idle(&serving.address) {
                break other;
            }
            // The place is still in use for an answer.
            thread::yield_now();
        }
    });
    file.persist(LONG);
    assert_eq!(read(&file, 0).unwrap(), expected);
}

/// Runs a server at `socket` for one connection, on which file `vm` is open; `answer` answers each read.
fn one_connection(
    socket: &Path,
    mut answer: impl FnMut(&UnixStream, Read, Vec<u8>) -> io::Result<()> + Send + 'static,
) -> JoinHandle<()> {
    let file = fs::File::open(socket.with_file_name("vm")).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut vec![0; question().len()]).unwrap();
        let opened = Reply::Opened {
            length: file.metadata().unwrap().len(),
            id: 1,
        };
        let mut bytes = Vec::new();
        opened.encode(&mut bytes);
        stream.write_all(&bytes).unwrap();
        let mut request = [0; READ_LEN];
        while stream.read_exact(&mut request).is_ok() {
            let read = Read::decode(&request).unwrap();
            let mut content = vec![0; read.length];
            let got = file.read_at(&mut content, read.position).unwrap();
            content.truncate(got);
            if answer(&stream, read, content).is_err() {
                return;
            }
        }
    })
}

/// Returns file `vm` at the server of `one_connection`.
fn at(socket: &Path) -> RemoteFile {
    RemoteFile {
        address: Address::Unix {
            path: socket.to_owned(),
        },
        name: "vm".to_owned(),
        tls: None,
    }
}

fn answer(mut stream: &UnixStream, content: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::new();
    Answer::Bytes(content.len()).encode(&mut bytes).unwrap();
    bytes.extend_from_slice(content);
    stream.write_all(&bytes)
}

#[test]
fn a_part_that_a_server_temporarily_cannot_read_is_requested_again() {
    let folder = folder();
    let expected = save(&folder.path().join("vm"), "zstd");
    let socket = folder.path().join("socket");
    let mut reads = 0;
    let serving = one_connection(&socket, move |mut stream, _, content| {
        reads += 1;
        // The first reads belong to the opening of the file, which has no retry timeout yet.
        if reads < 8 || reads % 2 > 0 {
            return answer(stream, &content);
        }
        let mut bytes = Vec::new();
        let failed = Answer::Failed("Input/output error (os error 5)");
        failed.encode(&mut bytes).unwrap();
        stream.write_all(&bytes)
    });
    let file = open(&at(&socket)).unwrap();
    file.persist(LONG);
    assert_eq!(read(&file, 0).unwrap(), expected);
    drop(file);
    serving.join().unwrap();
}

/// Returns true if a read from a silent server was cancelled.
fn is_cancelled(error: &FileError) -> bool {
    let FileError::Server { source, .. } = error else {
        return false;
    };
    matches!(&**source, ServerError::Connection(error) if error.kind() == io::ErrorKind::Interrupted)
}

#[test]
fn a_cancel_ends_reads_from_a_silent_server() {
    let folder = folder();
    save(&folder.path().join("vm"), "zstd");
    let socket = folder.path().join("socket");
    let (asked, is_asked) = channel();
    let serving = one_connection(&socket, move |_, _, _| {
        asked.send(()).map_err(io::Error::other)
    });
    let control = Control::new();
    thread::scope(|scope| {
        let opening = scope.spawn(|| inspect(Location::Server(at(&socket)), &control));
        is_asked.recv().unwrap();
        control.cancel();
        let error = opening.join().unwrap().unwrap_err();
        assert!(is_cancelled(&error), "{error:?}");
    });
    serving.join().unwrap();
}

#[test]
fn a_connection_attempt_ends_once_no_reader_is_left() {
    let folder = folder();
    save(&folder.path().join("vm"), "zstd");
    let serving = Serving::unix(folder.path());
    let file = open(&serving.file("vm")).unwrap();
    file.persist(LONG);
    drop(serving);
    let silent = UnixListener::bind(folder.path().join("socket")).unwrap();
    thread::scope(|scope| {
        let reading = scope.spawn(|| read(&file, 0));
        let (mut stream, _) = silent.accept().unwrap();
        stream.read_exact(&mut vec![0; question().len()]).unwrap();
        file.remote().unwrap().cancel_reads();
        let MigrationError::File(error) = reading.join().unwrap().unwrap_err() else {
            panic!("another error");
        };
        assert!(is_cancelled(&error), "{error:?}");
    });
}
