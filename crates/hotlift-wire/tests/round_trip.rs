//! Tests that decoding restores every encoded value.

mod common;

use hotlift_wire::handshake::{Accepted, Features, VERSION};
use hotlift_wire::main_channel::{
    Command, Configuration, DeviceLengths, MainDecoder, MainEncoder, MainEvent, PageContent,
    SectionKind, Step, VmDescription,
};
use hotlift_wire::multifd::{
    HEADER_LEN, Hello, InitialPacket, Method, PacketFields, PacketHeader, PacketLayout,
    PacketRules, PacketWriter, ZeroPageDetection, first_method,
};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::{GuestActivity, MigrationId};
use hotlift_wire::{PAGE_SIZE, RamBlockEntry, WireError, limits};
use proptest::prelude::*;
use proptest::sample::{Index, select};

const PAGE: u64 = 4096;

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z0-9:/._-]{1,20}",
        "[a-z]{255}",
        "[äöü]{1,100}".prop_map(String::from)
    ]
}

fn method() -> impl Strategy<Value = Method> {
    select(Method::ALL.to_vec())
}

fn layout() -> impl Strategy<Value = PacketLayout> {
    let pages = prop_oneof![Just(128), 1..=limits::PACKET_PAGES];
    (10..=16u32, pages).prop_map(|(bits, pages)| PacketLayout::new(1 << bits, pages).unwrap())
}

/// Blocks with distinct names.
fn blocks() -> impl Strategy<Value = Vec<RamBlockEntry>> {
    proptest::collection::btree_map(name(), 1..=64u64, 1..8).prop_map(|blocks| {
        let entry = |(name, pages)| RamBlockEntry::new(name, pages * PAGE);
        blocks.into_iter().map(entry).collect()
    })
}

proptest! {
    #[test]
    fn an_initial_packet_survives(
        uuid: [u8; 16],
        channels in 1..=u8::MAX,
        id: Index,
        method in method(),
        layout in layout(),
        detection in select(vec![
            ZeroPageDetection::None,
            ZeroPageDetection::Legacy,
            ZeroPageDetection::Multifd,
        ]),
        from_hotlift: bool,
    ) {
        let id = u8::try_from(id.index(usize::from(channels))).unwrap();
        // Half of them choose the method for each packet.
        let method = (channels % 2 == 0).then_some(method);
        let hello = Hello { channels, method, layout, zero_page_detection: detection };
        let packet = InitialPacket { uuid, id, hello: from_hotlift.then_some(hello) };
        prop_assert_eq!(InitialPacket::decode(&packet.encode()).unwrap(), packet);
    }

    #[test]
    fn a_packet_header_survives(
        pages in 0..=128usize,
        zeros: Index,
        block: Index,
        blocks in blocks(),
        offsets in proptest::collection::vec(any::<Index>(), 128),
        method in method(),
        sync: bool,
        checksummed: bool,
        packet_num: u64,
        payload in 1..=1u32 << 20,
        payload_crc in 1..=u32::MAX,
    ) {
        let block = block.index(blocks.len());
        let block_pages = usize::try_from(blocks[block].used_length / PAGE).unwrap();
        let offsets: Vec<u64> = offsets[..pages]
            .iter()
            .map(|index| u64::try_from(index.index(block_pages)).unwrap() * PAGE)
            .collect();
        let (zero, normal) = offsets.split_at(zeros.index(pages + 1));
        let payload_len = match (normal.len(), method) {
            (0, _) => 0,
            (pages, Method::None) => u32::try_from(pages * PAGE_SIZE).unwrap(),
            _ => payload,
        };
        let covered = !normal.is_empty() && method != Method::None;
        let fields = PacketFields {
            sync,
            packet_num,
            block: &blocks[block].name,
            normal,
            zero,
            payload_len,
            payload_crc: if covered { payload_crc } else { 0 },
        };
        let mut writer = PacketWriter::new(PacketLayout::QEMU, method, checksummed);
        let bytes = writer.header(&fields).unwrap();
        let rules = PacketRules {
            layout: PacketLayout::QEMU,
            method: Some(method),
            checksum_required: checksummed,
        };
        let mut header = PacketHeader::new(rules.layout);
        header.decode(bytes, &rules, &blocks).unwrap();
        prop_assert_eq!(header.normal(), normal);
        prop_assert_eq!(header.zero(), zero);
        prop_assert_eq!(header.sync(), sync);
        prop_assert_eq!(header.packet_num(), packet_num);
        prop_assert_eq!(u32::try_from(header.payload_len()).unwrap(), payload_len);
        prop_assert_eq!(header.payload_crc(), (checksummed && covered).then_some(payload_crc));
        if pages > 0 {
            prop_assert_eq!(header.block(), block);
            prop_assert_eq!(header.method(), method);
        }
    }

    #[test]
    fn a_return_path_message_survives(
        value: u32,
        start: u64,
        block in name(),
        text in proptest::collection::vec(any::<char>(), 0..=100).prop_map(String::from_iter),
        kind in 0..11usize,
    ) {
        let message = match kind {
            0 => ReturnMessage::Shut(value),
            1 => ReturnMessage::Pong(value),
            2 => ReturnMessage::ReqPagesId { start, length: value, block: &block },
            3 => ReturnMessage::ReqPages { start, length: value },
            4 => ReturnMessage::RecvBitmap { block: &block },
            5 => ReturnMessage::ResumeAck(value),
            6 => ReturnMessage::SwitchoverAck,
            7 => ReturnMessage::ErrorText(&text),
            8 => ReturnMessage::GuestActivity(
                [GuestActivity::Unknown, GuestActivity::Runs, GuestActivity::Rests, GuestActivity::Stopped][value as usize % 4],
            ),
            9 => ReturnMessage::Hello { version: value.max(u32::from(VERSION) + 1), accepted: None },
            _ => ReturnMessage::Hello {
                version: VERSION.into(),
                accepted: Some(Accepted {
                    features: Features::from_bits_retain(value),
                    id: MigrationId(start.to_be_bytes().repeat(2).try_into().unwrap()),
                }),
            },
        };
        let mut bytes = Vec::new();
        message.encode(&mut bytes).unwrap();
        // The number of missing bytes is exact: a reader never consumes more than the message.
        for cut in 0..bytes.len() {
            match ReturnMessage::decode(&bytes[..cut]) {
                Err(WireError::Truncated { needed, .. }) => {
                    prop_assert!((1..=bytes.len() - cut).contains(&needed));
                }
                other => prop_assert!(false, "cut to {}: {:?}", cut, other),
            }
        }
        let length = bytes.len();
        bytes.extend_from_slice(b"next");
        let (decoded, consumed) = ReturnMessage::decode(&bytes).unwrap();
        prop_assert_eq!(consumed, length);
        match (decoded, message) {
            (ReturnMessage::ErrorText(got), ReturnMessage::ErrorText(sent)) => {
                prop_assert!(got.len() <= limits::ERROR_TEXT && sent.starts_with(got));
                prop_assert!(got == sent || got.len() > limits::ERROR_TEXT - 4);
            }
            _ => prop_assert_eq!(decoded, message),
        }
    }

    #[test]
    fn a_configuration_survives(
        machine in name(),
        uuid: Option<[u8; 16]>,
        shared: bool,
        page_bits in select(vec![None, Some(12)]),
    ) {
        let capabilities = shared.then(|| "x-ignore-shared".to_owned());
        let configuration = Configuration {
            machine,
            page_bits,
            capabilities: capabilities.into_iter().collect(),
            uuid,
        };
        let mut out = Vec::new();
        MainEncoder::new(&configuration, &mut out).unwrap();
        out.push(0x08);
        let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
        let Step::Event { event: MainEvent::Header, consumed } = decoder.next(&out).unwrap() else {
            panic!("no header");
        };
        let step = decoder.next(&out[consumed..]).unwrap();
        let length = out.len() - 1 - consumed;
        let event = MainEvent::Configuration(configuration);
        prop_assert_eq!(step, Step::Event { event, consumed: length });
    }

    #[test]
    fn a_main_channel_survives(
        // A machine type up to 2.3 has no name in its stream, and no footers.
        machine in select(vec!["hotlift", ""]),
        mut blocks in blocks(),
        huge in proptest::collection::vec(select(vec![1, 2, 512]), 8),
        multifd: bool,
        pages in proptest::collection::vec((any::<Index>(), any::<Index>(), any::<Option<u8>>()), 0..40),
        devices in proptest::collection::btree_map(
            (name(), any::<u32>()),
            (any::<u32>(), proptest::collection::vec(any::<u8>(), 0..300)),
            0..6,
        ),
    ) {
        for (block, pages) in blocks.iter_mut().zip(huge) {
            block.page_size = pages * PAGE;
            block.used_length *= pages;
        }
        let page_sizes = blocks.iter().fold(0, |sizes, block| sizes | block.page_size);
        let mut out = Vec::new();
        let mut expected = Vec::new();
        let configuration = Configuration { machine: machine.into(), ..Default::default() };
        let mut encoder = MainEncoder::new(&configuration, &mut out).unwrap();
        expected.push(MainEvent::Header);
        if !configuration.is_absent() {
            expected.push(MainEvent::Configuration(configuration));
        }
        let commands = [
            Command::OpenReturnPath,
            Command::Ping(7),
            Command::PostcopyAdvise { page_sizes: None },
            Command::PostcopyAdvise { page_sizes: Some((page_sizes, PAGE)) },
        ];
        for command in commands {
            encoder.command(command, &mut out).unwrap();
            expected.push(MainEvent::Command(command));
        }
        let ram = |kind| MainEvent::SectionStart {
            kind,
            id: 0,
            idstr: "ram",
            instance_id: 0,
            version_id: 4,
        };

        encoder.ram_start(&blocks, multifd, &mut out).unwrap();
        expected.extend([ram(SectionKind::Start), MainEvent::RamBlocks(blocks.clone())]);
        expected.extend(multifd.then_some(MainEvent::MultifdFlush));
        expected.extend([MainEvent::RamEos, MainEvent::SectionFooter]);

        encoder.ram_part(&mut out).unwrap();
        expected.push(ram(SectionKind::Part));
        let fills: Vec<[u8; PAGE_SIZE]> = pages
            .iter()
            .map(|(_, _, fill)| [fill.unwrap_or(0); PAGE_SIZE])
            .collect();
        for (index, (block, offset, fill)) in pages.iter().enumerate() {
            let block = block.index(blocks.len());
            let block_pages = usize::try_from(blocks[block].used_length / PAGE).unwrap();
            let offset = u64::try_from(offset.index(block_pages)).unwrap() * PAGE;
            let content = match fill {
                None => {
                    encoder.zero_page(block, offset, &mut out).unwrap();
                    PageContent::Zero
                }
                Some(length) if length % 2 == 1 => {
                    let stream = &fills[index][..usize::from(*length)];
                    encoder.compressed_page(block, offset, stream, &mut out).unwrap();
                    PageContent::Compressed(stream)
                }
                Some(_) => {
                    encoder.normal_page(block, offset, &fills[index], &mut out).unwrap();
                    PageContent::Normal(&fills[index])
                }
            };
            expected.push(MainEvent::RamPage { block, offset, content });
        }
        encoder.multifd_flush(&mut out).unwrap();
        encoder.ram_eos(&mut out).unwrap();
        expected.extend([MainEvent::MultifdFlush, MainEvent::RamEos, MainEvent::SectionFooter]);

        encoder.command(Command::SwitchoverStart, &mut out).unwrap();
        expected.push(MainEvent::Command(Command::SwitchoverStart));
        encoder.ram_end(&mut out).unwrap();
        encoder.ram_eos(&mut out).unwrap();
        expected.extend([ram(SectionKind::End), MainEvent::RamEos, MainEvent::SectionFooter]);

        for (number, ((idstr, instance_id), (version_id, payload))) in devices.iter().enumerate() {
            encoder.device(idstr, *instance_id, *version_id, payload, &mut out).unwrap();
            expected.push(MainEvent::SectionStart {
                kind: SectionKind::Full,
                id: u32::try_from(number).unwrap() + 1,
                idstr,
                instance_id: *instance_id,
                version_id: *version_id,
            });
            expected.extend([MainEvent::DevicePayload(payload), MainEvent::SectionFooter]);
        }
        encoder.eof(&mut out).unwrap();
        expected.push(MainEvent::Eof);
        let before = out.len();
        encoder.vm_description(&mut out).unwrap();
        expected.push(MainEvent::VmDescription(&out[before + 5..]));

        let mut decoder = MainDecoder::new(DeviceLengths::LengthPrefixed);
        let got = common::events(&mut decoder, &out).unwrap();
        let got: Vec<_> = got.into_iter().map(|(_, event)| event).collect();
        prop_assert_eq!(got, expected);

        // The description matches QEMU's formula, with the length prefix as a part of the payload.
        let text = VmDescription::find(&out).unwrap();
        let description = VmDescription::parse(text).unwrap();
        prop_assert_eq!(description.devices(), devices.len());
        for ((idstr, instance_id), (_, payload)) in &devices {
            let length = u64::try_from(payload.len()).unwrap() + 8;
            prop_assert_eq!(description.payload_len(idstr, *instance_id), Some(length));
        }
        common::events(&mut common::decoder_for(&out), &out).unwrap();
    }
}

/// QEMU accepts no other length.
#[test]
fn a_compressed_page_has_1_to_4109_bytes() {
    let mut out = Vec::new();
    let machine = "hotlift".to_owned();
    let configuration = Configuration {
        machine,
        ..Configuration::default()
    };
    let mut encoder = MainEncoder::new(&configuration, &mut out).unwrap();
    let blocks = [RamBlockEntry::new("ram", PAGE)];
    encoder.ram_start(&blocks, false, &mut out).unwrap();
    encoder.ram_part(&mut out).unwrap();
    for (length, good) in [(0, false), (1, true), (4109, true), (4110, false)] {
        let before = out.len();
        let written = encoder.compressed_page(0, 0, &vec![7; length], &mut out);
        assert_eq!(written.is_ok(), good, "{length}");
        assert_eq!(out.len() > before, good, "{length}");
    }
}

#[test]
fn an_error_text_that_is_too_long_is_cut_between_characters() {
    let mut bytes = Vec::new();
    let text = "é".repeat(400);
    ReturnMessage::ErrorText(&text).encode(&mut bytes).unwrap();
    let (message, _) = ReturnMessage::decode(&bytes).unwrap();
    assert_eq!(message, ReturnMessage::ErrorText(&text[..500]));
    let mut bytes = Vec::new();
    let text = format!("x{text}");
    ReturnMessage::ErrorText(&text).encode(&mut bytes).unwrap();
    let (message, _) = ReturnMessage::decode(&bytes).unwrap();
    assert_eq!(message, ReturnMessage::ErrorText(&text[..499]));
}

#[test]
fn one_buffer_serves_all_packets_of_a_channel() {
    let blocks = [RamBlockEntry::new("ram", 1 << 20)];
    let offsets: Vec<u64> = (0..128).map(|page| page * PAGE).collect();
    let rules = PacketRules {
        layout: PacketLayout::QEMU,
        method: None,
        checksum_required: true,
    };
    let mut writer = PacketWriter::new(rules.layout, Method::Zstd, true);
    let mut header = PacketHeader::new(rules.layout);
    let mut buffers = Vec::new();
    for pages in [128, 0, 1, 128] {
        let fields = PacketFields {
            block: "ram",
            normal: &offsets[..pages],
            payload_len: if pages == 0 { 0 } else { 9 },
            ..Default::default()
        };
        let bytes = writer.header(&fields).unwrap();
        header.decode(bytes, &rules, &blocks).unwrap();
        assert_eq!(header.normal(), &offsets[..pages]);
        buffers.push((bytes.as_ptr(), header.normal().as_ptr()));
    }
    buffers.dedup();
    assert_eq!(buffers.len(), 1);
}

#[test]
fn an_unused_part_of_a_header_is_zero_after_any_earlier_packet() {
    let offsets = [PAGE; 128];
    let full = PacketFields {
        block: "a long name of a block",
        normal: &offsets,
        payload_len: 1,
        payload_crc: 1,
        ..Default::default()
    };
    let short = PacketFields {
        block: "ram",
        zero: &offsets[..2],
        ..Default::default()
    };
    for checksummed in [false, true] {
        let mut used = PacketWriter::new(PacketLayout::QEMU, Method::Zlib, checksummed);
        used.header(&full).unwrap();
        let mut fresh = PacketWriter::new(PacketLayout::QEMU, Method::Zlib, checksummed);
        assert_eq!(used.header(&short).unwrap(), fresh.header(&short).unwrap());
    }
}

#[test]
fn an_encoder_refuses_calls_out_of_order() {
    let mut out = Vec::new();
    let configuration = Configuration {
        machine: "hotlift".into(),
        ..Default::default()
    };
    let blocks = [RamBlockEntry::new("ram", PAGE)];
    let mut encoder = MainEncoder::new(&configuration, &mut out).unwrap();
    let refused = |result: Result<(), WireError>| {
        assert!(matches!(result, Err(WireError::OutOfOrder { .. })));
    };
    refused(encoder.ram_part(&mut out));
    refused(encoder.eof(&mut out));
    refused(encoder.device("cpu", 0, 1, &[], &mut out));
    encoder.ram_start(&blocks, true, &mut out).unwrap();
    refused(encoder.ram_start(&blocks, true, &mut out));
    refused(encoder.zero_page(0, 0, &mut out));
    refused(encoder.ram_eos(&mut out));
    encoder.ram_end(&mut out).unwrap();
    refused(encoder.command(Command::SwitchoverStart, &mut out));
    refused(encoder.ram_part(&mut out));
    encoder.ram_eos(&mut out).unwrap();
    refused(encoder.ram_part(&mut out));
    encoder.eof(&mut out).unwrap();
    refused(encoder.device("cpu", 0, 1, &[], &mut out));
    encoder.vm_description(&mut out).unwrap();
}

#[test]
fn the_method_of_a_channel_is_that_of_its_first_packet_with_pages() {
    let layout = PacketLayout::QEMU;
    let mut writer = PacketWriter::new(layout, Method::Zstd, false);
    let barrier = PacketFields {
        sync: true,
        ..PacketFields::default()
    };
    let pages = PacketFields {
        block: "pc.ram",
        zero: &[0x1000],
        ..PacketFields::default()
    };
    let mut bytes = writer.header(&barrier).unwrap().to_vec();
    assert_eq!(first_method(&bytes), None, "a barrier has no method");
    bytes.extend_from_slice(writer.header(&pages).unwrap());
    assert_eq!(first_method(&bytes), Some(Method::Zstd));
    for length in 0..=HEADER_LEN {
        assert_eq!(first_method(&bytes[..length]), None, "{length}");
    }
    writer.set_method(Method::None);
    assert_eq!(
        first_method(writer.header(&pages).unwrap()),
        Some(Method::None)
    );
    assert_eq!(first_method(&[0xff; 2 * HEADER_LEN]), None);
}
