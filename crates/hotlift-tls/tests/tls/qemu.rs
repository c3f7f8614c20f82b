//! Tests QEMU's own TLS (GnuTLS) as the peer, with certificates that Hotlift created.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_qmp::Qemu;
use hotlift_testkit::qemu::{Launched, PATIENCE, Release};
use hotlift_tls::{Profile, RecordError, Session, Settings, Slices};
use serde_json::json;

use crate::support::{Pki, allow, failure, tls};

/// Returns the installed releases; the others are skipped.
fn releases() -> impl Iterator<Item = std::path::PathBuf> {
    [Release::V7, Release::V10]
        .into_iter()
        .filter_map(Release::program)
}

/// Starts a QEMU with certificates for its side of a connection, `server` or `client`.
fn start(program: &Path, certificates: &Path, side: &str) -> (Launched, Qemu) {
    let certificates = certificates.display();
    let object = format!("tls-creds-x509,id=tls0,dir={certificates},endpoint={side}");
    let mut arguments = vec!["-machine", "pc,accel=tcg", "-m", "32", "-vga", "none", "-S"];
    arguments.extend(["-object", &object]);
    if side == "server" {
        arguments.extend(["-incoming", "defer"]);
    }
    let qemu = Launched::bare(program, &arguments).unwrap();
    let mut qmp = qemu.connect().unwrap();
    qmp.set_parameters(&json!({ "tls-creds": "tls0" })).unwrap();
    (qemu, qmp)
}

fn of_qemu() -> Settings {
    Settings::new(Profile::Qemu)
}

/// Reads all data of the other side; returns it with the kind of its end.
fn read_all(session: &mut Session, socket: &mut UnixStream) -> (Vec<u8>, Result<(), RecordError>) {
    let mut all = Vec::new();
    loop {
        match session.opener.plaintext(socket) {
            Ok([]) => return (all, Ok(())),
            Ok(plaintext) => {
                all.extend_from_slice(plaintext);
                let n = plaintext.len();
                session.opener.consume(n);
            }
            Err(error) => return (all, Err(error)),
        }
    }
}

/// Waits for the end of the migration of `qmp`, and returns its state.
fn outcome(qmp: &mut Qemu) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let info = qmp.query_migrate().unwrap();
        if info.is_completed() || info.has_failed() {
            return info.status().to_owned();
        }
        assert!(
            Instant::now() < deadline,
            "still in state {}",
            info.status()
        );
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_waiting_qemu_takes_a_client_with_a_certificate() {
    let pki = Pki::new("CA");
    for program in releases() {
        let (qemu, mut qmp) = start(&program, &pki.host(&["b"]), "server");
        let path = qemu.path("migration");
        qmp.migrate_incoming(&format!("unix:{}", path.display()), true)
            .unwrap();
        let client = tls(&pki.host(&["a"]), of_qemu());
        // First a name that the certificate lacks, then one that it has: QEMU accepts again.
        let socket = UnixStream::connect(&path).unwrap();
        let output = failure(client.connect(&socket, Some("c")));
        assert!(output.contains("is not for 'c' but for b"), "{output}");
        drop(socket);
        let mut socket = UnixStream::connect(&path).unwrap();
        let mut session = client.connect(&socket, Some("b")).unwrap();
        assert_eq!(session.peer.as_ref().unwrap().dns, ["b"]);
        let no_stream = [[0x55; 64]];
        session
            .sealer
            .send(&mut socket, &mut Slices::new(&no_stream))
            .unwrap();
        let (received, end) = read_all(&mut session, &mut socket);
        assert!(received.is_empty() && end.is_err(), "{received:?}, {end:?}");
    }
}

#[test]
fn a_migrating_qemu_takes_a_server_with_a_certificate_for_its_name() {
    let pki = Pki::new("CA");
    let (ours, theirs) = (pki.host(&["b"]), pki.host(&["a"]));
    for program in releases() {
        let (qemu, mut qmp) = start(&program, &theirs, "client");
        let path = qemu.path("migration");
        let listener = UnixListener::bind(&path).unwrap();
        let uri = format!("unix:{}", path.display());

        qmp.set_parameters(&json!({ "tls-hostname": "b" })).unwrap();
        let strict = Settings {
            profile: Profile::Qemu,
            ..allow(&["c"])
        };
        qmp.migrate(&uri).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let output = failure(tls(&ours, strict).accept(&socket));
        assert!(
            output.contains("(CN=a: a) is not on the list of allowed names"),
            "{output}"
        );
        drop(socket);
        assert_eq!(outcome(&mut qmp), "failed");

        let server = tls(&ours, of_qemu());
        qmp.set_parameters(&json!({ "tls-hostname": "c" })).unwrap();
        qmp.migrate(&uri).unwrap();
        let (mut socket, _) = listener.accept().unwrap();
        let mut session = server.accept(&socket).unwrap();
        let (received, end) = read_all(&mut session, &mut socket);
        assert!(
            received.is_empty() && end.is_err(),
            "it checks the name after the handshake"
        );
        drop(socket);
        assert_eq!(outcome(&mut qmp), "failed");

        qmp.set_parameters(&json!({ "tls-hostname": "b" })).unwrap();
        qmp.migrate(&uri).unwrap();
        let (mut socket, _) = listener.accept().unwrap();
        let mut session = server.accept(&socket).unwrap();
        assert_eq!(session.peer.as_ref().unwrap().dns, ["a"]);
        let (received, end) = read_all(&mut session, &mut socket);
        assert!(
            received.starts_with(b"QEVM\0\0\0\x03"),
            "{} bytes",
            received.len()
        );
        // QEMU ends its main channel like this; the stream itself shows if it is complete.
        assert!(matches!(end, Err(RecordError::Truncated)), "{end:?}");
        assert_eq!(outcome(&mut qmp), "completed");
    }
}
