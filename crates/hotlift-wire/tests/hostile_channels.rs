//! Tests invalid bytes on multifd channels and on the return path. For the main channel, see `hostile_main.rs`.

mod common;

use common::{assert_fault, channels, connection, recorded};
use hotlift_wire::multifd::{
    Hello, INITIAL_PACKET_LEN, InitialPacket, Method, PacketFields, PacketHeader, PacketLayout,
    PacketRules, PacketWriter, ZeroPageDetection,
};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{RamBlockEntry, WireError};
use proptest::prelude::*;

const PAGE: u64 = 4096;

fn be32(value: u32) -> [u8; 4] {
    value.to_be_bytes()
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

/// Decodes a valid header for two normal pages and a zero page of `ram`, modified by `change`.
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

/// Numbers of QEMU's `migration/multifd.h` (`MULTIFD_FLAG_ZLIB` and so on); LZ4 is not in QEMU.
#[test]
fn a_packet_names_its_method_by_the_bit_that_qemu_reads() {
    for (name, bit) in [
        ("none", 0),
        ("zlib", 1 << 1),
        ("zstd", 2 << 1),
        ("qpl", 4 << 1),
        ("uadk", 8 << 1),
        ("qatzip", 16 << 1),
        ("lz4", 1 << 7),
    ] {
        let method = Method::ALL.into_iter().find(|one| one.name() == name);
        let method = method.unwrap_or_else(|| panic!("no {name}"));
        let mut writer = PacketWriter::new(RULES.layout, method, false);
        let fields = PacketFields {
            block: "ram",
            normal: &[0],
            payload_len: 4096,
            ..Default::default()
        };
        let header = writer.header(&fields).unwrap();
        assert_eq!(header[8..12], be32(bit), "{name}");
    }
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
    // An unused entry may have any value.
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

/// Guarantee of the fault model: between two Hotlifts every flipped byte of a header is detected.
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

/// Computes CRC-32 (IEEE) bit by bit: an independent check of the wire's checksum.
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
            method: Some(Method::Zstd),
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

/// Returns the opening of a Hotlift's only channel.
fn opening() -> [u8; INITIAL_PACKET_LEN] {
    let packet = InitialPacket {
        uuid: [0; 16],
        id: 0,
        hello: Some(Hello {
            channels: 1,
            method: Some(Method::None),
            layout: PacketLayout::QEMU,
            zero_page_detection: ZeroPageDetection::None,
        }),
    };
    packet.encode()
}

#[test]
fn a_hello_with_a_good_checksum_and_bad_settings_is_an_error() {
    let good = opening();
    // Version, channels, method, packet pages, page size, detection, reserved.
    for (at, value) in [
        (37, 1),
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
fn a_channel_of_another_version_is_distinguished_from_a_damaged_one() {
    let mut other = opening();
    other[37] = 2;
    let sum = crc32(&other[32..60]);
    other[60..].copy_from_slice(&be32(sum));
    assert_fault!(
        InitialPacket::decode(&other).unwrap_err(),
        WireError::HotliftVersion { got: 2 }
    );
}

#[test]
fn a_return_path_message_is_refused_before_its_payload_is_awaited() {
    for (kind, length) in [
        (1u16, 5u16),
        (2, 3),
        (4, 11),
        (7, 1),
        (0x4802, 3),
        (0x4804, 4),
    ] {
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
    // Complete messages with fields shorter or longer than the payload.
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
        let _ = ReturnMessage::decode(&bytes);
        let mut header = PacketHeader::new(RULES.layout);
        let mut framed = b"\x11\x22\x33\x44\0\0\0\x01\0\0\0\x02\0\0\0\x80\0\0\0\x02\0\0".to_vec();
        framed.extend(&bytes);
        framed.resize(RULES.layout.header_len(), 0);
        let _ = header.decode(&framed, &RULES, &blocks());
        if let Some(packet) = bytes.first_chunk() {
            let _ = InitialPacket::decode(packet);
        }
    }
}
