//! Tests the access control of a monitor socket, and the limits of what a client can do to a migration.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use serde_json::json;

use crate::hotlift::{Hotlift, errors};
use crate::machine::{Machine, Program};

#[test]
fn a_socket_is_private_to_its_owner_by_default_and_removed_with_the_process() {
    for (flags, mode) in [(&[][..], 0o600), (&["--control-mode=660"][..], 0o660)] {
        let mut machine = Machine::start(Program::Hotlift, flags);
        let socket = machine.folder.path().join("qmp");
        let found = std::fs::metadata(&socket).unwrap().permissions().mode();
        assert_eq!(found & 0o777, mode);
        machine.execute("quit", &json!({}));
        assert_eq!(machine.wait_end(), Some(0));
        assert!(!socket.exists());
    }
}

#[test]
fn a_stale_socket_is_replaced_and_one_in_use_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let flag = format!("--qmp={}", path.display());
    let args = ["guest", "run", "--guest=threads", "--ram=16M", &flag];
    drop(UnixListener::bind(&path).unwrap());
    let mut first = Hotlift::start(&args);
    first.wait_for("pages with data");
    let (status, output) = {
        // The server may not listen yet.
        let start = std::time::Instant::now();
        while UnixStream::connect(&path).is_err() {
            assert!(
                start.elapsed() < crate::machine::DEADLINE,
                "no process listens"
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Hotlift::start(&args).wait()
    };
    assert_eq!(status.code(), Some(1));
    assert!(errors(&output)[0].contains("cannot serve"), "{output:?}");
}

#[test]
fn other_hosts_are_admitted_only_with_two_options() {
    let args = [
        "guest",
        "run",
        "--guest=threads",
        "--ram=16M",
        "--qmp=tcp:0.0.0.0:0",
    ];
    let (status, output) = Hotlift::start(&args).wait();
    assert_eq!(status.code(), Some(1));
    let line = errors(&output)[0];
    assert!(line.contains("--control-from-other-hosts"), "{line}");
    let twice = [&args[..], &["--control-from-other-hosts", "--run-for=0"]].concat();
    let (status, output) = Hotlift::start(&twice).wait();
    assert!(status.success(), "{output:?}");
}

#[test]
fn hostile_clients_do_not_affect_a_migration() {
    let mut source = Machine::start(Program::Hotlift, &[]);
    let mut destination = Machine::waiting(Program::Hotlift);
    let uri = destination.listen();
    source.execute(
        "migrate-set-parameters",
        &json!({ "max-bandwidth": 10_000 }),
    );
    source.execute("migrate", &json!({ "uri": uri }));
    source.reaches("active");
    let path = source.folder.path().join("qmp");
    let mut crowd = Vec::new();
    for kind in 0..300 {
        let mut client = UnixStream::connect(&path).unwrap();
        let text: &[u8] = match kind % 4 {
            0 => b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"query-qmp-schema\"}",
            1 => &[b'['; 5000],
            2 => b"{\"execute\":\"migrate_cancel\"}\xc3",
            _ => &[b'"'; 1],
        };
        // A refused connection is closed by now.
        let _ = client.write_all(text);
        crowd.push(client);
    }
    let mut flood = UnixStream::connect(&path).unwrap();
    let megabyte = vec![b'0'; 1 << 20];
    let taken = (0..100).take_while(|_| flood.write_all(&megabyte).is_ok());
    assert!(taken.count() < 100);
    assert_eq!(source.status(), "active");
    source.execute("migrate-set-parameters", &json!({ "max-bandwidth": 0 }));
    source.reaches("completed");
    destination.reaches("completed");
    // It checks its guest's memory at its end.
    destination.execute("quit", &json!({}));
    assert_eq!(destination.wait_end(), Some(0));
}

/// Returns a loopback address with a free port.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// Returns the data from a connection until it closes, or until `end` arrives.
fn read_until(stream: &TcpStream, end: &str) -> String {
    let mut stream = stream;
    stream
        .set_read_timeout(Some(crate::machine::DEADLINE))
        .unwrap();
    let (mut output, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(length) => output.extend_from_slice(&chunk[..length]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => panic!("{error}"),
        }
        if !end.is_empty() && String::from_utf8_lossy(&output).contains(end) {
            break;
        }
    }
    String::from_utf8_lossy(&output).into_owned()
}

#[test]
fn a_web_page_that_posts_to_a_monitor_on_tcp_is_not_obeyed() {
    let (qmp, hmp) = (free_address(), free_address());
    let flags = [format!("--qmp=tcp:{qmp}"), format!("--monitor=tcp:{hmp}")];
    let mut args = vec!["guest", "run", "--guest=threads", "--ram=16M"];
    args.extend(flags.iter().map(String::as_str));
    let mut guest = Hotlift::start(&args);
    guest.wait_for("pages with data");
    for (address, body, greeting) in [
        (
            qmp,
            "{\"execute\":\"qmp_capabilities\"}\r\n{\"execute\":\"quit\"}\r\n",
            "QMP",
        ),
        (hmp, "\r\nquit\r\n", "monitor"),
    ] {
        let start = std::time::Instant::now();
        let mut page = loop {
            match TcpStream::connect(address) {
                Ok(stream) => break stream,
                // It may not listen yet.
                Err(error) => assert!(start.elapsed() < crate::machine::DEADLINE, "{error}"),
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        let post = format!(
            "POST / HTTP/1.1\r\nHost: {address}\r\nContent-Type: text/plain\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        // It may have closed before all was written.
        let _ = page.write_all(post.as_bytes());
        read_until(&page, "");
        guest.wait_for("HTTP");
        // It still serves its clients.
        let client = TcpStream::connect(address).unwrap();
        assert!(read_until(&client, greeting).contains(greeting));
    }
    let mut client = TcpStream::connect(hmp).unwrap();
    client.write_all(b"quit\n").unwrap();
    let (status, output) = guest.wait();
    assert_eq!(status.code(), Some(0), "{output:?}");
}
