//! Tests TLS records that are changed in transit. The reader must return a prefix of the sent data, and then an error.

use hotlift_tls::fixed::{ends, next_key, record};
use hotlift_tls::{RECORD_PLAINTEXT, RECORDS_PER_KEY, RecordError, Slices};

const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

/// A stream of records, each with its plaintext.
struct Stream {
    cipher: usize,
    records: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Stream {
    /// Creates data of several lengths, a ticket, new keys, and the end.
    fn new(cipher: usize) -> Self {
        let [_, mut server] = ends(cipher, RECORDS_PER_KEY);
        let mut records = Vec::new();
        let sealer = &mut server.sealer;
        for length in [1, 300, RECORD_PLAINTEXT, 2] {
            let data = vec![u8::try_from(length % 251).unwrap(); length];
            records.push((record(sealer, APPLICATION_DATA, &data), data));
        }
        records.push((record(sealer, HANDSHAKE, &[4, 0, 0, 2, 1, 1]), Vec::new()));
        records.push((record(sealer, HANDSHAKE, &[24, 0, 0, 1, 0]), Vec::new()));
        next_key(sealer);
        records.push((
            record(sealer, APPLICATION_DATA, b"after"),
            b"after".to_vec(),
        ));
        let mut end = Vec::new();
        sealer.close(&mut end).unwrap();
        records.push((end, Vec::new()));
        Self { cipher, records }
    }

    fn bytes(records: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
        records
            .iter()
            .flat_map(|(sealed, _)| sealed.clone())
            .collect()
    }

    /// Returns the plaintext before record `number`.
    fn before(&self, number: usize) -> Vec<u8> {
        let records = &self.records[..number];
        records.iter().flat_map(|(_, data)| data.clone()).collect()
    }

    /// Returns a reader's data from `bytes`, and its result.
    fn read(&self, bytes: &[u8]) -> (Vec<u8>, Result<(), RecordError>) {
        let [mut client, _] = ends(self.cipher, RECORDS_PER_KEY);
        let mut from = bytes;
        let mut got = Vec::new();
        let outcome = loop {
            match client.opener.plaintext(&mut from) {
                Ok([]) => break Ok(()),
                Ok(data) => {
                    got.extend_from_slice(data);
                    let n = data.len();
                    client.opener.consume(n);
                }
                Err(error) => break Err(error),
            }
        };
        (got, outcome)
    }

    /// Checks that exactly the records before `number` are read.
    fn assert_ends_before(&self, number: usize, bytes: &[u8], what: &str) {
        let (got, outcome) = self.read(bytes);
        assert!(outcome.is_err(), "{what}: taken for whole");
        assert!(
            got == self.before(number),
            "{what}: {} bytes, then {outcome:?}",
            got.len()
        );
    }
}

#[test]
fn an_unchanged_stream_is_read_to_its_end() {
    for cipher in 0..3 {
        let stream = Stream::new(cipher);
        let (got, outcome) = stream.read(&Stream::bytes(&stream.records));
        outcome.unwrap();
        assert!(got == stream.before(stream.records.len()));
    }
}

#[test]
fn a_flipped_bit_is_detected_before_the_record_is_returned() {
    for cipher in 0..3 {
        let stream = Stream::new(cipher);
        let whole = Stream::bytes(&stream.records);
        let mut start = 0;
        for (number, (sealed, _)) in stream.records.iter().enumerate() {
            // In a long record: both ends, and some places between.
            let places = (0..sealed.len()).filter(|at| {
                sealed.len() < 400 || *at < 30 || *at + 30 > sealed.len() || at % 977 == 0
            });
            for at in places {
                let mut bytes = whole.clone();
                bytes[start + at] ^= 1 << (at % 8);
                stream.assert_ends_before(number, &bytes, &format!("byte {at} of record {number}"));
            }
            start += sealed.len();
        }
    }
}

#[test]
fn a_record_lost_doubled_swapped_or_replayed_is_detected() {
    let stream = Stream::new(0);
    let records = &stream.records;
    for number in 0..records.len() {
        let mut lost = records.clone();
        lost.remove(number);
        stream.assert_ends_before(number, &Stream::bytes(&lost), &format!("{number} lost"));
        if number + 1 == records.len() {
            // The reader does not read past the end.
            break;
        }
        let mut doubled = records.clone();
        doubled.insert(number, records[number].clone());
        stream.assert_ends_before(
            number + 1,
            &Stream::bytes(&doubled),
            &format!("{number} twice"),
        );
        for other in number + 1..records.len() {
            let mut swapped = records.clone();
            swapped.swap(number, other);
            let what = format!("{number} and {other} swapped");
            stream.assert_ends_before(number, &Stream::bytes(&swapped), &what);
        }
        let mut replayed = records.clone();
        replayed.insert(number + 1, records[0].clone());
        stream.assert_ends_before(
            number + 1,
            &Stream::bytes(&replayed),
            &format!("0 after {number}"),
        );
    }
}

#[test]
fn a_truncated_stream_is_not_complete() {
    let stream = Stream::new(0);
    let whole = Stream::bytes(&stream.records);
    let mut start = 0;
    for (number, (sealed, _)) in stream.records.iter().enumerate() {
        for at in [0, 1, 4, 5, 6, sealed.len() / 2, sealed.len() - 1] {
            let what = format!("cut at {at} of record {number}");
            let (got, outcome) = stream.read(&whole[..start + at]);
            assert!(
                matches!(outcome, Err(RecordError::Truncated)),
                "{what}: {outcome:?}"
            );
            assert!(got == stream.before(number), "{what}");
        }
        start += sealed.len();
    }
}

#[test]
fn a_record_of_the_other_direction_is_refused() {
    let [mut client, _] = ends(0, RECORDS_PER_KEY);
    let own = record(&mut client.sealer, APPLICATION_DATA, b"reflected");
    let error = client.opener.plaintext(&mut &own[..]).unwrap_err();
    assert!(matches!(error, RecordError::Damaged), "{error}");
}

#[test]
fn an_unsealed_record_is_refused_by_its_first_byte() {
    let [mut client, mut server] = ends(0, RECORDS_PER_KEY);
    let mut sent = Vec::new();
    server
        .sealer
        .send(&mut sent, &mut Slices::new(&["x"]))
        .unwrap();
    for plain in [
        &[21, 3, 3, 0, 2, 2, 40][..],
        &[20, 3, 3, 0, 1, 1],
        b"QEVM\0\0\0\x03",
    ] {
        let error = client.opener.plaintext(&mut &plain[..]).unwrap_err();
        assert!(
            matches!(error, RecordError::NotSealed { kind } if kind == plain[0]),
            "{error}"
        );
        [client, server] = ends(0, RECORDS_PER_KEY);
    }
    drop(server);
    for length in [0_u16, 16, 16_641, u16::MAX] {
        let [high, low] = length.to_be_bytes();
        let [mut client, _] = ends(0, RECORDS_PER_KEY);
        let error = client
            .opener
            .plaintext(&mut &[23, 3, 3, high, low, 0][..])
            .unwrap_err();
        assert!(
            matches!(error, RecordError::BadLength { .. }),
            "{length}: {error}"
        );
        assert!(client.opener.memory() < 4096);
    }
}
