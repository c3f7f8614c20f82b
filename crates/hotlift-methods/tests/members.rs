//! Tests the gzip members of method qatzip: QAT hardware and gunzip accept Hotlift's members, and Hotlift reads any
//! gzip member.

mod support;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{Accelerator, Decode, EncoderSettings, MethodError, method};
use support::qemu::inflate;
use support::{CANARY, CONTENTS, LAYOUTS, Layout, Place, contents, zlib_stream};

fn decoder() -> Box<dyn Decode> {
    (method("qatzip").expect("qatzip").decoder)(Accelerator::Off).expect("qatzip")
}

fn encoded(pages: &[u8], level: u8) -> Vec<u8> {
    let mut payload = Vec::new();
    let mut encoder =
        (method("qatzip").expect("qatzip").encoder)(&EncoderSettings::software(level))
            .expect("qatzip");
    encoder.encode(pages, &mut payload).expect("qatzip");
    payload
}

fn le32(bytes: &[u8], at: usize) -> usize {
    let bytes = bytes[at..].first_chunk::<4>().expect("four bytes");
    usize::try_from(u32::from_le_bytes(*bytes)).expect("64 bits")
}

/// Returns a plain gzip member with the optional parts of `flags`.
fn plain(bytes: &[u8], flags: u8) -> Vec<u8> {
    let mut member = vec![0x1f, 0x8b, 8, flags, 1, 2, 3, 4, 2, 3];
    if flags & 4 != 0 {
        // A foreign subfield.
        member.extend_from_slice(b"\x07\x00ab\x03\x00xyz");
    }
    if flags & 8 != 0 {
        member.extend_from_slice(b"name\0");
    }
    if flags & 16 != 0 {
        member.extend_from_slice(b"a comment\0");
    }
    if flags & 2 != 0 {
        let sum = crc32fast::hash(&member).to_le_bytes();
        member.extend_from_slice(&sum[..2]);
    }
    let stream = zlib_stream(bytes);
    member.extend_from_slice(&stream[2..stream.len() - 4]);
    member.extend_from_slice(&crc32fast::hash(bytes).to_le_bytes());
    member.extend_from_slice(&u32::try_from(bytes.len()).expect("short").to_le_bytes());
    member
}

#[test]
fn members_hold_64_kib_and_say_their_sizes() {
    for level in [1, 3, 9] {
        for kind in CONTENTS {
            for (n, members) in [(1, 1), (16, 1), (17, 2), (128, 8)] {
                let pages = contents(kind, n, 1);
                let payload = encoded(&pages, level);
                let mut rest = &payload[..];
                let mut got = Vec::new();
                for _ in 0..members {
                    assert_eq!(rest[..8], [0x1f, 0x8b, 8, 4, 0, 0, 0, 0]);
                    assert_eq!(rest[9..16], *b"\xff\x0c\x00QZ\x08\x00");
                    let (bytes, taken) = inflate(rest, 31);
                    assert_eq!(le32(rest, 16), bytes.len());
                    assert_eq!(le32(rest, 20), taken - 32);
                    // Limits of a hardware session.
                    assert!(bytes.len() <= 64 << 10 && taken - 32 <= (72 << 10) + 1024);
                    got.extend(bytes);
                    rest = &rest[taken..];
                }
                assert!(rest.is_empty(), "{members} members of {n} pages");
                assert!(got == pages, "{kind}, level {level}");
                assert!(payload.len() <= pages.len() + pages.len() / 32 + 64);
            }
        }
    }
}

#[test]
fn members_of_any_kind_and_size_are_read() {
    let pages = contents("alternating", 40, 2);
    let cut = |sizes: &[usize], flags: &[u8]| -> Vec<u8> {
        let mut rest = &pages[..];
        let mut payload = Vec::new();
        for (i, &size) in sizes.iter().enumerate() {
            let (member, after) = rest.split_at(size.min(rest.len()));
            payload.extend(plain(member, flags[i % flags.len()]));
            rest = after;
        }
        payload.extend(plain(rest, 0));
        payload
    };
    let mixed = [
        encoded(&pages[..3 * PAGE_SIZE], 1),
        plain(&pages[3 * PAGE_SIZE..], 8),
    ]
    .concat();
    for (what, payload) in [
        ("one member", plain(&pages, 0)),
        ("every optional part", cut(&[9000], &[2, 4, 8, 16, 30])),
        (
            "each part alone",
            cut(&[1, 4095, 7, 9000, 65536], &[2, 4, 8, 16, 31]),
        ),
        ("many small ones", cut(&[1000; 150], &[0, 12])),
        ("QAT's and plain ones", mixed),
    ] {
        for layout in LAYOUTS {
            let place = Place::new(40, layout);
            decoder().decode(&payload, &place.runs()).expect(what);
            assert!(place.pages() == pages, "{what}, {layout:?}: pages differ");
            place.assert_rest_untouched(what);
        }
    }
}

#[test]
fn no_byte_of_a_damaged_member_reaches_a_page() {
    let pages = contents("text", 4, 1);
    let good = encoded(&pages, 1);
    // The sizes, the checksum, the size, and one bit of each byte of the deflate.
    for at in (16..good.len()).step_by(3) {
        let mut payload = good.clone();
        payload[at] ^= 1;
        let place = Place::new(4, Layout::Scattered);
        let result = decoder().decode(&payload, &place.runs());
        assert!(result.is_err(), "byte {at}");
        assert_eq!(place.pages(), vec![CANARY; 4 * PAGE_SIZE], "byte {at}");
    }
}

#[test]
fn what_begins_as_no_gzip_member_is_an_error() {
    let good = encoded(&contents("text", 1, 1), 1);
    for (at, value) in [(0, 0x1e), (1, 0), (2, 7), (3, 0xe4)] {
        let mut payload = good.clone();
        payload[at] = value;
        let place = Place::new(1, Layout::Whole);
        let error = decoder()
            .decode(&payload, &place.runs())
            .expect_err("a header");
        let is_header = matches!(error, MethodError::Header { .. });
        assert_eq!(is_header, at < 2, "{error}");
    }
}
