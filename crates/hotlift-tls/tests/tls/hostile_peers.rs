//! Tests peers without TLS or with faulty TLS. Each peer can use only a limited time and a limited number of bytes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_tls::{HANDSHAKE_BYTES, Session, Settings, Tls, TlsError};

use crate::support::{Pki, hotlift, tls};

/// Returns a server's result with a peer that does `what`.
fn accept(settings: Settings, what: impl FnOnce(UnixStream) + Send) -> Result<Session, TlsError> {
    let pki = Pki::new("CA");
    let server = tls(&pki.host(&["b"]), settings);
    let (stranger, socket) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || what(stranger));
        let outcome = server.accept(&socket);
        // The peer may wait for the close.
        drop(socket);
        outcome
    })
}

fn short_timeouts() -> Settings {
    Settings {
        handshake_timeout: Duration::from_millis(200),
        ..hotlift()
    }
}

/// Waits until the other side has closed, without a limit.
fn read_to_end(mut socket: UnixStream) {
    let _ = socket.read_to_end(&mut Vec::new());
}

#[test]
fn a_handshake_with_a_silent_peer_times_out() {
    let error = accept(short_timeouts(), read_to_end).unwrap_err();
    assert!(matches!(error, TlsError::TimedOut { .. }), "{error:?}");
    assert!(error.to_string().contains("sent nothing"), "{error}");
}

#[test]
fn a_handshake_with_a_peer_that_sends_single_bytes_times_out() {
    let begun = Instant::now();
    let outcome = accept(short_timeouts(), move |mut socket| {
        // The header of a record of 512 bytes, followed by endless bytes.
        let mut bytes = [0x16, 3, 1, 2, 0].into_iter().chain(std::iter::repeat(0));
        while begun.elapsed() < Duration::from_secs(60) {
            let byte = bytes.next().unwrap_or_default();
            if socket.write_all(&[byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    });
    assert!(
        matches!(outcome, Err(TlsError::TimedOut { .. })),
        "{outcome:?}"
    );
}

#[test]
fn a_peer_that_sends_more_than_a_handshake_is_refused() {
    let outcome = accept(hotlift(), |mut socket| {
        // A ClientHello of 64 KiB minus a byte, the longest that rustls waits for, in four full records and a short one.
        let mut record = vec![0x16, 3, 1, 0x3f, 0xff];
        record.extend([1, 0, 0xff, 0xff]);
        record.resize(5 + 0x3fff, 0);
        let mut sent = 0;
        while socket.write_all(&record).is_ok() {
            sent += record.len();
            assert!(sent < 16 * HANDSHAKE_BYTES, "it is still read");
        }
    });
    assert!(
        matches!(outcome, Err(TlsError::TooMuch { .. })),
        "{outcome:?}"
    );
}

#[test]
fn a_peer_without_tls_is_recognised_by_either_side() {
    for first in [
        &b"QEVM\0\0\0\x03"[..],
        b"\x11\x22\x33\x44\0\0\0\x01",
        b"{\"version\":1}\n",
    ] {
        let outcome = accept(hotlift(), move |mut socket| {
            socket.write_all(first).unwrap();
            read_to_end(socket);
        });
        let error = outcome.unwrap_err();
        assert!(matches!(error, TlsError::PlaintextPeer), "{error:?}");
        assert_eq!(error.to_string(), "the other side does not use TLS");
    }
    let pki = Pki::new("CA");
    let client = tls(&pki.host(&["a"]), hotlift());
    let (mut plain, socket) = UnixStream::pair().unwrap();
    plain.write_all(b"{\"version\":1}\n").unwrap();
    let error = client.connect(&socket, Some("b")).unwrap_err();
    assert!(matches!(error, TlsError::PlaintextPeer), "{error:?}");
    // The received bytes are distinguishable from Hotlift's own protocols.
    let mut first = [0; hotlift_tls::SNIFFED];
    plain.read_exact(&mut first).unwrap();
    assert!(hotlift_tls::is_tls(first));
}

#[test]
fn a_peer_that_closes_or_sends_nonsense_is_an_error() {
    let error = accept(hotlift(), drop).unwrap_err();
    assert!(matches!(error, TlsError::Closed), "{error:?}");
    // The other side may have closed after a timeout, so the message names the MTU.
    assert!(error.to_string().contains("packets of the MTU"), "{error}");
    let outcome = accept(hotlift(), |mut socket| {
        socket.write_all(&[0x16, 3, 1, 0xff, 0xff]).unwrap();
        read_to_end(socket);
    });
    assert!(
        matches!(outcome, Err(TlsError::Handshake(_))),
        "{outcome:?}"
    );
    let outcome = accept(hotlift(), |mut socket| {
        socket.write_all(&[0x16, 3, 1, 0, 4, 9, 9, 9, 9]).unwrap();
        read_to_end(socket);
    });
    assert!(outcome.is_err(), "{outcome:?}");
}

/// Forwards the bytes of `from`, with one bit changed in the byte at `place`; returns the number of bytes.
fn pass_on(mut from: UnixStream, mut to: UnixStream, place: Option<usize>) -> usize {
    let mut at = 0;
    let mut bytes = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        if let Some(place) = place.filter(|place| (at..at + n).contains(place)) {
            bytes[place - at] ^= 1 << (place % 8);
        }
        at += n;
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    // No more bytes follow, and no peer waits for them.
    let _ = to.shutdown(std::net::Shutdown::Write);
    at
}

/// Does a handshake through a man in the middle who changes a byte of the client's or the server's data.
fn tampered(
    client: &Tls,
    server: &Tls,
    [of_client, of_server]: [Option<usize>; 2],
) -> (bool, [usize; 2]) {
    let (here, near) = UnixStream::pair().unwrap();
    let (far, there) = UnixStream::pair().unwrap();
    let twice = |socket: &UnixStream| socket.try_clone().unwrap();
    let (near_too, far_too) = (twice(&near), twice(&far));
    thread::scope(|scope| {
        let forth = scope.spawn(move || pass_on(near, far, of_client));
        let back = scope.spawn(move || pass_on(far_too, near_too, of_server));
        let accepted = scope.spawn(move || server.accept(&there).map(|session| (session, there)));
        let connected = client.connect(&here, Some("b"));
        let is_whole = connected.is_ok();
        drop((connected, here));
        let accepted = accepted.join().expect("no panic");
        let is_whole = is_whole && accepted.is_ok();
        drop(accepted);
        (is_whole, [forth, back].map(|pump| pump.join().unwrap()))
    })
}

#[test]
fn a_changed_bit_in_a_handshake_ends_it_without_panic() {
    let pki = Pki::new("CA");
    let client = tls(&pki.host(&["a"]), short_timeouts());
    let server = tls(&pki.host(&["b"]), short_timeouts());
    let (is_whole, lengths) = tampered(&client, &server, [None, None]);
    assert!(is_whole);
    let mut whole = Vec::new();
    for (side, length) in lengths.into_iter().enumerate() {
        for place in (0..length).step_by(3) {
            let mut places = [None, None];
            places[side] = Some(place);
            if tampered(&client, &server, places).0 {
                whole.push(places);
            }
        }
    }
    // The second byte of a record's version has no meaning (RFC 8446, section 5.1): three records a side.
    assert!(whole.len() <= 6, "{whole:?}");
}

#[test]
fn a_failed_handshake_leaves_the_timeouts_of_the_socket_alone() {
    let pki = Pki::new("CA");
    let server = tls(&pki.host(&["b"]), short_timeouts());
    let (_stranger, socket) = UnixStream::pair().unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(7)))
        .unwrap();
    assert!(server.accept(&socket).is_err());
    assert_eq!(socket.read_timeout().unwrap(), Some(Duration::from_secs(7)));
    assert!(
        !rustix::fs::fcntl_getfl(&socket)
            .unwrap()
            .contains(rustix::fs::OFlags::NONBLOCK)
    );
}
