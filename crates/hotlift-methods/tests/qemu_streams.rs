//! Tests that Hotlift reads QEMU's output, and that QEMU reads Hotlift's output.

mod support;

use hotlift_methods::{Accelerator, Decode, Encode, EncoderSettings, MethodError, method, zlib};
use libz_sys::{Z_FULL_FLUSH, Z_SYNC_FLUSH};
use support::qemu::{ZlibReader, ZlibWriter, ZstdReader, ZstdWriter};
use support::{CONTENTS, LAYOUTS, Layout, Place, contents};

const PACKETS: [usize; 8] = [128, 1, 2, 127, 3, 128, 64, 1];

fn decoder(name: &str) -> Box<dyn Decode> {
    (method(name).expect(name).decoder)(Accelerator::Off).expect(name)
}

fn read(decoder: &mut dyn Decode, payload: &[u8], pages: &[u8], layout: Layout, what: &str) {
    let place = Place::new(pages.len() / 4096, layout);
    decoder.decode(payload, &place.runs()).expect(what);
    assert!(place.pages() == pages, "{what}: pages differ");
    place.assert_rest_untouched(what);
}

/// Returns a packet with much in common with the previous one, so that its matches refer to that.
fn related(kind: &str, n: usize, packet: usize) -> Vec<u8> {
    let mut pages = contents(kind, n, packet as u64 / 2);
    pages[packet] ^= 1;
    pages
}

#[test]
fn zlib_streams_of_any_level_and_flush_are_read() {
    for level in 0..=9 {
        for flush in [Z_SYNC_FLUSH, Z_FULL_FLUSH] {
            for layout in LAYOUTS {
                let mut writer = ZlibWriter::new(level, flush);
                let mut decoder = decoder("zlib");
                for (packet, n) in PACKETS.into_iter().enumerate() {
                    let pages = related("alternating", n, packet);
                    let payload = writer.packet(&pages);
                    let what = format!("zlib {level}, flush {flush}, {layout:?}, packet {packet}");
                    read(&mut *decoder, &payload, &pages, layout, &what);
                }
            }
        }
    }
}

#[test]
fn zlib_matches_reach_back_over_several_small_packets() {
    // One page repeated after 1, 2, ... 7 others, all of noise: only a match can shorten it, and 32 KiB is the maximum
    // distance.
    let noise: Vec<Vec<u8>> = (0..8).map(|i| contents("random", 1, i)).collect();
    for between in 1..8 {
        let mut writer = ZlibWriter::new(6, Z_SYNC_FLUSH);
        let mut decoder = decoder("zlib");
        for page in noise.iter().take(between).chain(&noise[..1]) {
            let payload = writer.packet(page);
            let what = format!("{between} packets between");
            read(&mut *decoder, &payload, page, Layout::Whole, &what);
        }
        let again = writer.packet(&noise[0]);
        assert!(again.len() < 200, "the last packet is a match");
    }
}

#[test]
fn an_open_zstd_frame_written_page_by_page_is_read() {
    for level in [1, 3, 9, 20] {
        for layout in LAYOUTS {
            let mut writer = ZstdWriter::new(level);
            let mut decoder = decoder("zstd");
            for (packet, n) in PACKETS.into_iter().enumerate() {
                let pages = related("alternating", n, packet);
                let payload = writer.packet(&pages);
                let what = format!("zstd {level}, {layout:?}, packet {packet}");
                read(&mut *decoder, &payload, &pages, layout, &what);
            }
        }
    }
}

#[test]
fn open_and_closed_zstd_frames_may_alternate() {
    let mut open = ZstdWriter::new(1);
    let mut closed =
        (method("zstd").expect("zstd").encoder)(&EncoderSettings::software(1)).expect("zstd");
    let mut decoder = decoder("zstd");
    for packet in 0..9 {
        let pages = related("text", 20, packet);
        let payload = match packet % 3 {
            0 => open.packet(&pages),
            1 => open.last_packet(&pages),
            _ => {
                let mut payload = Vec::new();
                closed.encode(&pages, &mut payload).expect("encode");
                payload
            }
        };
        let layout = LAYOUTS[packet / 3];
        let what = format!("packet {packet}");
        read(&mut *decoder, &payload, &pages, layout, &what);
    }
}

#[test]
fn several_zstd_frames_in_one_packet_are_read() {
    let mut closed =
        (method("zstd").expect("zstd").encoder)(&EncoderSettings::software(1)).expect("zstd");
    let pages = contents("text", 6, 1);
    let mut all = Vec::new();
    let mut payload = Vec::new();
    for part in pages.chunks(2 * 4096) {
        closed.encode(part, &mut payload).expect("encode");
        all.extend_from_slice(&payload);
    }
    for layout in LAYOUTS {
        read(&mut *decoder("zstd"), &all, &pages, layout, "three frames");
    }
}

/// Returns the pages of a payload, given their number.
type Reader<'a> = &'a mut dyn FnMut(&[u8], usize) -> Result<Vec<u8>, String>;

/// Passes every packet of a channel to a reader like QEMU's.
fn written(what: &str, kinds: &[&str], encoder: &mut dyn Encode, reader: Reader<'_>) {
    let mut pages = Vec::new();
    let mut payload = Vec::new();
    for kind in kinds {
        for (packet, n) in PACKETS.into_iter().enumerate() {
            pages.clear();
            pages.extend_from_slice(&related(kind, n, packet));
            encoder.encode(&pages, &mut payload).expect(what);
            let got = reader(&payload, n)
                .unwrap_or_else(|error| panic!("{what}, {kind}, packet {packet}: {error}"));
            assert!(
                got == pages,
                "{what}, {kind}, packet {packet}: pages differ"
            );
        }
    }
}

#[test]
fn qemus_zlib_reader_takes_every_level_of_either_library() {
    for library in [zlib::Library::Isal, zlib::Library::ZlibRs] {
        for level in zlib::LEVELS {
            match zlib::encoder_by(library, level) {
                Ok(mut encoder) => {
                    let mut reader = ZlibReader::new();
                    written(
                        &format!("zlib {level} by {library:?}"),
                        &CONTENTS,
                        &mut *encoder,
                        &mut |payload, n| reader.packet(payload, n),
                    );
                }
                Err(MethodError::Level { .. }) => assert_eq!(library, zlib::Library::Isal),
                Err(error @ MethodError::Unavailable { .. }) => {
                    hotlift_testkit::skip!("isal", "{error}");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn qemus_zstd_reader_takes_every_level() {
    let zstd = method("zstd").expect("zstd");
    // The highest levels take a second for a megabyte.
    for level in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 20] {
        let mut reader = ZstdReader::new();
        let mut encoder = (zstd.encoder)(&EncoderSettings::software(level)).expect("encoder");
        let kinds = if level <= 9 { &CONTENTS[..] } else { &["text"] };
        written(
            &format!("zstd {level}"),
            kinds,
            &mut *encoder,
            &mut |payload, n| reader.packet(payload, n),
        );
    }
}

#[test]
fn qemu_reads_packets_of_one_channel_whose_levels_differ() {
    for (name, levels) in [
        ("zlib", [1, 9, 4, 1, 6, 4, 2, 9]),
        ("zstd", [1, 9, -7, 1, 5, -1, 3, 9]),
    ] {
        let info = method(name).expect(name);
        let mut encoder = (info.encoder)(&EncoderSettings::software(1)).expect(name);
        let (mut zlib, mut zstd) = (ZlibReader::new(), ZstdReader::new());
        let mut ours = decoder(name);
        let mut payload = Vec::new();
        for (packet, (n, level)) in PACKETS.into_iter().zip(levels).enumerate() {
            let pages = related("text", n, packet % 3);
            let what = format!("{name} {level}, packet {packet}");
            encoder.set_level(level).expect(&what);
            encoder.encode(&pages, &mut payload).expect(&what);
            let theirs = match name {
                "zlib" => zlib.packet(&payload, n),
                _ => zstd.packet(&payload, n),
            };
            let theirs = theirs.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(theirs == pages, "{what}: QEMU's pages differ");
            read(&mut *ours, &payload, &pages, Layout::Whole, &what);
        }
    }
    let info = method("zlib").expect("zlib");
    let mut encoder = (info.encoder)(&EncoderSettings::software(1)).expect("zlib");
    assert!(matches!(
        encoder.set_level(10),
        Err(MethodError::Level { .. })
    ));
}
