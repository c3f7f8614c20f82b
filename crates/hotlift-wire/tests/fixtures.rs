//! Tests recorded streams of two real QEMUs. Each stream is read to the last byte, and compared with the guest's
//! memory.

mod common;

use std::collections::HashMap;

use common::{blocks, channels, connection, decoder_for, events, recorded};
use hotlift_wire::main_channel::{
    Command, MainEvent, PageContent, RunStateSearch, SectionKind, Step,
};
use hotlift_wire::multifd::{
    INITIAL_PACKET_LEN, InitialPacket, Method, PacketHeader, PacketLayout, PacketRules,
};
use hotlift_wire::{PAGE_SIZE, RamBlockEntry, limits};

const RAM_PAGES: usize = 512;

/// Returns page `number` of the guest's RAM before it ran; `scripts/record-fixtures` has the same function.
fn ram_page(number: usize) -> Vec<u8> {
    if number / 8 % 2 == 1 {
        return vec![0; PAGE_SIZE];
    }
    if number.is_multiple_of(64) {
        let mut state = 0x9e37_79b9_7f4a_7c15 ^ u64::try_from(number).unwrap();
        let words = (0..PAGE_SIZE / 8).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        return words.collect();
    }
    let lines = (0..256).map(|line| format!("hotlift page {number} line {line}\n"));
    let mut page: Vec<u8> = lines.collect::<String>().into_bytes();
    page.truncate(PAGE_SIZE);
    page
}

/// Memory of a destination: all blocks, all bytes 0xdd until a page arrives.
struct Memory {
    blocks: Vec<(String, Vec<u8>)>,
}

impl Memory {
    fn new(blocks: &[RamBlockEntry]) -> Self {
        let fresh = |block: &RamBlockEntry| {
            let length = usize::try_from(block.used_length).unwrap();
            (block.name.clone(), vec![0xdd; length])
        };
        Self {
            blocks: blocks.iter().map(fresh).collect(),
        }
    }

    fn page(&mut self, block: usize, offset: u64) -> &mut [u8] {
        let offset = usize::try_from(offset).unwrap();
        &mut self.blocks[block].1[offset..offset + PAGE_SIZE]
    }

    fn assert_is_the_guests(&self, name: &str) {
        for (block, bytes) in &self.blocks {
            match block.as_str() {
                "pc.ram" => {
                    for number in 0..RAM_PAGES {
                        let counted = if (1..16).contains(&number) { 2 } else { 0 };
                        let got = &bytes[number * PAGE_SIZE..][..PAGE_SIZE];
                        let same = got[counted..] == ram_page(number)[counted..];
                        assert!(same, "{name}: page {number} differs");
                    }
                }
                "pc.rom" => assert!(bytes.iter().all(|&byte| byte == 0), "{name}: pc.rom"),
                // virtio-mem's RAM, named by the device's address; its pages are unplugged.
                "0000:00:02.0/pluggable" => {
                    assert!(bytes.iter().all(|&byte| byte == 0xdd), "{name}: unplugged");
                }
                "pc.bios" => assert_eq!(bytes[0xfff0], 0xe9, "{name}: reset vector"),
                other => panic!("{name}: unexpected block {other}"),
            }
        }
    }
}

/// Applies an XBZRLE delta: runs to keep, runs to replace, lengths as small uleb128.
fn apply_delta(mut delta: &[u8], page: &mut [u8]) {
    let mut take = |count: usize| {
        let (taken, rest) = delta.split_at(count);
        delta = rest;
        (taken, rest.is_empty())
    };
    let mut position = 0;
    let mut ended = false;
    while !ended {
        let mut runs = [0; 2];
        for run in &mut runs {
            let low = usize::from(take(1).0[0]);
            *run = match low {
                0x80.. => low & 0x7f | usize::from(take(1).0[0]) << 7,
                _ => low,
            };
        }
        position += runs[0];
        let (literals, last) = take(runs[1]);
        page[position..position + runs[1]].copy_from_slice(literals);
        position += runs[1];
        ended = last;
    }
}

fn has_method(name: &str, method: Method) -> bool {
    name.split('-').nth(1) == Some(method.name())
}

#[test]
fn a_main_channel_is_read_to_its_last_byte() {
    for name in recorded() {
        let main = connection(&name, "main");
        let mut decoder = decoder_for(&main);
        let events = events(&mut decoder, &main).unwrap_or_else(|e| panic!("{name}: {e}"));

        assert_eq!(events[0].1, MainEvent::Header, "{name}");
        let (_, last) = events.last().unwrap();
        assert!(matches!(last, MainEvent::VmDescription(_)), "{name}");
        let MainEvent::Configuration(configuration) = &events[1].1 else {
            panic!("{name}: no configuration");
        };
        assert!(configuration.machine.starts_with("pc-i440fx-"), "{name}");
        let uuid = name.ends_with("-off").then_some(*b"Hotlift fixtures");
        assert_eq!(configuration.uuid, uuid, "{name}");
    }
}

#[test]
fn every_device_section_has_the_length_of_the_description() {
    for name in recorded() {
        let main = connection(&name, "main");
        let events = events(&mut decoder_for(&main), &main).unwrap();
        let mut devices = HashMap::new();
        let mut current = None;
        for (_, event) in &events {
            match event {
                MainEvent::SectionStart {
                    kind: SectionKind::Full,
                    idstr,
                    ..
                } => current = Some(*idstr),
                MainEvent::DevicePayload(payload) => {
                    devices.insert(current.take().unwrap(), *payload);
                }
                _ => {}
            }
        }
        assert!(devices.len() >= 20, "{name}: {} devices", devices.len());
        let state = devices["globalstate"];
        assert_eq!(state.len(), 104, "{name}");
        assert!(state[4..].starts_with(b"running\0"), "{name}");
        let state = RunStateSearch::default().find(&main);
        assert_eq!(state.as_deref(), Some("running"), "{name}");
    }
}

#[test]
fn pages_on_the_main_channel_are_the_guests() {
    let mut deltas = 0;
    for name in ["7.2-off", "10.0-off", "7.2-xbzrle"] {
        let main = connection(name, "main");
        let mut memory = Memory::new(&blocks(&main));
        for (_, event) in events(&mut decoder_for(&main), &main).unwrap() {
            let MainEvent::RamPage {
                block,
                offset,
                content,
            } = event
            else {
                continue;
            };
            let page = memory.page(block, offset);
            match content {
                PageContent::Zero => page.fill(0),
                PageContent::Normal(bytes) => page.copy_from_slice(bytes),
                PageContent::Xbzrle(delta) => {
                    apply_delta(delta, page);
                    deltas += 1;
                }
                PageContent::Compressed(_) => panic!("{name}: a compressed page"),
            }
        }
        memory.assert_is_the_guests(name);
    }
    assert!(deltas > 0);
}

#[test]
fn compressed_pages_are_framed() {
    let main = connection("7.2-compress", "main");
    let streams: Vec<&[u8]> = events(&mut decoder_for(&main), &main)
        .unwrap()
        .into_iter()
        .filter_map(|(_, event)| match event {
            MainEvent::RamPage {
                content: PageContent::Compressed(stream),
                ..
            } => Some(stream),
            _ => None,
        })
        .collect();
    assert!(streams.len() >= RAM_PAGES / 2);
    assert!(streams.iter().all(|stream| stream.starts_with(&[0x78, 1])));
}

#[test]
fn commands_are_those_of_the_machine_type() {
    let commands = |name: &str| {
        let main = connection(name, "main");
        let events = events(&mut decoder_for(&main), &main).unwrap();
        let commands = events.into_iter().filter_map(|(_, event)| match event {
            MainEvent::Command(command) => Some(command),
            _ => None,
        });
        commands.collect::<Vec<_>>()
    };
    assert_eq!(commands("7.2-none"), []);
    assert_eq!(commands("10.0-none-legacy"), []);
    assert_eq!(commands("10.0-none"), [Command::SwitchoverStart]);
    assert_eq!(
        commands("10.0-none-return-path"),
        [
            Command::OpenReturnPath,
            Command::Ping(1),
            Command::SwitchoverStart
        ]
    );
}

/// Reads a channel to its last byte. Calls `each` for every packet and its payload.
fn read_channel(
    name: &str,
    bytes: &[u8],
    blocks: &[RamBlockEntry],
    mut each: impl FnMut(&PacketHeader, &[u8]),
) -> InitialPacket {
    let rules = PacketRules {
        layout: PacketLayout::QEMU,
        method: Method::ALL.into_iter().find(|&m| has_method(name, m)),
        checksum_required: false,
    };
    let (initial, mut rest) = bytes.split_first_chunk::<INITIAL_PACKET_LEN>().unwrap();
    let initial = InitialPacket::decode(initial).unwrap();
    let mut header = PacketHeader::new(rules.layout);
    while !rest.is_empty() {
        let (head, behind) = rest.split_at(rules.layout.header_len());
        header
            .decode(head, &rules, blocks)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let (payload, behind) = behind.split_at(header.payload_len());
        each(&header, payload);
        rest = behind;
    }
    initial
}

#[test]
fn a_channel_is_read_to_its_last_byte() {
    for name in recorded() {
        let blocks = blocks(&connection(&name, "main"));
        for (id, bytes) in channels(&name).iter().enumerate() {
            let mut packets = 0;
            let initial = read_channel(&name, bytes, &blocks, |_, _| packets += 1);
            assert_eq!(usize::from(initial.id), id, "{name}");
            assert_eq!(initial.uuid, *b"Hotlift fixtures", "{name}");
            assert_eq!(initial.hello, None, "{name}");
            assert!(packets > 2, "{name}: {packets} packets");
        }
    }
}

#[test]
fn each_sync_point_on_main_has_a_sync_on_every_channel() {
    for name in recorded() {
        let main = connection(&name, "main");
        let blocks = blocks(&main);
        let events = events(&mut decoder_for(&main), &main).unwrap();
        let count = |wanted: &MainEvent<'_>| events.iter().filter(|(_, e)| e == wanted).count();
        let flushes = count(&MainEvent::MultifdFlush);
        let sync_points = match flushes {
            0 => count(&MainEvent::RamEos),
            _ => flushes,
        };
        let channels = channels(&name);
        let newer = !name.starts_with("7.2") && !name.ends_with("legacy");
        assert_eq!(flushes > 0, newer && !channels.is_empty(), "{name}");
        for bytes in &channels {
            let mut syncs = 0;
            read_channel(&name, bytes, &blocks, |header, _| {
                syncs += usize::from(header.sync());
            });
            assert_eq!(syncs, sync_points, "{name}");
        }
    }
}

/// Reads all connections as a destination does: channels up to their SYNC at each sync point.
#[test]
fn pages_of_all_connections_together_are_the_guests() {
    for name in recorded() {
        let channels = channels(&name);
        if channels.is_empty() || !has_method(&name, Method::None) {
            continue;
        }
        let main = connection(&name, "main");
        let blocks = blocks(&main);
        let events = events(&mut decoder_for(&main), &main).unwrap();
        let per_round = events.iter().any(|(_, e)| *e == MainEvent::MultifdFlush);
        let sync_point = match per_round {
            true => MainEvent::MultifdFlush,
            false => MainEvent::RamEos,
        };

        // Rounds of the channels: the pages between one SYNC and the next.
        type Page = (usize, u64, Option<Vec<u8>>);
        let mut rounds: Vec<Vec<Page>> = Vec::new();
        for bytes in &channels {
            let mut round = 0;
            read_channel(&name, bytes, &blocks, |header, payload| {
                rounds.resize_with(rounds.len().max(round + 1), Vec::new);
                let pages = payload.chunks_exact(PAGE_SIZE);
                for (&offset, page) in header.normal().iter().zip(pages) {
                    rounds[round].push((header.block(), offset, Some(page.to_vec())));
                }
                for &offset in header.zero() {
                    rounds[round].push((header.block(), offset, None));
                }
                round += usize::from(header.sync());
            });
        }

        let mut memory = Memory::new(&blocks);
        let mut apply = |pages: Vec<Page>| {
            for (block, offset, bytes) in pages {
                let page = memory.page(block, offset);
                match bytes {
                    Some(bytes) => page.copy_from_slice(&bytes),
                    None => page.fill(0),
                }
            }
        };
        let mut rounds = rounds.into_iter();
        for (_, event) in events {
            match event {
                MainEvent::RamPage {
                    block,
                    offset,
                    content: PageContent::Zero,
                } => apply(vec![(block, offset, None)]),
                MainEvent::RamPage { content, .. } => panic!("{name}: {content:?} on main"),
                event if event == sync_point => apply(rounds.next().unwrap()),
                _ => {}
            }
        }
        apply(rounds.flatten().collect());
        memory.assert_is_the_guests(&name);
    }
}

/// Truncation at any byte: the decoder asks for more, within its limits, and can continue.
#[test]
fn a_cut_main_channel_is_waited_for_never_misread() {
    for name in recorded() {
        let main = connection(&name, "main");
        let whole = events(&mut decoder_for(&main), &main).unwrap();
        let mut decoder = decoder_for(&main);
        for (index, (start, expected)) in whole.iter().enumerate() {
            let end = whole.get(index + 1).map_or(main.len(), |(next, _)| *next);
            let event = &main[*start..end];
            // In the middle of long data all cuts are equivalent.
            let cuts = (0..event.len().min(300)).chain(event.len().saturating_sub(2)..event.len());
            for cut in cuts {
                match decoder.next(&event[..cut]) {
                    Ok(Step::Need(more)) => {
                        assert!(more >= 1 && cut + more <= limits::MAIN_RECORD, "{name}");
                        // The configuration ends before the first foreign byte.
                        let seen = usize::from(index == 1);
                        assert!(cut + more <= event.len() + seen, "{name}: {expected:?}");
                    }
                    other => panic!("{name} at {start} cut to {cut}: {other:?}"),
                }
            }
            if index + 1 < whole.len() {
                assert!(decoder.finish().is_err() || *expected == MainEvent::Eof);
            }
            match decoder.next(&main[*start..]) {
                Ok(Step::Event { event, .. }) => assert_eq!(event, *expected, "{name}"),
                other => panic!("{name} at {start}: {other:?}"),
            }
        }
    }
}
