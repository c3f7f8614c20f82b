//! Tests data in TLS records: it arrives complete, in pieces of any size, in both directions at once, and with many
//! keys.

use std::io::IoSlice;
use std::thread;

use hotlift_tls::fixed::{End, ends, next_key, record};
use hotlift_tls::{RECORD_PLAINTEXT, RECORDS_PER_KEY, RecordError, Settings, Slices};
use proptest::prelude::*;

use crate::support::{connected, hotlift};

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; length];
    random.fill(&mut bytes);
    bytes
}

/// Reads all of `records`.
fn read_all(
    opener: &mut hotlift_tls::RecordOpener,
    records: &[u8],
) -> Result<Vec<u8>, RecordError> {
    let mut from = records;
    let mut all = Vec::new();
    loop {
        let part = opener.plaintext(&mut from)?;
        if part.is_empty() {
            return Ok(all);
        }
        all.extend_from_slice(part);
        let n = part.len();
        opener.consume(n);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn data_sent_in_any_pieces_is_received(
        lengths in prop::collection::vec(0_usize..40_000, 0..12),
        cipher in 0_usize..3,
        records_per_key in prop_oneof![1_u64..5, Just(RECORDS_PER_KEY)],
        seed: u64,
    ) {
        let [mut client, mut server] = ends(cipher, records_per_key);
        let parts: Vec<_> = lengths.iter().map(|&length| noise(length, seed)).collect();
        let mut sent = Vec::new();
        client.sealer.send(&mut sent, &mut Slices::new(&parts)).unwrap();
        let mut slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        client.sealer.send(&mut sent, &mut slices.as_mut_slice()).unwrap();
        client.sealer.close(&mut sent).unwrap();
        let whole = parts.concat().repeat(2);
        prop_assert_eq!(read_all(&mut server.opener, &sent).unwrap(), whole);
        prop_assert!(server.opener.is_closed());
    }
}

#[test]
fn one_write_sends_three_records() {
    let [mut client, mut server] = ends(0, RECORDS_PER_KEY);
    let all = noise(20 * RECORD_PLAINTEXT + 7, 1);
    let parts = [&all[..]];
    let mut from = Slices::new(&parts);
    let mut writes = Vec::new();
    let mut sent = Vec::new();
    loop {
        let records = client.sealer.seal(&mut from).unwrap();
        if records.is_empty() {
            break;
        }
        writes.push(records.len());
        sent.extend_from_slice(records);
    }
    assert_eq!(writes[..6], [3 * (29 << 9); 6]);
    assert_eq!(writes.len(), 7);
    client.sealer.close(&mut sent).unwrap();
    assert_eq!(read_all(&mut server.opener, &sent).unwrap(), all);
}

/// Both directions at once, with four threads and a new key every 100 records.
#[test]
fn keys_change_every_100_records_while_both_sides_send() {
    let settings = Settings {
        records_per_key: 100,
        ..hotlift()
    };
    let (client, server) = connected(&settings);
    let message = noise(1000, 3);
    thread::scope(|scope| {
        for (socket, session) in [client, server] {
            let hotlift_tls::Session {
                mut opener,
                mut sealer,
                ..
            } = session;
            let (mut from, mut to) = (socket.try_clone().unwrap(), socket);
            let message = &message;
            scope.spawn(move || {
                for _ in 0..2000 {
                    sealer.send(&mut to, &mut Slices::new(&[message])).unwrap();
                }
                sealer.close(&mut to).unwrap();
            });
            scope.spawn(move || {
                let mut got = vec![0; message.len()];
                for _ in 0..2000 {
                    opener.read_exact(&mut from, &mut got).unwrap();
                    assert!(got == *message);
                }
                assert_eq!(opener.read(&mut from, &mut got).unwrap(), 0);
                assert!(opener.is_closed());
            });
        }
    });
}

#[test]
fn a_new_key_is_made_at_its_interval_and_not_before() {
    // The last record of a key is its KeyUpdate; 27 bytes in all.
    let [mut client, _] = ends(0, 4);
    let lengths: Vec<_> = (0..8)
        .map(|_| {
            let mut sent = Vec::new();
            client
                .sealer
                .send(&mut sent, &mut Slices::new(&[[7]]))
                .unwrap();
            sent.len()
        })
        .collect();
    assert_eq!(lengths, [23, 23, 23, 50, 23, 23, 50, 23]);
}

#[test]
fn a_request_for_new_keys_is_answered_before_the_next_data() {
    let [mut client, mut server] = ends(0, RECORDS_PER_KEY);
    let mut sent = record(&mut server.sealer, HANDSHAKE, &[24, 0, 0, 1, 1]);
    next_key(&mut server.sealer);
    server
        .sealer
        .send(&mut sent, &mut Slices::new(&["under the new key"]))
        .unwrap();
    let mut from = &sent[..];
    assert_eq!(
        client.opener.plaintext(&mut from).unwrap(),
        b"under the new key"
    );
    let mut answer = Vec::new();
    client
        .sealer
        .send(&mut answer, &mut Slices::new(&["a"]))
        .unwrap();
    assert_eq!(answer.len(), 27 + 23, "a KeyUpdate goes before");
    client
        .sealer
        .send(&mut answer, &mut Slices::new(&["b"]))
        .unwrap();
    assert_eq!(answer.len(), 27 + 23 + 23, "and only once");
    client.sealer.close(&mut answer).unwrap();
    assert_eq!(read_all(&mut server.opener, &answer).unwrap(), b"ab");
    // The answer does not request one.
    let mut sent = Vec::new();
    server
        .sealer
        .send(&mut sent, &mut Slices::new(&["c"]))
        .unwrap();
    assert_eq!(sent.len(), 23);
}

#[test]
fn a_client_ignores_tickets_in_any_pieces_and_a_server_refuses_them() {
    let ticket = [&[4, 0, 0, 200][..], &[9; 200]].concat();
    let [mut client, mut server] = ends(0, RECORDS_PER_KEY);
    let two = ticket.repeat(2);
    let mut sent = Vec::new();
    for piece in [&two[..2], &two[2..150], &two[150..206], &two[206..]] {
        sent.extend(record(&mut server.sealer, HANDSHAKE, piece));
    }
    server
        .sealer
        .send(&mut sent, &mut Slices::new(&["data"]))
        .unwrap();
    server.sealer.close(&mut sent).unwrap();
    assert_eq!(read_all(&mut client.opener, &sent).unwrap(), b"data");
    let sent = record(&mut client.sealer, HANDSHAKE, &ticket);
    let error = read_all(&mut server.opener, &sent).unwrap_err();
    assert!(
        matches!(
            error,
            RecordError::Unexpected {
                what: "message",
                kind: 4
            }
        ),
        "{error}"
    );
}

/// Returns a client's error for records that no correct server sends.
fn refused(make: impl FnOnce(&mut End) -> Vec<u8>) -> RecordError {
    let [mut client, mut server] = ends(0, RECORDS_PER_KEY);
    let sent = make(&mut server);
    let error = read_all(&mut client.opener, &sent).unwrap_err();
    let mut more = Vec::new();
    // The writer may have ended.
    let _ = server.sealer.send(&mut more, &mut Slices::new(&["more"]));
    let after = client.opener.plaintext(&mut &more[..]);
    assert!(
        matches!(after, Err(RecordError::Failed)),
        "after {error}: {after:?}"
    );
    error
}

#[test]
fn unexpected_records_end_the_connection() {
    let handshake = |content: &'static [u8]| {
        refused(move |server| record(&mut server.sealer, HANDSHAKE, content))
    };
    for (content, is_message) in [
        (&[24, 0, 0, 2, 0, 0][..], true),
        (&[24, 0, 0, 1, 2], true),
        (&[24, 0, 0, 0], true),
        (&[4, 2, 0, 0], true),
        (&[24, 0, 0, 1, 0, 4], false),
        (&[13, 0, 0, 0], false),
        (&[1, 0, 0, 1, 0], false),
    ] {
        let error = handshake(content);
        assert_eq!(
            matches!(error, RecordError::BadMessage { .. }),
            is_message,
            "{error}"
        );
        assert_eq!(
            matches!(error, RecordError::Unexpected { .. }),
            !is_message,
            "{error}"
        );
    }
    for kind in [20, 24, 255] {
        let error = refused(|server| record(&mut server.sealer, kind, b"x"));
        assert!(
            matches!(error, RecordError::Unexpected { what: "record", .. }),
            "{error}"
        );
    }
    // Type 0 is padding.
    let error = refused(|server| record(&mut server.sealer, 0, &[0; 9]));
    assert!(matches!(error, RecordError::NoType), "{error}");
    let error = refused(|server| record(&mut server.sealer, HANDSHAKE, &[]));
    assert!(matches!(error, RecordError::Unexpected { .. }), "{error}");
    let error = refused(|server| {
        let mut begun = record(&mut server.sealer, HANDSHAKE, &[4, 0, 0, 9, 1]);
        begun.extend(record(&mut server.sealer, APPLICATION_DATA, b"between"));
        begun
    });
    assert!(
        matches!(error, RecordError::Unexpected { what: "record", .. }),
        "{error}"
    );
    for empty in [&[][..], &[1], &[1, 0, 0]] {
        let error = refused(|server| record(&mut server.sealer, ALERT, empty));
        assert!(
            matches!(error, RecordError::BadMessage { kind: ALERT, .. }),
            "{error}"
        );
    }
}

#[test]
fn alerts_are_translated() {
    for (number, words) in [
        (42, "does not accept our certificate"),
        (
            48,
            "does not accept our certificate: it does not trust our CA",
        ),
        (49, "not on the list"),
        (70, "does not support TLS 1.3"),
        (120, "is not a Hotlift"),
        (200, "refused the connection"),
    ] {
        let error = refused(|server| record(&mut server.sealer, ALERT, &[2, number]));
        assert!(error.to_string().starts_with("the other side "), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn empty_records_are_counted() {
    let error = refused(|server| {
        let empty = |_| record(&mut server.sealer, APPLICATION_DATA, &[]);
        (0..40).flat_map(empty).collect()
    });
    assert!(matches!(error, RecordError::Idle { .. }), "{error}");
    // Records between data do not count.
    let [mut client, mut server] = ends(0, RECORDS_PER_KEY);
    let mut sent = Vec::new();
    for _ in 0..100 {
        sent.extend(record(&mut server.sealer, APPLICATION_DATA, &[]));
        sent.extend(record(&mut server.sealer, APPLICATION_DATA, b"x"));
    }
    server.sealer.close(&mut sent).unwrap();
    assert_eq!(read_all(&mut client.opener, &sent).unwrap(), [b'x'; 100]);
}

#[test]
fn no_data_follows_a_close() {
    let [mut client, mut server] = ends(0, RECORDS_PER_KEY);
    let mut sent = Vec::new();
    client.sealer.close(&mut sent).unwrap();
    let after = client.sealer.send(&mut sent, &mut Slices::new(&["x"]));
    assert!(matches!(after, Err(RecordError::Ended)));
    assert!(matches!(
        client.sealer.close(&mut sent),
        Err(RecordError::Ended)
    ));
    assert_eq!(read_all(&mut server.opener, &sent).unwrap(), b"");
    // The other direction continues.
    let mut sent = Vec::new();
    server
        .sealer
        .send(&mut sent, &mut Slices::new(&["still"]))
        .unwrap();
    server.sealer.close(&mut sent).unwrap();
    assert_eq!(read_all(&mut client.opener, &sent).unwrap(), b"still");
}

#[test]
fn a_reader_is_ready_while_it_has_whole_records() {
    let [mut client, mut server] = ends(0, RECORDS_PER_KEY);
    let mut sent = record(&mut server.sealer, APPLICATION_DATA, b"one");
    sent.extend(record(&mut server.sealer, APPLICATION_DATA, b"two"));
    sent.extend(record(&mut server.sealer, APPLICATION_DATA, b"cut"));
    sent.pop();
    assert!(!client.opener.is_ready());
    let mut from = &sent[..];
    for word in [b"one", b"two"] {
        assert_eq!(client.opener.plaintext(&mut from).unwrap(), word);
        assert!(from.is_empty(), "all in one read");
        assert!(client.opener.is_ready(), "its plaintext");
        client.opener.consume(3);
        assert_eq!(
            client.opener.is_ready(),
            word == b"one",
            "the record behind {word:?}"
        );
    }
    assert!(client.opener.plaintext(&mut from).is_err());
    assert!(client.opener.is_ready(), "an error needs no reading");
}

#[test]
fn a_read_that_times_out_loses_nothing() {
    /// Returns a byte and an error alternately.
    struct Slow<'a>(&'a [u8], bool);
    impl std::io::Read for Slow<'_> {
        fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(std::io::ErrorKind::WouldBlock.into());
            }
            let n = self.0.len().min(to.len()).min(1);
            std::io::Read::read(&mut self.0, &mut to[..n])
        }
    }
    let [mut client, mut server] = ends(2, RECORDS_PER_KEY);
    let mut sent = Vec::new();
    server
        .sealer
        .send(&mut sent, &mut Slices::new(&["all of it"]))
        .unwrap();
    let mut from = Slow(&sent, false);
    let mut late = 0;
    let got = loop {
        match client.opener.plaintext(&mut from) {
            Ok(plaintext) => break plaintext.to_vec(),
            Err(RecordError::Io(_)) => late += 1,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(got, b"all of it");
    assert!(late > 20);
}
