//! Tests invalid bytes on the main channel. Each must cause an error that names the fault. None may cause a panic, an
//! allocation whose size the peer selects, or a page outside its block.

mod common;

use common::{assert_fault, connection, events};
use hotlift_wire::main_channel::{
    Configuration, DeviceLengths, MainDecoder, MainEncoder, MainEvent, Step, VmDescription,
};
use hotlift_wire::{RamBlockEntry, WireError, limits};
use proptest::prelude::*;

const PAGE: u64 = 4096;

/// Returns a decoder in the first PART section of a main channel.
fn inside_ram() -> MainDecoder {
    let mut out = between_sections();
    out.push(2);
    out.extend(be32(0));
    after(&out)
}

/// Returns a main channel up to the end of the START section of `ram` (id 0; blocks `a` of 2 pages, `b` of 1).
fn between_sections() -> Vec<u8> {
    let blocks = [
        RamBlockEntry::new("a", 2 * PAGE),
        RamBlockEntry::new("b", PAGE),
    ];
    let (mut encoder, mut out) = start();
    encoder.ram_start(&blocks, true, &mut out).unwrap();
    out
}

fn start() -> (MainEncoder, Vec<u8>) {
    let mut out = Vec::new();
    let configuration = Configuration {
        machine: "hotlift".into(),
        ..Default::default()
    };
    let encoder = MainEncoder::new(&configuration, &mut out).unwrap();
    (encoder, out)
}

/// Returns a decoder that has read `bytes`.
fn after(bytes: &[u8]) -> MainDecoder {
    let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
    let mut position = 0;
    while let Step::Event { consumed, .. } = decoder.next(&bytes[position..]).unwrap() {
        position += consumed;
    }
    assert_eq!(position, bytes.len());
    decoder
}

fn be32(value: u32) -> [u8; 4] {
    value.to_be_bytes()
}

/// Returns the prefix of a device's payload of `length` bytes.
fn prefix(length: u32) -> Vec<u8> {
    [be32(length), be32(length ^ u32::from_be_bytes(*b"HLDL"))].concat()
}

fn record(word: u64, rest: &[u8]) -> Vec<u8> {
    [&word.to_be_bytes(), rest].concat()
}

/// Returns the error that `bytes` cause in `decoder`.
fn fault(mut decoder: MainDecoder, bytes: &[u8]) -> WireError {
    let mut position = 0;
    loop {
        match decoder.next(&bytes[position..]) {
            Ok(Step::Event { consumed, .. }) => position += consumed,
            Ok(Step::Need(more)) => panic!("waits for {more} bytes at {position}"),
            Err(error) => return error,
        }
    }
}

#[test]
fn a_page_record_carries_exactly_one_flag() {
    let known = [0x002, 0x004, 0x008, 0x010, 0x040, 0x080, 0x100, 0x200];
    for flags in 0..0x1000 {
        let one = known.contains(&(flags & !0x20));
        let end = [0x10, 0x200].contains(&(flags & !0x20));
        let result = inside_ram().next(&record(flags, b"\x01a\x00")).map(drop);
        if !one || (end && flags & 0x20 != 0) {
            assert_fault!(result.unwrap_err(), WireError::Unknown { .. });
        } else {
            let refused = [0x04, 0x80].contains(&(flags & !0x20)) || flags & 0x20 != 0;
            // Only an XBZRLE page has an invalid byte so early.
            assert_eq!(result.is_err(), refused || flags == 0x40, "{flags:#x}");
        }
    }
}

#[test]
fn a_first_record_cannot_continue_a_block() {
    assert_fault!(
        fault(inside_ram(), &record(0x22, &[0])),
        WireError::NoCurrentBlock
    );
}

#[test]
fn a_page_lies_in_a_listed_block() {
    assert_fault!(
        fault(inside_ram(), &record(0x02, b"\x01c\x00")),
        WireError::UnknownBlock { block } if block == "c"
    );
    assert_fault!(
        fault(inside_ram(), &record(0x02, b"\x00\x00")),
        WireError::Empty { .. }
    );
    for offset in [2 * PAGE, 1 << 63, !0xfff] {
        assert_fault!(
            fault(inside_ram(), &record(offset | 0x02, b"\x01a\x00")),
            WireError::BadPageOffset { offset: got, .. } if *got == offset
        );
    }
}

#[test]
fn a_page_record_is_bounded() {
    assert_fault!(
        fault(inside_ram(), &record(0x02, b"\x01a\x01")),
        WireError::Mismatch { .. }
    );
    assert_fault!(
        fault(inside_ram(), &record(0x40, b"\x01a\x01\x10\x01")),
        WireError::OverLimit { got: 4097, .. }
    );
    assert_fault!(
        fault(inside_ram(), &record(0x40, b"\x01a\x01\x00\x01")),
        WireError::Empty { .. }
    );
    assert_fault!(
        fault(inside_ram(), &record(0x100, b"\x01a\x00\x00\x10\x0e")),
        WireError::OverLimit { got: 4110, .. }
    );
}

#[test]
fn a_block_list_adds_up() {
    let section = |total: u64, blocks: &[(&[u8], u64)]| {
        let (_, mut out) = start();
        out.extend(b"\x01\0\0\0\0\x03ram\0\0\0\0\0\0\0\x04");
        out.extend(total.to_be_bytes());
        for (name, length) in blocks {
            out.push(u8::try_from(name.len()).unwrap());
            out.extend(*name);
            out.extend(length.to_be_bytes());
        }
        let decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
        fault(decoder, &out)
    };
    let bad_length = |total, length| {
        let fault = section(total, &[(b"a", length)]);
        assert!(matches!(fault, WireError::BadBlockLength { .. }), "{fault}");
    };
    bad_length(PAGE | 4, 2 * PAGE);
    bad_length(PAGE | 4, 0);
    bad_length((2 * PAGE) | 4, PAGE + 1);
    bad_length(PAGE | 4, !0xfff);
    assert_fault!(
        section((limits::RAM + PAGE) | 4, &[(b"a", PAGE)]),
        WireError::OverLimit {
            what: "length of all RAM blocks",
            ..
        }
    );
    assert_fault!(
        section((2 * PAGE) | 4, &[(b"a", PAGE), (b"a", PAGE)]),
        WireError::DuplicateBlock { .. }
    );
    assert_fault!(section(PAGE | 8, &[]), WireError::Mismatch { .. });

    let names: Vec<String> = (0..=limits::RAM_BLOCKS).map(|n| n.to_string()).collect();
    let many: Vec<_> = names.iter().map(|name| (name.as_bytes(), PAGE)).collect();
    assert_fault!(
        section(limits::RAM | 4, &many),
        WireError::OverLimit {
            what: "number of RAM blocks",
            ..
        }
    );
}

#[test]
fn sections_keep_their_order() {
    let at_start = || after_configuration();
    let started = || after(&between_sections());
    let part = [&[2][..], &be32(0)].concat();
    assert_fault!(
        fault(at_start(), &part),
        WireError::UnknownSectionId { id: 0 }
    );
    assert_fault!(
        fault(started(), &[&[2][..], &be32(1)].concat()),
        WireError::UnknownSectionId { id: 1 }
    );
    assert_fault!(
        fault(started(), b"\x01\0\0\0\x05\x03ram\0\0\0\x01\0\0\0\x04"),
        WireError::OutOfOrder { .. }
    );
    assert_fault!(
        fault(started(), b"\x01\0\0\0\0\x03ram\0\0\0\0\0\0\0\x04"),
        WireError::DuplicateSection { .. }
    );
    assert_fault!(
        fault(at_start(), b"\x01\0\0\0\0\x03ram\0\0\0\0\0\0\0\x03"),
        WireError::Mismatch { got: 3, .. }
    );
    assert_fault!(
        fault(
            at_start(),
            b"\x01\0\0\0\0\x0cdirty-bitmap\0\0\0\0\0\0\0\x01"
        ),
        WireError::UnknownDevice { .. }
    );
    for misplaced in [0x00, 0x05, 0x06, 0x07, 0x7e] {
        assert_fault!(fault(started(), &[misplaced]), WireError::OutOfOrder { .. });
    }
    assert_fault!(fault(started(), &[0x09]), WireError::Unknown { got: 9, .. });

    let eos = 0x10u64.to_be_bytes();
    let end = [&[3][..], &be32(0), &eos, &[0x7e], &be32(0)].concat();
    assert_fault!(
        fault(started(), &[&end[..], &part].concat()),
        WireError::UnknownSectionId { id: 0 }
    );
    let foreign = [&[3][..], &be32(0), &eos, &[0x7e], &be32(9)].concat();
    assert_fault!(
        fault(started(), &foreign),
        WireError::Mismatch {
            expected: 0,
            got: 9,
            ..
        }
    );
    let missing = [&[3][..], &be32(0), &eos, &[0]].concat();
    assert_fault!(
        fault(started(), &missing),
        WireError::Mismatch { expected: 0x7e, .. }
    );

    let finished = [&end[..], b"\0\x06\0\0\0\x02{}", b"x"].concat();
    assert_fault!(
        fault(started(), &finished),
        WireError::Trailing { extra: 1, .. }
    );
    let endless = [&end[..], b"\0\x06\x7f\0\0\0"].concat();
    assert_fault!(fault(started(), &endless), WireError::OverLimit { .. });
}

fn after_configuration() -> MainDecoder {
    // The configuration ends before the first foreign byte: read it with a command.
    let (_, mut out) = start();
    out.extend(b"\x08\0\x01\0\0");
    after(&out)
}

#[test]
fn a_device_is_announced_once_and_bounded() {
    let section = b"\x04\0\0\0\x01\x03cpu\0\0\0\0\0\0\0\x01";
    let whole = [&section[..], &prefix(2), b"ab", &[0x7e], &be32(1)].concat();
    let twice = [&whole[..], &whole].concat();
    assert_fault!(
        fault(after_configuration(), &twice),
        WireError::DuplicateSection { id: 1, .. }
    );
    let mut other_device = twice.clone();
    other_device[whole.len() + 12] = 1;
    assert_fault!(
        fault(after_configuration(), &other_device),
        WireError::DuplicateSection {
            id: 1,
            instance_id: 1,
            ..
        }
    );
    let mut renumbered = twice;
    renumbered[whole.len() + 4] = 2;
    assert_fault!(
        fault(after_configuration(), &renumbered),
        WireError::DuplicateSection { id: 2, .. }
    );
    let huge = [&section[..], &prefix(u32::MAX)].concat();
    assert_fault!(
        fault(after_configuration(), &huge),
        WireError::OverLimit { .. }
    );
    // A name that is longer than its length byte, which shifts everything after it by one.
    let mut longer = [&section[..], &prefix(24), &[0; 24], &[0x7e], &be32(1)].concat();
    longer[5] += 1;
    assert_fault!(
        fault(after_configuration(), &longer),
        WireError::Mismatch { .. }
    );
    // With any damage the decoder never waits for the bytes of a wrong length.
    for at in 0..8 {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = whole.clone();
            damaged[section.len() + at] ^= flip;
            assert_fault!(
                fault(after_configuration(), &damaged),
                WireError::Mismatch { .. }
            );
        }
    }

    let unknown = DeviceLengths::Description(VmDescription::default());
    let (_, mut out) = start();
    out.extend(section);
    assert_fault!(
        fault(MainDecoder::new(unknown), &out),
        WireError::UnknownDevice { .. }
    );
}

#[test]
fn the_number_of_sections_is_bounded() {
    let mut decoder = after_configuration();
    for id in 0..=u32::try_from(limits::SECTIONS).unwrap() {
        let head = [&[4][..], &be32(id), b"\x01d", &be32(id), &be32(1)].concat();
        let bytes = [&head[..], &prefix(0), &[0x7e], &be32(id)].concat();
        let mut position = 0;
        while position < bytes.len() {
            match decoder.next(&bytes[position..]) {
                Ok(Step::Event { consumed, .. }) => position += consumed,
                Ok(Step::Need(_)) => panic!("waits"),
                Err(error) => {
                    assert_eq!(usize::try_from(id).unwrap(), limits::SECTIONS);
                    assert_fault!(error, WireError::OverLimit { .. });
                    return;
                }
            }
        }
    }
    panic!("no limit");
}

#[test]
fn a_command_has_its_length_and_belongs_to_precopy() {
    let started = || after(&between_sections());
    for (id, length) in [(1, 1), (2, 3), (2, 5), (3, 15), (11, 1)] {
        let bytes = [8, 0, id, 0, length];
        assert_fault!(fault(started(), &bytes), WireError::Mismatch { .. });
    }
    for id in 4..=10 {
        let bytes = [8, 0, id, 0, 0];
        assert_fault!(fault(started(), &bytes), WireError::Unsupported { .. });
    }
    for id in [0, 12, 0xff] {
        let bytes = [8, 0, id, 0, 0];
        assert_fault!(fault(started(), &bytes), WireError::Unknown { .. });
    }
}

#[test]
fn a_postcopy_decoder_accepts_its_commands_and_continues_after_a_reconnect() {
    let started = || after(&between_sections()).taking_postcopy();
    for id in [4, 5, 9] {
        let bytes = [8, 0, id, 0, 0];
        let mut decoder = started();
        let step = decoder.next(&bytes).unwrap();
        assert!(matches!(
            step,
            Step::Event {
                event: MainEvent::Postcopy(_),
                consumed: 5
            }
        ));
    }
    assert_fault!(
        fault(started(), &[8, 0, 8, 0, 0]),
        WireError::Unsupported { .. }
    );
    // Before the list of blocks a discard is invalid.
    let (_, out) = start();
    let early = after(&[&out[..], b"\x08\0\x01\0\0"].concat()).taking_postcopy();
    let discard = b"\x08\0\x06\0\x04\0\x01a\0";
    assert_fault!(fault(early, discard), WireError::UnknownBlock { .. });

    // A page can only continue a block on the same connection.
    let page = record(8, &[b"\x01b", &[1_u8; 4096][..]].concat());
    let continued = record(0x22, b"\0");
    let part = [&b"\x02\0\0\0\0"[..], &page, &continued].concat();
    let mut decoder = started();
    let mut position = 0;
    while let Step::Event { consumed, .. } = decoder.next(&part[position..]).unwrap() {
        position += consumed;
    }
    assert_eq!(position, part.len());
    let part = [&b"\x02\0\0\0\0"[..], &continued].concat();
    decoder.reconnect();
    assert_fault!(fault(decoder, &part), WireError::NoCurrentBlock);
}

#[test]
fn a_configuration_is_bounded() {
    let begin = || MainDecoder::new(DeviceLengths::LengthPrefixed);
    let configured = |rest: &[u8]| [b"QEVM\0\0\0\x03\x07", rest].concat();
    assert_fault!(
        fault(begin(), b"QEVN\0\0\0\x03"),
        WireError::Mismatch { .. }
    );
    assert_fault!(
        fault(begin(), b"QEVM\0\0\0\x02"),
        WireError::Mismatch { .. }
    );
    assert_fault!(
        fault(begin(), b"QEVM\0\0\0\x03\x09"),
        WireError::Unknown { .. }
    );
    let endless = configured(&be32(u32::MAX));
    assert_fault!(fault(begin(), &endless), WireError::OverLimit { .. });
    assert_fault!(
        fault(begin(), &configured(&be32(0))),
        WireError::Empty { .. }
    );

    let subsection = |name: &[u8], rest: &[u8]| {
        let length = u8::try_from(name.len()).unwrap();
        configured(&[b"\0\0\0\x01m\x05", &[length][..], name, rest].concat())
    };
    assert_fault!(
        fault(begin(), &subsection(b"configuration/else", b"\0\0\0\x01")),
        WireError::Unsupported { .. }
    );
    assert_fault!(
        fault(begin(), &subsection(b"configuration/uuid", b"\0\0\0\x02")),
        WireError::Mismatch { got: 2, .. }
    );
    let pages = b"\0\0\0\x01\0\0\0\x10\x08";
    assert_fault!(
        fault(
            begin(),
            &subsection(b"configuration/target-page-bits", pages)
        ),
        WireError::Mismatch { got: 16, .. }
    );
    let capabilities: &[u8] = b"configuration/capabilities";
    assert_fault!(
        fault(
            begin(),
            &subsection(capabilities, b"\0\0\0\x01\xff\xff\xff\xff")
        ),
        WireError::OverLimit { .. }
    );
    let mapped = b"\0\0\0\x01\0\0\0\x01\x0amapped-ram\x08";
    assert_fault!(
        fault(begin(), &subsection(capabilities, mapped)),
        WireError::Unsupported { .. }
    );
}

#[test]
fn a_description_cannot_be_deeper_or_longer_than_its_limits() {
    let nested = format!(
        r#"{{"devices":[{{"name":"d","subsections":{}{}}}]}}"#,
        r#"[{"vmsd_name":"s","subsections":"#.repeat(100_000),
        "}]".repeat(100_000)
    );
    let fields = r#"{"size":9223372036854775807,"array_len":3}"#;
    let overflow = format!(r#"{{"devices":[{{"name":"d","fields":[{fields}]}}]}}"#);
    let negative = r#"{"devices":[{"name":"d","fields":[{"size":-1}]}]}"#.to_owned();
    let devices: Vec<String> = (0..=limits::SECTIONS)
        .map(|n| format!(r#"{{"name":"{n}"}}"#))
        .collect();
    let many = format!(r#"{{"devices":[{}]}}"#, devices.join(","));
    let twice = r#"{"devices":[{"name":"d"},{"name":"d"}]}"#.to_owned();
    for text in [nested, overflow, negative, many, twice] {
        assert_fault!(
            VmDescription::parse(text.as_bytes()).unwrap_err(),
            WireError::Description { .. }
        );
    }
    assert_fault!(
        VmDescription::parse(&vec![b' '; limits::VM_DESCRIPTION + 1]).unwrap_err(),
        WireError::OverLimit { .. }
    );
}

/// Reads `main` until it ends, needs more or is refused. It must not panic or request too much.
fn survive(mut decoder: MainDecoder, main: &[u8]) {
    let mut position = 0;
    loop {
        match decoder.next(&main[position..]) {
            Ok(Step::Event { event, consumed }) => {
                if let MainEvent::RamPage { block, offset, .. } = event {
                    let end = offset.checked_add(PAGE).unwrap();
                    assert!(end <= decoder.blocks()[block].used_length);
                }
                position += consumed;
            }
            Ok(Step::Need(more)) => {
                assert!(more >= 1 && main.len() - position + more <= limits::MAIN_RECORD);
                return;
            }
            Err(_) => return,
        }
    }
}

#[test]
fn a_recorded_main_channel_with_any_byte_changed_is_survived() {
    let main = connection("10.0-none-return-path", "main");
    let text = VmDescription::find(&main).unwrap();
    let description = VmDescription::parse(text).unwrap();
    for at in 0..main.len() - text.len() {
        let mut bad = main.clone();
        bad[at] ^= [0x01, 0x20, 0x80, 0xff][at % 4];
        let lengths = DeviceLengths::Description(description.clone());
        survive(MainDecoder::new(lengths), &bad);
    }
}

proptest! {
    #[test]
    fn any_bytes_at_all_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        survive(MainDecoder::new(DeviceLengths::LengthPrefixed), &bytes);
        survive(after(&between_sections()), &bytes);
        survive(inside_ram(), &bytes);
        let _ = VmDescription::find(&bytes);
        let _ = VmDescription::parse(&bytes);
    }

    #[test]
    fn a_stream_in_any_pieces_is_the_same_stream(
        pieces in proptest::collection::vec(1..500usize, 200..400),
    ) {
        let main = connection("10.0-none-return-path", "main");
        let whole = events(&mut common::decoder_for(&main), &main).unwrap();
        let mut decoder = common::decoder_for(&main);
        let (mut position, mut arrived, mut count) = (0, 0, 0);
        let mut pieces = pieces.into_iter().cycle();
        while count < whole.len() {
            match decoder.next(&main[position..arrived]).unwrap() {
                Step::Need(more) => {
                    prop_assert!(arrived + more <= main.len());
                    arrived = (arrived + pieces.next().unwrap()).min(main.len());
                }
                Step::Event { event, consumed } => {
                    prop_assert_eq!((position, &event), (whole[count].0, &whole[count].1));
                    position += consumed;
                    count += 1;
                }
            }
        }
        prop_assert_eq!(position, main.len());
    }
}
