//! Tests that decoded output equals the input, for any content and layout, over several packets.

mod support;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{
    Accelerator, Decode, Encode, EncoderSettings, METHODS, MethodError, method, zlib,
};
use support::{CONTENTS, LAYOUTS, Layout, Place, contents};

const PACKETS: [usize; 4] = [1, 2, 127, 128];

/// Sends packets of every size through one channel, three times over, so that each follows each.
fn channel(
    what: &str,
    kind: &str,
    layout: Layout,
    encoder: &mut dyn Encode,
    decoder: &mut dyn Decode,
) {
    let mut payload = Vec::new();
    let mut pages = Vec::new();
    for packet in 0..12 {
        let n = PACKETS[packet * 5 % 4];
        // The same memory for each packet: no code may rely on an earlier one's content.
        pages.clear();
        pages.extend_from_slice(&contents(kind, n, packet as u64));
        let what = format!("{what}, {kind}, {layout:?}, packet {packet} of {n} pages");
        encoder.encode(&pages, &mut payload).expect(&what);
        let place = Place::new(n, layout);
        decoder.decode(&payload, &place.runs()).expect(&what);
        assert!(place.pages() == pages, "{what}: pages differ");
        place.assert_rest_untouched(&what);
    }
}

#[test]
fn every_method_gives_back_every_page_exactly() {
    for method in METHODS {
        for kind in CONTENTS {
            for layout in LAYOUTS {
                let mut encoder =
                    (method.encoder)(&EncoderSettings::software(method.default_level))
                        .expect(method.name);
                let mut decoder = (method.decoder)(Accelerator::Off).expect(method.name);
                let what = format!("{} by {}", method.name, (method.library)());
                channel(&what, kind, layout, &mut *encoder, &mut *decoder);
            }
        }
    }
}

#[test]
fn every_level_gives_back_every_page_exactly() {
    for method in METHODS {
        for level in method.levels.clone().into_iter().flatten() {
            let mut encoder =
                (method.encoder)(&EncoderSettings::software(level)).expect(method.name);
            let mut decoder = (method.decoder)(Accelerator::Off).expect(method.name);
            let what = format!("{} {level}", method.name);
            let mut payload = Vec::new();
            for packet in 0..3 {
                let pages = contents("alternating", 12, packet);
                encoder.encode(&pages, &mut payload).expect(&what);
                let place = Place::new(12, Layout::Adjacent);
                decoder.decode(&payload, &place.runs()).expect(&what);
                assert!(place.pages() == pages, "{what}: pages differ");
            }
        }
    }
}

#[test]
fn both_zlib_libraries_write_what_the_decoder_reads() {
    for library in [zlib::Library::Isal, zlib::Library::ZlibRs] {
        for level in 1..=2 {
            for kind in CONTENTS {
                let mut encoder = match zlib::encoder_by(library, level) {
                    Ok(encoder) => encoder,
                    Err(error @ MethodError::Unavailable { .. }) => {
                        hotlift_testkit::skip!("isal", "{error}");
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                };
                let mut decoder =
                    (method("zlib").expect("zlib").decoder)(Accelerator::Off).expect("decoder");
                let what = format!("zlib {level} by {library:?}");
                channel(&what, kind, Layout::Scattered, &mut *encoder, &mut *decoder);
            }
        }
    }
}

#[test]
#[ignore = "takes a minute"]
fn a_channel_of_more_than_4_gib_wraps_no_counter() {
    // ISA-L counts input in 32 bits.
    for name in ["zlib", "zstd"] {
        let method = method(name).expect(name);
        let mut encoder = (method.encoder)(&EncoderSettings::software(1)).expect(name);
        let mut decoder = (method.decoder)(Accelerator::Off).expect(name);
        let mut payload = Vec::new();
        let place = Place::new(128, Layout::Whole);
        let kinds: Vec<Vec<u8>> = (0..7)
            .map(|i| contents(["text", "alternating"][i % 2], 128, i as u64))
            .collect();
        // 4.5 GiB.
        for packet in 0..9 * 1024 {
            let pages = &kinds[packet % kinds.len()];
            encoder.encode(pages, &mut payload).expect(name);
            decoder.decode(&payload, &place.runs()).expect(name);
            assert!(&place.pages() == pages, "{name}: packet {packet} differs");
        }
    }
}

#[test]
fn levels_outside_of_the_range_are_refused_with_the_range() {
    for (name, level, text) in [
        ("zlib", 10, "zlib level 10 is out of range 0..=9"),
        ("zstd", 21, "zstd level 21 is out of range 0..=20"),
        ("qatzip", 0, "qatzip level 0 is out of range 1..=9"),
        ("qatzip", 10, "qatzip level 10 is out of range 1..=9"),
    ] {
        let method = method(name).expect(name);
        let error = (method.encoder)(&EncoderSettings::software(level))
            .err()
            .expect("an error");
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn parts_of_pages_are_refused() {
    for method in METHODS {
        let mut encoder =
            (method.encoder)(&EncoderSettings::software(method.default_level)).expect(method.name);
        for bytes in [0, 1, PAGE_SIZE - 1, PAGE_SIZE + 1] {
            let result = encoder.encode(&vec![1; bytes], &mut Vec::new());
            let expected = MethodError::UnevenInput {
                method: method.name,
                bytes,
            };
            assert_eq!(result, Err(expected));
        }
    }
}

#[test]
fn the_methods_are_those_of_the_wire_and_take_the_levels_of_the_table() {
    let of_wire = hotlift_wire::multifd::Method::ALL.map(|wire| (wire.name(), wire.flag()));
    let here: Vec<_> = METHODS.iter().map(|m| (m.name, m.flag)).collect();
    assert_eq!(here, of_wire);
    for method in METHODS {
        let levels = method.levels.clone().into_iter().flatten();
        for level in levels.chain([method.default_level]) {
            let encoder = (method.encoder)(&EncoderSettings::software(level));
            assert!(encoder.is_ok(), "{}: level {level}", method.name);
        }
    }
}
