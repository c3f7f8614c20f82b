//! Tests OpenSSL as the peer: `openssl s_client` and `openssl s_server` (Debian's package `openssl`).

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use hotlift_tls::{Profile, Session, Settings, Slices, TlsError};

use crate::support::{Pki, failure, hotlift, tls};

/// Returns true if there is no OpenSSL, and records that.
fn is_missing() -> bool {
    let is_there = Command::new("openssl").arg("version").output().is_ok();
    if !is_there {
        hotlift_testkit::skip!("openssl", "no command 'openssl'");
    }
    !is_there
}

/// An `openssl` process, ended on drop, with its output so far.
struct OpenSsl(Child, String);

impl OpenSsl {
    fn start(arguments: &[&str], dir: &Path, role: &str) -> Self {
        let file = |name: String| dir.join(name).to_str().unwrap().to_owned();
        let child = Command::new("openssl")
            .args(arguments)
            .args(["-cert", &file(format!("{role}-cert.pem"))])
            .args(["-key", &file(format!("{role}-key.pem"))])
            .args(["-CAfile", &file("ca-cert.pem".to_owned())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child, String::new())
    }

    fn send(&mut self, text: &str) {
        self.0
            .stdin
            .as_mut()
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
    }

    /// Sends it a command, which must be a read of its own, and waits for `words` on its standard error.
    fn command(&mut self, letter: &str, words: &str) {
        self.send(letter);
        wait_for(words, self.0.stderr.as_mut().unwrap(), &mut self.1);
        self.1.clear();
    }

    /// Waits for `words` on its standard output.
    fn wait_for(&mut self, words: &str) {
        wait_for(words, self.0.stdout.as_mut().unwrap(), &mut self.1);
    }

    /// Reads its output to the end. The end of its input would end the process early.
    fn rest(mut self) -> String {
        let mut output = std::mem::take(&mut self.1);
        let out = self.0.stdout.as_mut().unwrap();
        out.read_to_string(&mut output).unwrap();
        let errors = self.0.stderr.as_mut().unwrap();
        errors.read_to_string(&mut output).unwrap();
        output
    }
}

/// Reads `from` until `words` appear, and appends it to `output`.
fn wait_for(words: &str, from: &mut impl Read, output: &mut String) {
    while !output.contains(words) {
        let mut byte = [0];
        from.read_exact(&mut byte).unwrap();
        output.push(byte[0].into());
    }
}

impl Drop for OpenSsl {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns our server's result with an `openssl s_client` with these arguments, and its output; `talk` uses the session.
fn s_client(
    arguments: &[&str],
    settings: Settings,
    talk: impl FnOnce(Session, TcpStream, &mut OpenSsl),
) -> (Option<TlsError>, String) {
    let pki = Pki::new("CA");
    let (ours, theirs) = (pki.host(&["b"]), pki.host(&["a"]));
    let server = tls(&ours, settings);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let all = [
        &[
            "s_client",
            "-connect",
            &address,
            "-verify_hostname",
            "b",
            "-verify_return_error",
            // Its blocking read would wait after the empty record that confirms the client.
            "-nbio",
        ][..],
        arguments,
    ];
    let mut openssl = OpenSsl::start(&all.concat(), &theirs, "client");
    let (socket, _) = listener.accept().unwrap();
    let error = match server.accept(&socket) {
        Ok(session) => {
            talk(session, socket, &mut openssl);
            None
        }
        Err(error) => {
            drop(socket);
            Some(error)
        }
    };
    (error, openssl.rest())
}

fn line_of(session: &mut Session, socket: &mut TcpStream) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        session.opener.read_exact(socket, &mut byte).unwrap();
        line.extend(byte);
    }
    String::from_utf8(line).unwrap()
}

#[test]
fn a_client_of_openssl_works_with_each_cipher_and_sees_the_close() {
    if is_missing() {
        return;
    }
    for cipher in [
        "TLS_AES_128_GCM_SHA256",
        "TLS_AES_256_GCM_SHA384",
        "TLS_CHACHA20_POLY1305_SHA256",
    ] {
        let arguments = ["-alpn", "hotlift/1", "-ciphersuites", cipher];
        let (error, output) =
            s_client(&arguments, hotlift(), |mut session, mut socket, openssl| {
                assert_eq!(session.peer.as_ref().unwrap().dns, ["a"]);
                openssl.send("a line\n");
                assert_eq!(line_of(&mut session, &mut socket), "a line\n");
                // More than a record.
                let text = "0123456789".repeat(5000);
                session
                    .sealer
                    .send(&mut socket, &mut Slices::new(&[&text, "the end\n"]))
                    .unwrap();
                session.sealer.close(&mut socket).unwrap();
            });
        assert!(error.is_none(), "{error:?}: {output}");
        assert!(output.contains(&"0123456789".repeat(5000)), "{output}");
        assert!(output.contains("the end"), "{output}");
        for words in [
            cipher,
            "TLSv1.3",
            "ALPN protocol: hotlift/1",
            "Verification: OK",
            "Verified peername: b",
        ] {
            assert!(output.contains(words), "{words}: {output}");
        }
    }
}

#[test]
fn there_are_no_tickets_and_no_early_data() {
    if is_missing() {
        return;
    }
    let (error, output) = s_client(
        &["-alpn", "hotlift/1"],
        hotlift(),
        |mut session, mut socket, _| {
            session.sealer.close(&mut socket).unwrap();
        },
    );
    assert!(error.is_none(), "{error:?}: {output}");
    assert!(
        !output.contains("New Session Ticket") && !output.contains("TLS session ticket:"),
        "{output}"
    );
    assert!(output.contains("Early data was not sent"), "{output}");
    assert!(output.contains("New, TLSv1.3"), "{output}");
}

#[test]
fn older_versions_and_clients_without_certificate_are_refused() {
    if is_missing() {
        return;
    }
    for version in ["-tls1_2", "-tls1_1"] {
        // By default OpenSSL does not use the old versions any more.
        let arguments = [version, "-alpn", "hotlift/1", "-cipher", "ALL:@SECLEVEL=0"];
        let (error, output) = s_client(&arguments, hotlift(), |_, _, _| {});
        assert!(
            matches!(error, Some(TlsError::Version)),
            "{error:?}: {output}"
        );
        assert!(
            version == "-tls1_1" || output.contains("protocol version"),
            "{output}"
        );
    }
    let pki = Pki::new("CA");
    let server = tls(&pki.host(&["b"]), hotlift());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let child = Command::new("openssl")
        .args(["s_client", "-connect", &address, "-alpn", "hotlift/1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (socket, _) = listener.accept().unwrap();
    let output = failure(server.accept(&socket));
    assert!(
        output.starts_with("the other side sent no certificate"),
        "{output}"
    );
    drop(socket);
    let output = OpenSsl(child, String::new()).rest();
    assert!(output.contains("certificate required"), "{output}");
}

#[test]
fn another_protocol_is_refused() {
    if is_missing() {
        return;
    }
    for arguments in [&["-alpn", "h2"][..], &[]] {
        let (error, output) = s_client(arguments, hotlift(), |_, _, _| {});
        assert!(
            matches!(error, Some(TlsError::OtherProtocol { .. })),
            "{error:?}: {output}"
        );
        assert!(output.contains("no application protocol"), "{output}");
    }
}

#[test]
fn key_updates_and_update_requests_of_openssl_are_followed() {
    if is_missing() {
        return;
    }
    let (error, output) = s_client(
        &["-alpn", "hotlift/1", "-msg"],
        hotlift(),
        |mut session, mut socket, openssl| {
            openssl.send("one\n");
            assert_eq!(line_of(&mut session, &mut socket), "one\n");
            // Commands of s_client: a KeyUpdate, and one that requests ours.
            for (command, word) in [("k\n", "two\n"), ("K\n", "three\n")] {
                openssl.command(command, "KEYUPDATE");
                openssl.send(word);
                assert_eq!(line_of(&mut session, &mut socket), word);
            }
            session
                .sealer
                .send(&mut socket, &mut Slices::new(&["under new keys\n"]))
                .unwrap();
            session.sealer.close(&mut socket).unwrap();
        },
    );
    assert!(error.is_none(), "{error:?}: {output}");
    assert!(output.contains("under new keys"), "{output}");
    let received = output
        .lines()
        .filter(|line| line.starts_with("<<<") && line.contains("KeyUpdate"));
    assert_eq!(received.count(), 1, "{output}");
}

/// Starts an `openssl s_server` with these arguments, and returns it with its address.
fn s_server(arguments: &[&str], dir: &Path) -> (OpenSsl, String) {
    let all = [
        &[
            "s_server",
            "-accept",
            "127.0.0.1:0",
            "-Verify",
            "1",
            "-verify_return_error",
        ][..],
        arguments,
    ];
    let mut openssl = OpenSsl::start(&all.concat(), dir, "server");
    openssl.wait_for("ACCEPT ");
    openssl.1.clear();
    openssl.wait_for("\n");
    let address = std::mem::take(&mut openssl.1).trim().to_owned();
    (openssl, address)
}

#[test]
fn a_server_of_openssl_works_and_its_tickets_are_ignored() {
    if is_missing() {
        return;
    }
    let pki = Pki::new("CA");
    let (mut openssl, address) = s_server(&[], &pki.host(&["b", "127.0.0.1"]));
    let client = tls(&pki.host(&["a"]), Settings::new(Profile::Qemu));
    let mut socket = TcpStream::connect(&address).unwrap();
    let mut session = client.connect(&socket, Some("127.0.0.1")).unwrap();
    // Its tickets come first.
    openssl.send("from openssl\n");
    assert_eq!(line_of(&mut session, &mut socket), "from openssl\n");
    session
        .sealer
        .send(&mut socket, &mut Slices::new(&["from hotlift\n"]))
        .unwrap();
    openssl.wait_for("from hotlift");
    session.sealer.close(&mut socket).unwrap();
}

#[test]
fn a_server_with_older_versions_only_is_refused() {
    if is_missing() {
        return;
    }
    let pki = Pki::new("CA");
    let (openssl, address) = s_server(&["-tls1_2"], &pki.host(&["b"]));
    let client = tls(&pki.host(&["a"]), Settings::new(Profile::Qemu));
    let socket = TcpStream::connect(&address).unwrap();
    let output = failure(client.connect(&socket, Some("b")));
    assert!(output.contains("does not support TLS 1.3"), "{output}");
    drop(openssl);
}

#[test]
fn renegotiation_does_not_exist() {
    if is_missing() {
        return;
    }
    let (_, output) = s_client(
        &["-alpn", "hotlift/1"],
        hotlift(),
        |mut session, mut socket, openssl| {
            openssl.command("R\n", "RENEGOTIATING");
            openssl.send("Q\n");
            // It cannot, and closes.
            let end = session.opener.plaintext(&mut socket);
            assert!(end.is_ok_and(<[u8]>::is_empty));
        },
    );
    assert!(output.contains("wrong ssl version"), "{output}");
}
