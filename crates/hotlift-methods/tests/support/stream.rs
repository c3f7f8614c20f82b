//! Splits a complete migration stream into its pages, and encodes its channels again.

use std::collections::BTreeMap;
use std::path::Path;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{Accelerator, Encode, MethodInfo, method};
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::{
    DeviceLengths, MainDecoder, MainEvent, PageContent, Step, VmDescription,
};
use hotlift_wire::multifd::{
    Hello, INITIAL_PACKET_LEN, InitialPacket, Method, PacketFields, PacketHeader, PacketLayout,
    PacketRules, PacketWriter, ZeroPageDetection,
};

use super::{Layout, Place};

/// Pages of the guest's RAM in every recorded stream.
pub const RAM_PAGES: usize = 512;

/// Returns page `number` of the guest's RAM as the recording script fills it. A running guest counts in the first two bytes of
/// the pages 1 to 15.
pub fn ram_page(number: usize) -> Vec<u8> {
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

/// A source's bytes on all its connections.
pub struct Stream {
    /// The unchanged main channel.
    pub main: Vec<u8>,
    /// Its machine type.
    pub machine: String,
    pub blocks: Vec<RamBlockEntry>,
    pub channels: Vec<(InitialPacket, Vec<Packet>)>,
    /// Zero pages on the main channel: the round, the block and the offset.
    zero_on_main: Vec<(usize, usize, u64)>,
}

/// A packet with its payload decoded.
pub struct Packet {
    pub sync: bool,
    pub number: u64,
    pub block: usize,
    pub normal: Vec<u64>,
    pub zero: Vec<u64>,
    pub pages: Vec<u8>,
}

/// The offset of a page and its content, `None` if it is zero.
type Page<'a> = (u64, Option<&'a [u8]>);

impl Stream {
    /// Reads a recorded stream, `VERSION-METHOD`; the README of the fixtures describes its content.
    pub fn recorded(name: &str) -> Self {
        let connection = |kind: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../hotlift-wire/fixtures")
                .join(name)
                .join(format!("{kind}.zst"));
            let packed =
                std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            zstd::decode_all(packed.as_slice()).expect("a zstd file")
        };
        let method_name = name.split('-').nth(1).expect("VERSION-METHOD");
        let channels = ["channel-0", "channel-1"].map(connection);
        Self::new(
            connection("main"),
            &channels,
            method(method_name).expect(name),
        )
    }

    /// Parses the bytes of all connections. Panics if a QEMU would not send them.
    pub fn new(main: Vec<u8>, channels: &[Vec<u8>], method: &MethodInfo) -> Self {
        let mut machine = String::new();
        let (mut flushes, mut sections) = (0, 0);
        let mut zero = Vec::new();
        let text = VmDescription::find(&main).expect("a description");
        let description = VmDescription::parse(text).expect("QEMU's description");
        let mut decoder = MainDecoder::new(DeviceLengths::Description(description));
        let mut rest = main.as_slice();
        while let Step::Event { event, consumed } = decoder.next(rest).expect("a main channel") {
            rest = &rest[consumed..];
            match event {
                MainEvent::Configuration(found) => machine = found.machine.to_owned(),
                MainEvent::MultifdFlush => flushes += 1,
                MainEvent::RamEos => sections += 1,
                MainEvent::RamPage {
                    block,
                    offset,
                    content: PageContent::Zero,
                } => zero.push(([flushes, sections], block, offset)),
                MainEvent::RamPage { content, .. } => panic!("{content:?} on the main channel"),
                _ => {}
            }
        }
        // A SYNC belongs to each sync point; before QEMU 8.1's machine types a section's end is one.
        let kind = usize::from(flushes == 0);
        let blocks = decoder.blocks().to_vec();
        Self {
            channels: channels
                .iter()
                .map(|bytes| read_channel(bytes, &blocks, method))
                .collect(),
            zero_on_main: zero
                .into_iter()
                .map(|(n, b, at)| (n[kind], b, at))
                .collect(),
            main,
            machine,
            blocks,
        }
    }

    /// Returns the RAM block called `name` after the stream; pages that were never sent are zero.
    pub fn memory(&self, name: &str) -> Vec<u8> {
        let index = self.blocks.iter().position(|block| block.name == name);
        let index = index.expect("a block of the list");
        // Between two sync points no page is sent twice, so rounds define the whole order.
        let mut rounds: BTreeMap<usize, Vec<Page<'_>>> = BTreeMap::new();
        for &(round, block, offset) in &self.zero_on_main {
            if block == index {
                rounds.entry(round).or_default().push((offset, None));
            }
        }
        for (_, packets) in &self.channels {
            let mut round = 0;
            for packet in packets {
                if packet.block == index {
                    let normal = packet.pages.chunks(PAGE_SIZE).map(Some);
                    let pages = rounds.entry(round).or_default();
                    pages.extend(packet.normal.iter().copied().zip(normal));
                    pages.extend(packet.zero.iter().map(|&offset| (offset, None)));
                }
                round += usize::from(packet.sync);
            }
        }
        let mut memory = vec![0; usize::try_from(self.blocks[index].used_length).expect("small")];
        for (offset, content) in rounds.into_values().flatten() {
            let page = &mut memory[usize::try_from(offset).expect("small")..][..PAGE_SIZE];
            page.copy_from_slice(content.unwrap_or(&[0; PAGE_SIZE]));
        }
        memory
    }

    /// Returns the channels as a Hotlift sends them: with its hello and its checksums, the same pages in the same packets, the
    /// payloads from one encoder per channel.
    pub fn rewritten(&self, name: &str, encoder: &dyn Fn() -> Box<dyn Encode>) -> Vec<Vec<u8>> {
        let flag = method(name).expect(name).flag;
        let method = Method::from_flag(flag).expect(name);
        let mut packets = self.channels.iter().flat_map(|(_, packets)| packets);
        let hello = Hello {
            channels: u8::try_from(self.channels.len()).expect("two channels"),
            method: Some(method),
            layout: PacketLayout::QEMU,
            zero_page_detection: match packets.any(|packet| !packet.zero.is_empty()) {
                true => ZeroPageDetection::Multifd,
                false => ZeroPageDetection::Legacy,
            },
        };
        let mut payload = Vec::new();
        let rewrite = |(initial, packets): &(InitialPacket, Vec<Packet>)| {
            let mut writer = PacketWriter::new(PacketLayout::QEMU, method, true);
            let mut encoder = encoder();
            let hello = Some(hello);
            let mut bytes = InitialPacket { hello, ..*initial }.encode().to_vec();
            for packet in packets {
                payload.clear();
                if !packet.pages.is_empty() {
                    encoder.encode(&packet.pages, &mut payload).expect(name);
                }
                let fields = PacketFields {
                    sync: packet.sync,
                    packet_num: packet.number,
                    block: &self.blocks[packet.block].name,
                    normal: &packet.normal,
                    zero: &packet.zero,
                    payload_len: u32::try_from(payload.len()).expect("a small payload"),
                    payload_crc: match method {
                        Method::None => 0,
                        _ => crc32fast::hash(&payload),
                    },
                };
                bytes.extend_from_slice(writer.header(&fields).expect("a header"));
                bytes.extend_from_slice(&payload);
            }
            bytes
        };
        self.channels.iter().map(rewrite).collect()
    }
}

fn read_channel(
    bytes: &[u8],
    blocks: &[RamBlockEntry],
    method: &MethodInfo,
) -> (InitialPacket, Vec<Packet>) {
    let rules = PacketRules {
        layout: PacketLayout::QEMU,
        method: Method::from_flag(method.flag),
        checksum_required: false,
    };
    let mut header = PacketHeader::new(rules.layout);
    let mut decoder = (method.decoder)(Accelerator::Off).expect(method.name);
    let mut packets = Vec::new();
    let (initial, mut rest) = bytes
        .split_first_chunk::<INITIAL_PACKET_LEN>()
        .expect("an initial packet");
    while !rest.is_empty() {
        let (head, behind) = rest.split_at(rules.layout.header_len());
        header.decode(head, &rules, blocks).expect("a header");
        let (payload, behind) = behind.split_at(header.payload_len());
        rest = behind;
        let mut pages = Vec::new();
        if !header.normal().is_empty() {
            let place = Place::new(header.normal().len(), Layout::Scattered);
            decoder.decode(payload, &place.runs()).expect(method.name);
            pages = place.pages();
        }
        packets.push(Packet {
            sync: header.sync(),
            number: header.packet_num(),
            block: header.block(),
            normal: header.normal().to_vec(),
            zero: header.zero().to_vec(),
            pages,
        });
    }
    let initial = InitialPacket::decode(initial).expect("an initial packet");
    (initial, packets)
}
