//! Tests payloads that no correct sender produces. Each causes an error, and neither a panic nor a write outside the
//! runs (memory ranges).

mod support;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{
    Accelerator, Decode, EncoderSettings, METHODS, MemoryLimit, MethodError, method,
};
use libz_sys::{Z_FINISH, Z_NO_FLUSH, Z_SYNC_FLUSH};
use support::qemu::{ZlibWriter, ZstdWriter, zstd_frame_with_window_log};
use support::{CANARY, LAYOUTS, Layout, Noise, Place, contents, zlib_stream};

fn decoder(name: &str) -> Box<dyn Decode> {
    (method(name).expect(name).decoder)(Accelerator::Off).expect(name)
}

/// Returns the packets of a channel by each writer: our own of each method, and QEMU's zlib and zstd.
fn channels(pages: &[Vec<u8>]) -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let mut all = Vec::new();
    for method in METHODS {
        let mut encoder =
            (method.encoder)(&EncoderSettings::software(method.default_level)).expect(method.name);
        let payloads = pages.iter().map(|pages| {
            let mut payload = Vec::new();
            encoder.encode(pages, &mut payload).expect(method.name);
            payload
        });
        all.push((method.name, payloads.collect()));
    }
    let mut zlib = ZlibWriter::new(1, Z_SYNC_FLUSH);
    all.push(("zlib", pages.iter().map(|p| zlib.packet(p)).collect()));
    let mut zstd = ZstdWriter::new(1);
    all.push(("zstd", pages.iter().map(|p| zstd.packet(p)).collect()));
    all
}

/// Returns true for methods whose payloads begin with a table of the pages' lengths.
fn has_table(name: &str) -> bool {
    ["qpl", "uadk"].contains(&name)
}

fn three_packets(n: usize) -> Vec<Vec<u8>> {
    (0..3).map(|i| contents("alternating", n, i / 2)).collect()
}

#[test]
fn a_truncated_payload_is_an_error() {
    let pages = three_packets(9);
    for (name, payloads) in channels(&pages) {
        for layout in LAYOUTS {
            for at in 0..payloads.len() {
                let cut = &payloads[at];
                let lengths = (0..cut.len())
                    .rev()
                    .take(40)
                    .chain((0..cut.len()).step_by(997));
                for len in lengths {
                    let mut decoder = decoder(name);
                    for payload in &payloads[..at] {
                        let place = Place::new(9, Layout::Whole);
                        decoder.decode(payload, &place.runs()).expect(name);
                    }
                    let place = Place::new(9, layout);
                    let what = format!("{name}, {len} of {} bytes of packet {at}", cut.len());
                    let result = decoder.decode(&cut[..len], &place.runs());
                    assert!(result.is_err(), "{what}: {layout:?}");
                    place.assert_rest_untouched(&what);
                }
            }
        }
    }
}

#[test]
fn flipped_bits_never_write_outside_of_the_runs() {
    let mut noise = Noise::new(7);
    let pages = three_packets(9);
    for (name, payloads) in channels(&pages) {
        let mut refused = 0;
        for round in 0..600 {
            let mut decoder = decoder(name);
            let place = Place::new(9, LAYOUTS[round % 3]);
            for payload in &payloads {
                let mut payload = payload.clone();
                for _ in 0..=noise.below(3) {
                    // The headers of streams and blocks are the sensitive part.
                    let reach = if round % 2 == 0 { payload.len() } else { 64 };
                    let at = noise.below(reach.min(payload.len()));
                    payload[at] ^= 1 << noise.below(8);
                }
                place.clear();
                let result = decoder.decode(&payload, &place.runs());
                place.assert_rest_untouched(&format!("{name}, round {round}"));
                if result.is_err() {
                    refused += 1;
                    break;
                }
            }
        }
        // `none` has nothing to reject. The others carry no checksum, so some damage passes.
        assert!(
            name == "none" || refused > 300,
            "{name}: only {refused} refused"
        );
    }
}

#[test]
fn noise_is_an_error() {
    let mut noise = Noise::new(11);
    for name in METHODS.iter().skip(1).map(|method| method.name) {
        for round in 0..2000 {
            let mut payload: Vec<u8> = (0..noise.below(600)).map(|_| noise.byte()).collect();
            match (name, round % 2) {
                ("zlib", 1) => {
                    payload.splice(0..0, [0x78, 0x01]);
                    payload.extend_from_slice(&[0, 0, 0xff, 0xff]);
                }
                // Two pages with correct lengths.
                (name, 1) if has_table(name) => {
                    payload.push(0);
                    let second = u32::try_from(payload.len() / 2).expect("below 600");
                    let first = u32::try_from(payload.len()).expect("below 600") - second;
                    payload.splice(0..0, [first, second].map(u32::to_be_bytes).concat());
                }
                ("qatzip", 1) => {
                    drop(payload.splice(0..0, [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff]))
                }
                ("lz4", 1) => drop(payload.splice(0..0, [0, 0, 0x20, 0])),
                ("zstd", 1) => drop(payload.splice(0..0, [0x28, 0xb5, 0x2f, 0xfd])),
                _ => {}
            }
            let place = Place::new(2, LAYOUTS[round % 3]);
            let result = decoder(name).decode(&payload, &place.runs());
            assert!(result.is_err(), "{name}, round {round}");
            place.assert_rest_untouched(name);
        }
    }
}

#[test]
fn a_payload_with_more_or_fewer_pages_than_expected_is_an_error() {
    let pages = three_packets(9);
    for (name, payloads) in channels(&pages) {
        for (there, long) in [(8, true), (10, false)] {
            for layout in LAYOUTS {
                for at in 0..payloads.len() {
                    let mut decoder = decoder(name);
                    for payload in &payloads[..at] {
                        let place = Place::new(9, Layout::Whole);
                        decoder.decode(payload, &place.runs()).expect(name);
                    }
                    let place = Place::new(there, layout);
                    let error = decoder
                        .decode(&payloads[at], &place.runs())
                        .expect_err(name);
                    if has_table(name) {
                        // The end of a table is not marked: with a table too long, pages are left over; with one too short,
                        // pages are read as lengths.
                        assert_eq!(
                            matches!(error, MethodError::Leftover { .. }),
                            long,
                            "{error}"
                        );
                        continue;
                    }
                    let is_long = matches!(error, MethodError::Long { .. });
                    let is_short = matches!(error, MethodError::Short { .. });
                    assert_eq!((is_long, is_short), (long, !long), "{name} {at}: {error}");
                    place.assert_rest_untouched(name);
                }
            }
        }
    }
}

#[test]
fn bytes_behind_a_packet_are_an_error() {
    let pages = three_packets(9);
    for (name, payloads) in channels(&pages) {
        for layout in LAYOUTS {
            for tail in [&b"x"[..], b"\x00\x00\x00\x00\x00", &[0xff; 300]] {
                let mut decoder = decoder(name);
                let place = Place::new(9, layout);
                let mut payload = payloads[0].clone();
                payload.extend_from_slice(tail);
                let result = decoder.decode(&payload, &place.runs());
                assert!(result.is_err(), "{name}, {} bytes more", tail.len());
                place.assert_rest_untouched(name);
            }
        }
    }
}

#[test]
fn after_an_error_every_packet_of_the_channel_fails() {
    let pages = three_packets(3);
    for (name, payloads) in channels(&pages) {
        if name == "none" {
            continue;
        }
        let mut decoder = decoder(name);
        let place = Place::new(3, Layout::Whole);
        decoder
            .decode(&payloads[0][..5], &place.runs())
            .expect_err(name);
        assert_eq!(
            decoder.decode(&payloads[0], &place.runs()),
            Err(MethodError::Failed { method: name })
        );
    }
}

#[test]
fn the_end_of_a_zlib_stream_is_an_error() {
    let page = contents("text", 1, 0);
    // The final bit is in the block that holds the page, or in an empty block that looks like a flush. Each is a channel's
    // first packet, or follows a packet that made the channel keep its history.
    let ended_by_finish = |writer: &mut ZlibWriter| {
        let mut payload = writer.packet_flushed_by(&page, Z_FINISH);
        payload.extend_from_slice(&[0, 0, 0xff, 0xff]);
        payload
    };
    let ended_by_empty_block = |writer: &mut ZlibWriter| {
        let mut payload = writer.packet_flushed_by(&page, Z_SYNC_FLUSH);
        payload.extend_from_slice(&[1, 0, 0, 0xff, 0xff]);
        payload
    };
    type Ending<'a> = &'a dyn Fn(&mut ZlibWriter) -> Vec<u8>;
    let endings: [Ending<'_>; 2] = [&ended_by_finish, &ended_by_empty_block];
    for ending in endings {
        for packets_before in [0, 2] {
            let mut writer = ZlibWriter::new(1, Z_SYNC_FLUSH);
            let mut decoder = decoder("zlib");
            let place = Place::new(1, Layout::Whole);
            for _ in 0..packets_before {
                let payload = writer.packet(&page);
                decoder.decode(&payload, &place.runs()).expect("a packet");
            }
            let payload = ending(&mut writer);
            assert_eq!(
                decoder.decode(&payload, &place.runs()),
                Err(MethodError::StreamEnd { method: "zlib" }),
                "after {packets_before} packets"
            );
        }
    }
}

#[test]
fn a_zlib_packet_without_a_flush_is_an_error() {
    let page = contents("random", 1, 0);
    let mut writer = ZlibWriter::new(0, Z_NO_FLUSH);
    let payload = writer.packet(&page);
    let place = Place::new(1, Layout::Whole);
    let error = decoder("zlib")
        .decode(&payload, &place.runs())
        .expect_err("no flush");
    assert!(matches!(error, MethodError::NotFlushed { .. }), "{error}");
}

#[test]
fn a_zlib_stream_must_begin_with_its_header() {
    let page = contents("text", 1, 0);
    let good = ZlibWriter::new(1, Z_SYNC_FLUSH).packet(&page);
    // Not deflate; a window of 64 KiB; check bits wrong; a preset dictionary.
    for header in [[0x77, 0x01], [0x88, 0x1c], [0x78, 0x02], [0x78, 0x20]] {
        let mut payload = good.clone();
        payload[..2].copy_from_slice(&header);
        let place = Place::new(1, Layout::Whole);
        let error = decoder("zlib")
            .decode(&payload, &place.runs())
            .expect_err("header");
        let expected = MethodError::Header {
            method: "zlib",
            got: header,
        };
        assert_eq!(error, expected);
    }
}

#[test]
fn a_table_must_hold_lengths_of_pages_that_add_up() {
    let pages = contents("alternating", 4, 1);
    for name in ["qpl", "uadk"] {
        let encoder =
            &mut (method(name).expect(name).encoder)(&EncoderSettings::software(0)).expect(name);
        let mut good = Vec::new();
        encoder.encode(&pages, &mut good).expect(name);
        let first = u32::from_be_bytes(*good.first_chunk().expect("a table"));
        let longer = first + 1;
        for length in [0, 4097, u32::MAX, 1 << 31, longer, first - 1] {
            let mut payload = good.clone();
            payload[..4].copy_from_slice(&length.to_be_bytes());
            let place = Place::new(4, Layout::Scattered);
            let result = decoder(name).decode(&payload, &place.runs());
            assert!(result.is_err(), "{name}, length {length}");
            assert_eq!(
                place.pages(),
                vec![CANARY; 4 * PAGE_SIZE],
                "nothing written"
            );
        }
    }
}

#[test]
fn an_lz4_block_must_give_exactly_what_its_head_says() {
    let pages = contents("text", 4, 1);
    let encoder =
        &mut (method("lz4").expect("lz4").encoder)(&EncoderSettings::software(0)).expect("lz4");
    let mut good = Vec::new();
    encoder.encode(&pages, &mut good).expect("lz4");
    assert_eq!(good[..4], [0, 0, 0x40, 0], "bytes of four pages");
    for (head, there, error) in [
        (3 * PAGE_SIZE, 3, "no block of the pages"),
        (5 * PAGE_SIZE, 5, "fills 16384 of 20480"),
        (4 * PAGE_SIZE - 1, 4, "fills 16383 of 16384"),
        (4 * PAGE_SIZE + 1, 4, "gives more than 16384"),
        (usize::try_from(u32::MAX).expect("64 bits"), 4, "gives more"),
        (0, 4, "fills 0 of 16384"),
    ] {
        let mut payload = good.clone();
        payload[..4].copy_from_slice(&u32::try_from(head).expect("32 bits").to_be_bytes());
        for layout in LAYOUTS {
            let place = Place::new(there, layout);
            let got = decoder("lz4")
                .decode(&payload, &place.runs())
                .expect_err("a wrong head");
            assert!(got.to_string().contains(error), "{head}: {got}");
            place.assert_rest_untouched("lz4");
        }
    }
}

#[test]
fn a_page_that_gives_more_or_fewer_bytes_than_a_page_is_an_error() {
    for name in ["qpl", "uadk"] {
        for (bytes, long) in [(PAGE_SIZE - 1, false), (1, false), (PAGE_SIZE + 1, true)] {
            let mut stream = zlib_stream(&vec![7; bytes]);
            if name == "qpl" {
                stream = stream[2..stream.len() - 4].to_vec();
            }
            let mut payload = u32::try_from(stream.len())
                .expect("short")
                .to_be_bytes()
                .to_vec();
            payload.extend_from_slice(&stream);
            let place = Place::new(1, Layout::Whole);
            let error = decoder(name)
                .decode(&payload, &place.runs())
                .expect_err("another length than a page's");
            let is_long = matches!(error, MethodError::Long { .. });
            let is_short = matches!(error, MethodError::Short { .. });
            assert_eq!((is_long, is_short), (long, !long), "{name}: {error}");
            place.assert_rest_untouched(name);
        }
    }
}

#[test]
fn a_zstd_window_beyond_the_limit_is_an_error() {
    let place = Place::new(1, Layout::Whole);
    decoder("zstd")
        .decode(&zstd_frame_with_window_log(27), &place.runs())
        .expect("the limit itself");
    let error = decoder("zstd")
        .decode(&zstd_frame_with_window_log(28), &place.runs())
        .expect_err("beyond the limit");
    assert!(matches!(error, MethodError::Damaged { .. }), "{error}");
    assert_eq!(place.pages(), vec![b'w'; PAGE_SIZE]);
}

/// Returns the default limit of a relay for a source with `channels` channels, less the payloads of random pages.
fn limit(channels: usize) -> MemoryLimit {
    MemoryLimit::new((64 << 20) + channels * ((1 << 20) - 128 * PAGE_SIZE))
}

/// Decodes `payload`, which is a packet of `pages`, on `channels` new decoders.
fn share(channels: usize, payload: &[u8], pages: &[u8]) -> Result<(), MethodError> {
    let limit = limit(channels);
    let mut decoders: Vec<_> = (0..channels).map(|_| decoder("zstd")).collect();
    for decoder in &mut decoders {
        decoder.limit_memory(&limit);
        let place = Place::new(pages.len() / PAGE_SIZE, Layout::Whole);
        decoder.decode(payload, &place.runs())?;
        assert!(place.pages() == pages);
    }
    drop(decoders);
    assert_eq!(limit.used(), 0);
    Ok(())
}

#[test]
fn windows_of_qemus_levels_fit_and_more_than_is_allowed_is_refused() {
    let pages = contents("alternating", 128, 0);
    for level in 1..=20 {
        let payload = ZstdWriter::new(level).packet(&pages);
        // Level 20 has windows of 32 MiB.
        let channels = if level == 20 { 2 } else { 8 };
        for channels in 1..=channels {
            share(channels, &payload, &pages).unwrap_or_else(|error| panic!("{level}: {error}"));
        }
    }
    let payload = ZstdWriter::new(20).packet(&pages);
    let error = share(3, &payload, &pages).unwrap_err();
    let MethodError::Memory { source, .. } = error else {
        panic!("{error}");
    };
    assert!(source.wanted > 32 << 20, "{source}");
    assert!(source.to_string().contains("--memory-limit"), "{source}");
}

#[test]
fn windows_of_our_own_channels_fit_whatever_their_number_and_level() {
    let pages = contents("alternating", 128, 0);
    let zstd = method("zstd").expect("zstd");
    for level in 0..=20 {
        for channels in [1, 2, 3, 8, 16, 17, 64, 255] {
            let settings = EncoderSettings {
                window_max: (64 << 20) / channels,
                ..EncoderSettings::software(level)
            };
            let mut encoder = (zstd.encoder)(&settings).expect("zstd");
            let mut payload = Vec::new();
            encoder.encode(&pages, &mut payload).expect("zstd");
            share(channels, &payload, &pages)
                .unwrap_or_else(|error| panic!("level {level}, {channels} channels: {error}"));
        }
    }
}
