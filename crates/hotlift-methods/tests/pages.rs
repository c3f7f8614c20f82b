//! Tests methods qpl and uadk: the accelerators' own decoders read Hotlift's stream for each page, and Hotlift reads
//! theirs.

mod support;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{Accelerator, EncoderSettings, method};
use support::qemu::inflate;
use support::{CONTENTS, LAYOUTS, Layout, Place, contents, zlib_stream};

/// Returns the pages of a payload, by its table.
fn split(payload: &[u8], pages: usize) -> Vec<&[u8]> {
    let (table, mut streams) = payload.split_at(4 * pages);
    let mut all = Vec::new();
    for entry in table.as_chunks::<4>().0 {
        let length = usize::try_from(u32::from_be_bytes(*entry)).expect("a length");
        let (page, rest) = streams.split_at(length);
        all.push(page);
        streams = rest;
    }
    assert!(streams.is_empty(), "the table adds up");
    all
}

fn payload_of(pages: &[Vec<u8>]) -> Vec<u8> {
    let mut payload = Vec::new();
    for page in pages {
        payload.extend_from_slice(&u32::try_from(page.len()).expect("short").to_be_bytes());
    }
    payload.extend(pages.concat());
    payload
}

#[test]
fn each_page_is_a_stream_with_a_window_of_4_kib_or_as_it_is() {
    for (name, window) in [("qpl", -12), ("uadk", 15)] {
        let mut encoder =
            (method(name).expect(name).encoder)(&EncoderSettings::software(0)).expect(name);
        let mut payload = Vec::new();
        for kind in CONTENTS {
            let pages = contents(kind, 40, 3);
            encoder.encode(&pages, &mut payload).expect(name);
            for (stream, page) in split(&payload, 40).iter().zip(pages.chunks(PAGE_SIZE)) {
                if stream.len() < PAGE_SIZE {
                    assert!(kind != "random", "{name}: random pages do not shrink");
                    assert_eq!(
                        inflate(stream, window),
                        (page.to_vec(), stream.len()),
                        "{name}, {kind}"
                    );
                } else {
                    assert_eq!(stream, &page, "{name}, {kind}");
                    assert!(["random", "alternating"].contains(&kind), "{name}, {kind}");
                }
            }
        }
    }
}

#[test]
fn uadk_pages_have_the_drivers_header() {
    let mut payload = Vec::new();
    let mut encoder =
        (method("uadk").expect("uadk").encoder)(&EncoderSettings::software(0)).expect("uadk");
    encoder
        .encode(&contents("text", 3, 0), &mut payload)
        .expect("uadk");
    for stream in split(&payload, 3) {
        assert_eq!(stream[..2], [0x78, 0x9c]);
    }
}

#[test]
fn pages_of_others_are_read_with_or_without_an_adler() {
    let pages = contents("binary", 6, 1);
    let streams: Vec<Vec<u8>> = pages.chunks(PAGE_SIZE).map(zlib_stream).collect();
    let cut = |header: usize, trailer: usize| -> Vec<u8> {
        let cut = streams
            .iter()
            .map(|s| s[header..s.len() - trailer].to_vec());
        payload_of(&cut.collect::<Vec<_>>())
    };
    let mut wrong: Vec<Vec<u8>> = streams.clone();
    for stream in &mut wrong {
        let at = stream.len() - 1;
        stream[at] ^= 1;
    }
    for (name, payload) in [
        ("qpl", cut(2, 4)),
        ("uadk", cut(0, 0)),
        ("uadk", cut(0, 4)),
        ("uadk", payload_of(&wrong)),
    ] {
        for layout in LAYOUTS {
            let mut decoder = (method(name).expect(name).decoder)(Accelerator::Off).expect(name);
            let place = Place::new(6, layout);
            decoder.decode(&payload, &place.runs()).expect(name);
            assert!(place.pages() == pages, "{name}, {layout:?}: pages differ");
            place.assert_rest_untouched(name);
        }
    }
}

#[test]
fn a_packet_of_pages_as_they_are_is_read() {
    // Payload of a sender without its accelerator.
    let pages = contents("alternating", 5, 1);
    let payload = payload_of(
        &pages
            .chunks(PAGE_SIZE)
            .map(<[u8]>::to_vec)
            .collect::<Vec<_>>(),
    );
    for name in ["qpl", "uadk"] {
        let mut decoder = (method(name).expect(name).decoder)(Accelerator::Off).expect(name);
        let place = Place::new(5, Layout::Scattered);
        decoder.decode(&payload, &place.runs()).expect(name);
        assert!(place.pages() == pages, "{name}");
    }
}

#[test]
fn pages_that_lie_in_pieces_are_put_together() {
    let pages = contents("text", 3, 1);
    for name in ["qpl", "uadk"] {
        let mut payload = Vec::new();
        let mut encoder =
            (method(name).expect(name).encoder)(&EncoderSettings::software(0)).expect(name);
        encoder.encode(&pages, &mut payload).expect(name);
        let place = Place::new(3, Layout::Scattered);
        let runs: Vec<_> = place
            .runs()
            .iter()
            .flat_map(|run| [run.split_at(1000).0, run.split_at(1000).1])
            .collect();
        let mut decoder = (method(name).expect(name).decoder)(Accelerator::Off).expect(name);
        decoder.decode(&payload, &runs).expect(name);
        assert!(place.pages() == pages, "{name}");
        place.assert_rest_untouched(name);
    }
}
