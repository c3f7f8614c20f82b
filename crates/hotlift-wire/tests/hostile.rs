//! Bytes that no honest peer sends: each ends in an error that names the fault, never in a panic, an
//! allocation by the peer's number, or a page outside its block.

mod common;

use common::{channels, connection, events, recorded};
use hotlift_wire::main_channel::{
    Configuration, DeviceLengths, MainDecoder, MainEncoder, MainEvent, Step, VmDescription,
};
use hotlift_wire::multifd::{
    Hello, InitialPacket, Method, PacketFields, PacketHeader, PacketLayout, PacketRules,
    PacketWriter, ZeroPageDetection,
};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{RamBlockEntry, WireError, limits};
use proptest::prelude::*;

const PAGE: u64 = 4096;

/// A main channel up to the inside of the first PART section, and the decoder behind it.
fn inside_ram() -> MainDecoder {
    let mut out = between_sections();
    out.push(2);
    out.extend(be32(0));
    after(&out)
}

/// A main channel up to behind the START section of `ram` (id 0; blocks `a` of 2 pages, `b` of 1).
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

/// A decoder that has read `bytes`.
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

fn record(word: u64, rest: &[u8]) -> Vec<u8> {
    [&word.to_be_bytes(), rest].concat()
}

/// The error that `bytes` end in, behind what `decoder` has read.
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

macro_rules! assert_fault {
    ($fault:expr, $pattern:pat $(if $guard:expr)?) => {
        let fault = $fault;
        assert!(matches!(&fault, $pattern $(if $guard)?), "{fault:?}");
    };
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
            // Only an XBZRLE page has a byte to object to so early.
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
        section((2 * PAGE) | 4, &[(b"a", PAGE), (b"a", PAGE)]),
        WireError::DuplicateBlock { .. }
    );
    assert_fault!(section(PAGE | 8, &[]), WireError::Mismatch { .. });

    let names: Vec<String> = (0..=limits::RAM_BLOCKS).map(|n| n.to_string()).collect();
    let many: Vec<_> = names.iter().map(|name| (name.as_bytes(), PAGE)).collect();
    assert_fault!(
        section(!0xfff | 4, &many),
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
    // The configuration ends with the first byte of something else: read it with a command.
    let (_, mut out) = start();
    out.extend(b"\x08\0\x01\0\0");
    after(&out)
}

#[test]
fn a_device_is_announced_once_and_bounded() {
    let section = b"\x04\0\0\0\x01\x03cpu\0\0\0\0\0\0\0\x01";
    let whole = [&section[..], &be32(2), b"ab", &[0x7e], &be32(1)].concat();
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
    let huge = [&section[..], &be32(u32::MAX)].concat();
    assert_fault!(
        fault(after_configuration(), &huge),
        WireError::OverLimit { .. }
    );

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
        let bytes = [&head[..], &be32(0), &[0x7e], &be32(id)].concat();
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
        fault(begin(), b"QEVM\0\0\0\x03\x01"),
        WireError::Mismatch { .. }
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

fn blocks() -> [RamBlockEntry; 2] {
    [
        RamBlockEntry::new("ram", 256 * PAGE),
        RamBlockEntry::new("rom", PAGE),
    ]
}

const RULES: PacketRules = PacketRules {
    layout: PacketLayout::QEMU,
    method: Some(Method::Zlib),
    checksum_required: false,
};

/// A good header for two normal pages and a zero page of `ram`, then changed by `change`.
fn changed(change: impl FnOnce(&mut [u8])) -> Result<(), WireError> {
    let mut writer = PacketWriter::new(RULES.layout, Method::Zlib, false);
    let fields = PacketFields {
        packet_num: 7,
        block: "ram",
        normal: &[PAGE, 0],
        zero: &[255 * PAGE],
        payload_len: 10,
        ..Default::default()
    };
    let mut bytes = writer.header(&fields).unwrap().to_vec();
    change(&mut bytes);
    PacketHeader::new(RULES.layout).decode(&bytes, &RULES, &blocks())
}

fn changed_field(at: usize, value: u32) -> WireError {
    changed(|bytes| bytes[at..at + 4].copy_from_slice(&be32(value))).unwrap_err()
}

#[test]
fn a_packet_header_is_bounded() {
    changed(|_| {}).unwrap();
    assert_fault!(changed_field(0, 0), WireError::Mismatch { .. });
    assert_fault!(changed_field(4, 2), WireError::Mismatch { .. });
    for alloc in [129, u32::MAX] {
        assert_fault!(changed_field(12, alloc), WireError::OverLimit { .. });
    }
    for pages in [129, u32::MAX] {
        assert_fault!(changed_field(16, pages), WireError::OverLimit { .. });
    }
    // Two pages are normal: 127 zero pages would be one too many.
    assert_fault!(
        changed_field(32, 127),
        WireError::OverLimit { limit: 126, .. }
    );
    let longest = u32::try_from(RULES.layout.max_payload()).unwrap();
    assert_fault!(changed_field(20, longest + 1), WireError::OverLimit { .. });
    assert_fault!(changed_field(20, 0), WireError::Empty { .. });
}

#[test]
fn a_packet_carries_the_migrations_method_and_nothing_unknown() {
    for flags in [0x00, 0x04, 0x20] {
        assert_fault!(changed_field(8, flags), WireError::Mismatch { .. });
    }
    for flags in [0x06, 0x3e, 0x82, 0x8000_0002] {
        assert_fault!(changed_field(8, flags), WireError::Unknown { .. });
    }
    assert_fault!(changed_field(8, 0x42), WireError::Unsupported { .. });
}

#[test]
fn every_page_of_a_packet_lies_in_its_block() {
    let offset_at = |entry: usize, offset: u64| {
        changed(|bytes| {
            bytes[320 + 8 * entry..][..8].copy_from_slice(&offset.to_be_bytes());
        })
    };
    for entry in 0..3 {
        offset_at(entry, 254 * PAGE).unwrap();
        for offset in [1, PAGE - 1, 256 * PAGE, u64::MAX, !0xfff] {
            assert_fault!(
                offset_at(entry, offset).unwrap_err(),
                WireError::BadPageOffset { .. }
            );
        }
    }
    // An entry that is not used may be anything.
    offset_at(3, u64::MAX).unwrap();
}

#[test]
fn a_packet_names_a_listed_block() {
    let named = |name: &[u8]| {
        changed(|bytes| bytes[64..64 + name.len()].copy_from_slice(name)).unwrap_err()
    };
    assert_fault!(named(b"rox"), WireError::UnknownBlock { .. });
    assert_fault!(named(b"\0"), WireError::UnknownBlock { .. });
    assert_fault!(named(&[b'x'; 256]), WireError::OverLimit { .. });
    assert_fault!(named(b"rom"), WireError::BadPageOffset { .. });
}

#[test]
fn a_packet_header_has_exactly_its_length() {
    let mut writer = PacketWriter::new(RULES.layout, Method::Zlib, false);
    let mut bytes = writer.header(&PacketFields::default()).unwrap().to_vec();
    let mut header = PacketHeader::new(RULES.layout);
    for cut in 0..bytes.len() {
        assert_fault!(
            header.decode(&bytes[..cut], &RULES, &blocks()).unwrap_err(),
            WireError::Truncated { needed, .. } if *needed == bytes.len() - cut
        );
    }
    bytes.push(0);
    assert_fault!(
        header.decode(&bytes, &RULES, &blocks()).unwrap_err(),
        WireError::Trailing { extra: 1, .. }
    );
}

#[test]
fn a_packet_of_raw_pages_is_as_long_as_its_pages() {
    let mut writer = PacketWriter::new(RULES.layout, Method::None, false);
    let rules = PacketRules {
        method: Some(Method::None),
        ..RULES
    };
    for payload_len in [1, 4095, 4097, 8192] {
        let fields = PacketFields {
            block: "ram",
            normal: &[0],
            payload_len,
            ..Default::default()
        };
        let bytes = writer.header(&fields).unwrap();
        let mut header = PacketHeader::new(rules.layout);
        assert_fault!(
            header.decode(bytes, &rules, &blocks()).unwrap_err(),
            WireError::Mismatch { expected: 4096, .. }
        );
    }
}

/// The promise of the fault model: between two Hotlifts no flipped byte of a header goes unnoticed.
#[test]
fn a_checksummed_header_with_any_byte_changed_is_an_error() {
    let rules = PacketRules {
        checksum_required: true,
        ..RULES
    };
    let page = PacketFields {
        block: "ram",
        normal: &[PAGE],
        zero: &[0],
        payload_len: 3,
        payload_crc: crc32(b"abc"),
        ..Default::default()
    };
    let sync = PacketFields {
        sync: true,
        packet_num: 1,
        ..Default::default()
    };
    let mut header = PacketHeader::new(rules.layout);
    let mut writer = PacketWriter::new(rules.layout, Method::Zlib, true);
    for fields in [page, sync] {
        let good = writer.header(&fields).unwrap().to_vec();
        header.decode(&good, &rules, &blocks()).unwrap();
        header.check_payload(b"abc").unwrap();
        for at in 0..good.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] ^= flip;
                let result = header
                    .decode(&bad, &rules, &blocks())
                    .and_then(|()| header.check_payload(b"abc"));
                assert!(result.is_err(), "byte {at} ^ {flip:#x}");
            }
        }
    }
    writer = PacketWriter::new(rules.layout, Method::Zlib, false);
    let bare = writer.header(&sync).unwrap();
    assert_fault!(
        header.decode(bare, &rules, &blocks()).unwrap_err(),
        WireError::Mismatch { .. }
    );
}

/// CRC-32 (IEEE), bit by bit, so that the wire's checksum is held against another implementation.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 }
        })
    })
}

#[test]
fn a_payload_that_differs_from_its_checksum_is_an_error() {
    let mut writer = PacketWriter::new(RULES.layout, Method::Zlib, true);
    let fields = PacketFields {
        block: "ram",
        normal: &[0],
        payload_len: 3,
        payload_crc: crc32(b"abc"),
        ..Default::default()
    };
    let mut header = PacketHeader::new(RULES.layout);
    header
        .decode(writer.header(&fields).unwrap(), &RULES, &blocks())
        .unwrap();
    assert_eq!(header.payload_crc(), Some(crc32(b"abc")));
    header.check_payload(b"abc").unwrap();
    assert_fault!(
        header.check_payload(b"abd").unwrap_err(),
        WireError::Checksum { .. }
    );
}

#[test]
fn a_hello_with_any_byte_changed_is_an_error() {
    let packet = InitialPacket {
        uuid: [7; 16],
        id: 1,
        hello: Some(Hello {
            channels: 4,
            method: Method::Zstd,
            layout: PacketLayout::QEMU,
            zero_page_detection: ZeroPageDetection::Multifd,
        }),
    };
    let good = packet.encode();
    assert_eq!(InitialPacket::decode(&good).unwrap(), packet);
    for at in (0..8).chain(32..64) {
        for flip in [0x01, 0x80, 0xff] {
            let mut bad = good;
            bad[at] ^= flip;
            assert!(InitialPacket::decode(&bad).is_err(), "byte {at}");
        }
    }
    let mut beyond = good;
    beyond[24] = 4;
    assert_fault!(
        InitialPacket::decode(&beyond).unwrap_err(),
        WireError::OverLimit {
            limit: 3,
            got: 4,
            ..
        }
    );
}

#[test]
fn a_hello_with_a_good_checksum_and_bad_settings_is_an_error() {
    let packet = InitialPacket {
        uuid: [0; 16],
        id: 0,
        hello: Some(Hello {
            channels: 1,
            method: Method::None,
            layout: PacketLayout::QEMU,
            zero_page_detection: ZeroPageDetection::None,
        }),
    };
    let good = packet.encode();
    // Version, channels, method, packet pages, page size, detection, reserved.
    for (at, value) in [
        (37, 2),
        (38, 0),
        (39, 3),
        (40, 0xff),
        (42, 0xff),
        (43, 0),
        (46, 0x11),
        (48, 3),
        (59, 1),
    ] {
        let mut bad = good;
        bad[at] = value;
        let sum = crc32(&bad[32..60]);
        bad[60..].copy_from_slice(&be32(sum));
        let fault = InitialPacket::decode(&bad).unwrap_err();
        assert!(!matches!(fault, WireError::Checksum { .. }), "{fault}");
    }
}

#[test]
fn a_return_path_message_is_refused_before_its_payload_is_awaited() {
    for (kind, length) in [(1u16, 5u16), (2, 3), (4, 11), (7, 1), (0x4802, 8)] {
        let bytes = [kind.to_be_bytes(), length.to_be_bytes()].concat();
        assert_fault!(
            ReturnMessage::decode(&bytes).unwrap_err(),
            WireError::Mismatch { .. }
        );
    }
    for (kind, length) in [(3u16, 513u16), (5, u16::MAX), (0x4801, 501)] {
        let bytes = [kind.to_be_bytes(), length.to_be_bytes()].concat();
        assert_fault!(
            ReturnMessage::decode(&bytes).unwrap_err(),
            WireError::OverLimit { .. }
        );
    }
    for kind in [0u16, 8, 0x4800, 0xffff] {
        let bytes = [kind.to_be_bytes(), [0, 0]].concat();
        assert_fault!(
            ReturnMessage::decode(&bytes).unwrap_err(),
            WireError::Unknown { .. }
        );
    }
    // Whole messages whose fields do not fill them, or overrun them.
    for bytes in [
        &b"\0\x03\0\x02ab"[..],
        b"\0\x05\0\x02\x05a",
        b"\0\x05\0\x03\x01ab",
        b"\0\x05\0\0",
        b"\x48\x01\0\x01\xff",
    ] {
        let fault = ReturnMessage::decode(bytes).unwrap_err();
        assert!(!matches!(fault, WireError::Truncated { .. }), "{fault}");
    }
}

/// Reads `main` until it ends, needs more or is refused. Nothing may panic or ask for too much.
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

#[test]
fn a_recorded_packet_header_with_any_byte_changed_is_survived() {
    let rules = PacketRules {
        method: None,
        ..RULES
    };
    for name in recorded() {
        let main = connection(&name, "main");
        let blocks = common::blocks(&main);
        let mut header = PacketHeader::new(rules.layout);
        for channel in channels(&name) {
            let mut rest = &channel[64..];
            for _ in 0..4 {
                let (good, behind) = rest.split_at(rules.layout.header_len());
                for at in 0..good.len() {
                    let mut bad = good.to_vec();
                    bad[at] ^= 0xff;
                    if header.decode(&bad, &rules, &blocks).is_ok() {
                        assert!(header.payload_len() <= rules.layout.max_payload());
                        let pages = header.normal().len() + header.zero().len();
                        assert!(pages <= rules.layout.pages());
                    }
                }
                header.decode(good, &rules, &blocks).unwrap();
                rest = &behind[header.payload_len()..];
                if rest.is_empty() {
                    break;
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_at_all_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        survive(MainDecoder::new(DeviceLengths::LengthPrefixed), &bytes);
        survive(after(&between_sections()), &bytes);
        survive(inside_ram(), &bytes);
        let _ = ReturnMessage::decode(&bytes);
        let _ = VmDescription::find(&bytes);
        let _ = VmDescription::parse(&bytes);
        let mut header = PacketHeader::new(RULES.layout);
        let mut framed = b"\x11\x22\x33\x44\0\0\0\x01\0\0\0\x02\0\0\0\x80\0\0\0\x02\0\0".to_vec();
        framed.extend(&bytes);
        framed.resize(RULES.layout.header_len(), 0);
        let _ = header.decode(&framed, &RULES, &blocks());
        if let Some(packet) = bytes.first_chunk() {
            let _ = InitialPacket::decode(packet);
        }
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
