//! Tests the page records of older sources: XBZRLE deltas and `compress` pages.

mod support;

use std::path::Path;

use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_methods::MethodError;
use hotlift_methods::legacy::compress::{Deflater, Inflater, LEVELS};
use hotlift_methods::legacy::xbzrle::{self, Delta};
use hotlift_testkit::qemu::Release;
use hotlift_wire::main_channel::{
    Configuration, DeviceLengths, MainDecoder, MainEncoder, MainEvent, PageContent, SectionKind,
    Step, VmDescription,
};
use proptest::prelude::*;
use support::machine::load;
use support::stream::{RAM_PAGES, ram_page};
use support::{Noise, qemu};

/// Returns the main channel of a recorded stream.
fn recorded(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../hotlift-wire/fixtures")
        .join(name)
        .join("main.zst");
    let packed = std::fs::read(&path).expect("a fixture");
    zstd::decode_all(packed.as_slice()).expect("a zstd file")
}

/// Returns the guest's RAM after a recorded stream without multifd, and the counts of its pages sent as XBZRLE and as
/// `compress`.
fn loaded(main: &[u8]) -> (Vec<u8>, usize, usize) {
    let text = VmDescription::find(main).expect("a description");
    let description = VmDescription::parse(text).expect("QEMU's description");
    let mut decoder = MainDecoder::new(DeviceLengths::Description(description));
    let mut inflater = Inflater::new().expect("libdeflate");
    let mut memory = vec![[0xdd_u8; PAGE_SIZE]; RAM_PAGES];
    let (mut deltas, mut compressed) = (0, 0);
    let mut rest = main;
    let mut blocks = Vec::new();
    while let Step::Event { event, consumed } = decoder.next(rest).expect("a main channel") {
        rest = &rest[consumed..];
        if let MainEvent::RamBlocks(list) = &event {
            blocks.clone_from(list);
        }
        let MainEvent::RamPage {
            block,
            offset,
            content,
        } = event
        else {
            continue;
        };
        if blocks[block].name != "pc.ram" {
            continue;
        }
        let page = &mut memory[usize::try_from(offset).expect("small") / PAGE_SIZE];
        match content {
            PageContent::Zero => page.fill(0),
            PageContent::Normal(bytes) => *page = *bytes,
            PageContent::Xbzrle(delta) => {
                xbzrle::apply(delta, page).expect("QEMU's delta");
                deltas += 1;
            }
            PageContent::Compressed(stream) => {
                inflater
                    .inflate(stream, GuestRun::of_buffer(page))
                    .expect("QEMU's stream");
                compressed += 1;
            }
        }
    }
    (memory.as_flattened().to_vec(), deltas, compressed)
}

#[test]
fn records_of_qemu_7_2_decode_to_the_guests_pages() {
    for name in ["7.2-xbzrle", "7.2-compress"] {
        let (memory, deltas, compressed) = loaded(&recorded(name));
        match name {
            "7.2-xbzrle" => assert!(deltas >= 5, "{deltas} deltas"),
            _ => assert!(compressed >= 50, "{compressed} compressed pages"),
        }
        for (number, page) in memory.chunks(PAGE_SIZE).enumerate() {
            // The guest counts in the first two bytes of the pages 1 to 15.
            let counted = if (1..16).contains(&number) { 2 } else { 0 };
            assert!(
                page[counted..] == ram_page(number)[counted..],
                "{name}: page {number} differs"
            );
        }
    }
}

/// Returns a recorded stream with one more section before the end of RAM. In it, our deltas change every page of the guest that
/// held text: its middle, its ends, and nearly all of it.
fn with_deltas(main: &[u8]) -> (Vec<u8>, String) {
    let text = VmDescription::find(main).expect("a description");
    let description = VmDescription::parse(text).expect("QEMU's description");
    let mut decoder = MainDecoder::new(DeviceLengths::Description(description));
    let (mut rest, mut machine) = (main, String::new());
    let end = loop {
        let at = main.len() - rest.len();
        let Step::Event { event, consumed } = decoder.next(rest).expect("a main channel") else {
            panic!("no end of RAM");
        };
        rest = &rest[consumed..];
        match event {
            MainEvent::Configuration(found) => machine = found.machine.to_owned(),
            MainEvent::SectionStart {
                kind: SectionKind::End,
                ..
            } => break at,
            _ => {}
        }
    };
    let blocks = decoder.blocks().to_vec();
    let ram = blocks.iter().position(|block| block.name == "pc.ram");
    let ram = ram.expect("the guest's RAM");
    let before = loaded(main).0;
    let (mut setup, mut part) = (Vec::new(), Vec::new());
    let configuration = Configuration {
        machine: machine.clone(),
        ..Configuration::default()
    };
    let mut encoder = MainEncoder::new(&configuration, &mut setup).expect("a stream");
    encoder.ram_start(&blocks, false, &mut setup).expect("RAM");
    encoder.ram_part(&mut part).expect("a section");
    for (number, old) in before.as_chunks().0.iter().enumerate() {
        // The guest counts in the pages from 1 to 15: they stay unchanged.
        if old[0] == 0 || number < 16 {
            continue;
        }
        let mut delta = Vec::new();
        let encoded = xbzrle::encode(old, &changed(old, number), PAGE_SIZE, &mut delta);
        assert_eq!(encoded, Delta::Encoded, "page {number}");
        let offset = (number * PAGE_SIZE) as u64;
        encoder
            .xbzrle_page(ram, offset, &delta, &mut part)
            .expect("a record");
    }
    encoder.ram_eos(&mut part).expect("the section's end");
    // The recorded section's number, in its head and in its footer.
    let footer = part.len() - 4;
    let id = &main[end + 1..end + 5];
    part[1..5].copy_from_slice(id);
    part[footer..].copy_from_slice(id);
    ([&main[..end], &part, &main[end..]].concat(), machine)
}

/// Returns a later state of a page.
fn changed(old: &[u8; PAGE_SIZE], number: usize) -> [u8; PAGE_SIZE] {
    let mut new = *old;
    let changes = match number % 4 {
        0 => 2000..2100,
        1 => 0..1,
        2 => PAGE_SIZE - 1..PAGE_SIZE,
        _ => 1..PAGE_SIZE - 20,
    };
    new[changes].iter_mut().for_each(|byte| *byte ^= 0x55);
    new
}

#[test]
fn real_qemus_apply_the_deltas_that_we_write() {
    for (qemu, name) in [
        (Release::V7.program(), "7.2-off"),
        (Release::V10.program(), "10.0-off"),
    ] {
        let Some(qemu) = qemu else { continue };
        let main = recorded(name);
        let before = loaded(&main).0;
        let (main, machine) = with_deltas(&main);
        let (expected, deltas, _) = loaded(&main);
        assert!(deltas > 200, "{deltas} deltas");
        let got = load(&qemu, &machine, main, None)
            .unwrap_or_else(|error| panic!("{name}: {error}"))
            .ram;
        let pages = before.as_chunks::<PAGE_SIZE>().0;
        for (number, old) in pages.iter().enumerate() {
            let at = number * PAGE_SIZE..(number + 1) * PAGE_SIZE;
            assert!(
                got[at.clone()] == expected[at.clone()],
                "{name}: page {number}"
            );
            if number >= 16 && old[0] != 0 {
                assert!(got[at] == changed(old, number), "{name}: page {number}");
            }
        }
    }
}

#[test]
fn a_delta_is_what_the_format_says() {
    let old = [7; PAGE_SIZE];
    let mut new = old;
    new[16] = 0x72;
    new[32] = 0x56;
    let mut delta = Vec::new();
    assert_eq!(xbzrle::encode(&old, &new, 4096, &mut delta), Delta::Encoded);
    assert_eq!(delta, [0x10, 0x01, 0x72, 0x0f, 0x01, 0x56]);

    // Lengths of two bytes: keep 300 (0x80 | 44, 2), replace the 3796 that are left.
    let mut new = old;
    new[300..].fill(9);
    delta.clear();
    assert_eq!(xbzrle::encode(&old, &new, 4096, &mut delta), Delta::Encoded);
    assert_eq!(delta[..4], [0x80 | 44, 2, 0x80 | 84, 29]);
    assert_eq!(delta.len(), 4 + 3796);

    assert_eq!(xbzrle::encode(&old, &old, 4096, &mut delta), Delta::Same);
    assert_eq!(delta.len(), 4 + 3796, "nothing is appended for no change");
}

#[test]
fn a_delta_that_breaks_a_rule_is_refused_with_the_rule() {
    let cases: [(&[u8], &str); 11] = [
        (&[], "a length is missing"),
        (&[1], "a length is missing"),
        (&[0x80], "a length is missing"),
        (&[0, 1], "new bytes are missing"),
        (&[0, 0], "a run of nothing to replace"),
        (&[5, 0, 1, 1, 1], "a run of nothing to replace"),
        (&[0, 1, 9, 0, 1, 9], "a run of nothing to keep"),
        (&[0, 1, 9, 4], "a length is missing"),
        (&[0x80, 0x80, 1, 9], "a length of more than 14 bits"),
        (
            &[0x80, 0x20, 1, 9],
            "a run reaches over the end of the page",
        ),
        (
            &[0xff, 0x1f, 2, 9, 9],
            "a run reaches over the end of the page",
        ),
    ];
    for (delta, rule) in cases {
        let error = xbzrle::apply(delta, &mut [0; PAGE_SIZE]).expect_err("a broken delta");
        assert!(
            matches!(error, MethodError::Damaged { reason, .. } if reason == rule),
            "{delta:02x?}: {error}"
        );
    }
    // The last byte of the page is still inside.
    let mut page = [0; PAGE_SIZE];
    xbzrle::apply(&[0xff, 0x1f, 1, 9], &mut page).expect("the last byte");
    assert_eq!(page[PAGE_SIZE - 1], 9);
}

/// Returns a page and a later state of it, from no change to all of it.
fn two_pages() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let edits = prop::collection::vec((0..PAGE_SIZE, 0..400_usize, any::<u8>()), 0..30);
    (prop::collection::vec(0..4_u8, PAGE_SIZE), edits).prop_map(|(old, edits)| {
        let mut new = old.clone();
        for (start, length, byte) in edits {
            let end = (start + length).min(PAGE_SIZE);
            new[start..end].fill(byte % 4);
        }
        (old, new)
    })
}

proptest! {
    #[test]
    fn a_delta_makes_the_old_page_into_the_new(
        (old, new) in two_pages(),
        limit in 2..=PAGE_SIZE,
    ) {
        let [old, new]: [[u8; PAGE_SIZE]; 2] = [old, new].map(|page| page.try_into().unwrap());
        let mut delta = vec![1, 2, 3];
        match xbzrle::encode(&old, &new, limit, &mut delta) {
            Delta::Same => prop_assert!(old == new && delta.len() == 3),
            Delta::Overflow => prop_assert_eq!(delta, [1, 2, 3]),
            Delta::Encoded => {
                prop_assert!(delta.len() - 3 < limit);
                let mut page = old;
                xbzrle::apply(&delta[3..], &mut page).unwrap();
                prop_assert!(page == new);
            }
        }
    }

    #[test]
    fn any_bytes_as_delta_are_an_error_or_a_page(
        delta in prop::collection::vec(any::<u8>(), 0..PAGE_SIZE),
    ) {
        let _ = xbzrle::apply(&delta, &mut [0; PAGE_SIZE]);
    }

    #[test]
    fn any_bytes_as_compressed_page_are_an_error(
        stream in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut inflater = Inflater::new().unwrap();
        prop_assert!(inflater.inflate(&stream, GuestRun::of_buffer(&mut [0; PAGE_SIZE])).is_err());
    }
}

/// Returns `bytes` as one complete stream of stock zlib.
fn deflated(bytes: &[u8], level: i32) -> Vec<u8> {
    let mut out = vec![0; 2 * bytes.len() + 64];
    let mut length = out.len().try_into().expect("small");
    // SAFETY: both buffers are live and of the given lengths.
    let result = unsafe {
        libz_sys::compress2(
            out.as_mut_ptr(),
            &raw mut length,
            bytes.as_ptr(),
            bytes.len().try_into().expect("small"),
            level,
        )
    };
    assert_eq!(result, libz_sys::Z_OK);
    out.truncate(length.try_into().expect("small"));
    out
}

#[test]
fn a_compressed_page_is_one_whole_stream_of_exactly_one_page() {
    let text = ram_page(3);
    let mut inflater = Inflater::new().expect("libdeflate");
    let mut page = [0; PAGE_SIZE];
    let mut inflate = |stream: &[u8]| {
        inflater
            .inflate(stream, GuestRun::of_buffer(&mut page))
            .map(|()| page)
    };
    for level in 0..=9 {
        let stream = deflated(&text, level);
        let page = inflate(&stream).expect("a whole page");
        assert!(page == text[..], "level {level}");

        for length in 0..stream.len() {
            let cut = inflate(&stream[..length]);
            assert!(cut.is_err(), "{length} bytes of level {level}");
        }
        let longer = [&stream[..], &[0]].concat();
        let error = inflate(&longer);
        assert!(matches!(error, Err(MethodError::Leftover { left: 1, .. })));
    }
    let error = inflate(&deflated(&text[1..], 6));
    assert!(matches!(error, Err(MethodError::Short { got: 4095, .. })));
    let error = inflate(&deflated(&[&text[..], b"x"].concat(), 6));
    assert!(matches!(error, Err(MethodError::Long { .. })));

    let mut stream = deflated(&text, 1);
    let last = stream.len() - 1;
    stream[last] ^= 1;
    let error = inflate(&stream);
    assert!(
        matches!(error, Err(MethodError::Damaged { .. })),
        "Adler-32"
    );
}

/// Returns pages without similarities: zero, text, noise, and halves of these.
fn mixed_pages(count: usize) -> Vec<u8> {
    let mut noise = Noise::new(3);
    let mut pages = Vec::new();
    for number in 0..count {
        let mut page = match number % 4 {
            0 => vec![0; PAGE_SIZE],
            _ => ram_page(number),
        };
        if number % 4 >= 2 {
            let from = if number % 4 == 2 { 0 } else { PAGE_SIZE / 2 };
            for byte in &mut page[from..] {
                *byte = noise.next().to_be_bytes()[0];
            }
        }
        pages.extend(page);
    }
    pages
}

#[test]
fn stock_zlib_reads_our_streams_at_every_level_and_what_does_not_shrink_has_none() {
    for level in LEVELS {
        let mut deflater = Deflater::new(level).expect("a level");
        for (number, page) in mixed_pages(24).as_chunks().0.iter().enumerate() {
            let what = format!("level {level}, page {number}");
            let mut out = vec![7];
            let shrinks = deflater.deflate(page, &mut out).expect("a page");
            assert_eq!(shrinks, level > 0 && number % 4 != 2, "{what}");
            let stream = &out[1..];
            if shrinks {
                // With its length before it the record is shorter than the page.
                assert!(stream.len() + 4 < PAGE_SIZE, "{what}");
                let (back, read) = qemu::inflate(stream, 15);
                assert!(back == page && read == stream.len(), "{what}");
            } else {
                assert!(stream.is_empty(), "{what}");
            }
        }
    }
    let above = Deflater::new(10).err();
    assert!(matches!(above, Some(MethodError::Level { level: 10, .. })));
}

/// A page whose record would be at least as long as the page is not compressed: QEMU accepts up to 4109 bytes, but they would
/// not pay.
#[test]
fn a_stream_that_is_just_not_shorter_than_its_page_is_not_kept() {
    let noise: [u8; PAGE_SIZE] = mixed_pages(3)[2 * PAGE_SIZE..].try_into().expect("a page");
    for level in 1..=9 {
        let mut deflater = Deflater::new(level).expect("a level");
        let mut shrinks = Vec::new();
        for zeros in 0..200 {
            let mut page = noise;
            page[..zeros].fill(0);
            let mut out = vec![7];
            shrinks.push(deflater.deflate(&page, &mut out).expect("a page"));
            let length = out.len() - 1;
            assert_eq!(length > 0, shrinks[zeros], "level {level}, {zeros} zeros");
            assert!(length + 4 < PAGE_SIZE, "level {level}, {zeros} zeros");
        }
        assert!(!shrinks[0] && shrinks[199], "level {level}");
    }
}
