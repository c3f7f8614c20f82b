//! Channels recorded from QEMU 7.2 and 10.0, decoded to the guest's pages.

mod support;

use std::collections::BTreeSet;
use std::path::Path;

use hotlift_mem::{Backing, PAGE_SIZE, RamBlock};
use hotlift_methods::method;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::{DeviceLengths, MainDecoder, MainEvent, Step, VmDescription};
use hotlift_wire::multifd::{INITIAL_PACKET_LEN, PacketHeader, PacketLayout, PacketRules};

/// The bytes of one recorded connection; the folder's README says what is in it.
fn connection(stream: &str, name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../hotlift-wire/fixtures")
        .join(stream)
        .join(format!("{name}.zst"));
    let packed = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    zstd::decode_all(packed.as_slice()).expect("a zstd file")
}

fn blocks_of(main: &[u8]) -> Vec<RamBlockEntry> {
    let text = VmDescription::find(main).expect("a description");
    let description = VmDescription::parse(text).expect("QEMU's description");
    let mut decoder = MainDecoder::new(DeviceLengths::Description(description));
    let mut rest = main;
    while let Step::Event { event, consumed } = decoder.next(rest).expect("a main channel") {
        if let MainEvent::RamBlocks(blocks) = event {
            return blocks.to_vec();
        }
        rest = &rest[consumed..];
    }
    panic!("no list of RAM blocks");
}

/// Page `number` of the guest's RAM as the recording script fills it. The guest then counts in the
/// first two bytes of the pages 1 to 15.
fn ram_page(number: usize) -> Vec<u8> {
    if number / 8 % 2 == 1 {
        return vec![0; PAGE_SIZE];
    }
    if number.is_multiple_of(64) {
        let mut state = 0x9e37_79b9_7f4a_7c15 ^ number as u64;
        let words = (0..PAGE_SIZE / 8).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        return words.collect();
    }
    let lines = (0..256).map(|line| format!("hotlift page {number} line {line}\n"));
    let mut page = lines.collect::<String>().into_bytes();
    page.truncate(PAGE_SIZE);
    page
}

#[test]
fn channels_of_qemu_decode_to_the_guests_pages() {
    for stream in [
        "7.2-none",
        "10.0-none",
        "7.2-zlib",
        "10.0-zlib",
        "7.2-zstd",
        "10.0-zstd",
    ] {
        let name = stream.split_once('-').expect("VERSION-METHOD").1;
        let blocks = blocks_of(&connection(stream, "main"));
        let memory: Vec<RamBlock> = blocks
            .iter()
            .map(|block| {
                let len = usize::try_from(block.used_length).expect("a small block");
                RamBlock::new(&block.name, len, Backing::Private).expect("a RAM block")
            })
            .collect();
        let mut seen = BTreeSet::new();
        for channel in ["channel-0", "channel-1"] {
            let bytes = connection(stream, channel);
            let mut rest = &bytes[INITIAL_PACKET_LEN..];
            let rules = PacketRules {
                layout: PacketLayout::QEMU,
                method: None,
                checksum_required: false,
            };
            let mut header = PacketHeader::new(rules.layout);
            let mut decoder = (method(name).expect(name).decoder)().expect(name);
            while !rest.is_empty() {
                let (head, behind) = rest.split_at(rules.layout.header_len());
                header.decode(head, &rules, &blocks).expect(stream);
                let (payload, behind) = behind.split_at(header.payload_len());
                rest = behind;
                if header.normal().is_empty() {
                    continue;
                }
                let block = &memory[header.block()];
                let offsets: Vec<usize> = header
                    .normal()
                    .iter()
                    .map(|&offset| usize::try_from(offset).expect("a small block"))
                    .collect();
                let runs: Vec<_> = offsets
                    .iter()
                    .map(|&offset| block.run(offset, PAGE_SIZE).expect("a run"))
                    .collect();
                decoder
                    .decode(payload, &runs)
                    .unwrap_or_else(|error| panic!("{stream} {channel}: {error}"));
                if block.name() != "pc.ram" {
                    continue;
                }
                for offset in offsets {
                    let number = offset / PAGE_SIZE;
                    let mut page = vec![0; PAGE_SIZE];
                    block.read(offset, &mut page).expect("a page");
                    let counted = if (1..16).contains(&number) { 2 } else { 0 };
                    assert!(
                        page[counted..] == ram_page(number)[counted..],
                        "{stream} {channel}: page {number} differs"
                    );
                    seen.insert(number);
                }
            }
        }
        let normal: BTreeSet<usize> = (0..512).filter(|n| n / 8 % 2 == 0).collect();
        assert!(seen.is_superset(&normal), "{stream}: pages are missing");
    }
}
