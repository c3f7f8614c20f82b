//! Fuzz targets for packet headers and opening packets of multifd channels.

use hotlift_wire::RamBlockEntry;
use hotlift_wire::multifd::{
    INITIAL_PACKET_LEN, InitialPacket, Method, PacketFields, PacketHeader, PacketLayout,
    PacketRules, PacketWriter,
};

use crate::memory::{at_the_end, bounded};

/// Allocation limit in bytes. A header allocates only a table of page offsets, created once.
const MEMORY: usize = 64 << 10;

/// Decodes several packet headers with one decoder, as a channel does. The first byte selects the decoder's rules. The
/// second and third bytes change one byte of the header when it is encoded again.
pub fn packet(data: &[u8]) {
    let Some((&[rules, at, bits], data)) = data.split_first_chunk() else {
        return;
    };
    let layout = match rules & 1 {
        0 => PacketLayout::new(4096, 8).expect("a layout"),
        _ => PacketLayout::QEMU,
    };
    let rules = PacketRules {
        layout,
        method: (rules & 2 != 0).then(|| Method::ALL[usize::from(rules >> 4) % Method::ALL.len()]),
        checksum_required: rules & 4 != 0,
    };
    let blocks = [
        RamBlockEntry::new("pc.ram", 64 << 20),
        RamBlockEntry::new("a", 4096),
    ];
    let mut header = PacketHeader::new(layout);
    for bytes in data.chunks(layout.header_len()) {
        let read = at_the_end(bytes, |bytes| {
            bounded(MEMORY, || header.decode(bytes, &rules, &blocks))
        });
        if read.is_ok() {
            check(&header, layout, &blocks);
            written_again(&header, layout, &blocks, [at, bits]);
        }
    }
}

fn check(header: &PacketHeader, layout: PacketLayout, blocks: &[RamBlockEntry]) {
    assert!(header.normal().len() + header.zero().len() <= layout.pages());
    assert!(header.payload_len() <= layout.max_payload());
    let page = layout.page_size() as u64;
    for &offset in header.normal().iter().chain(header.zero()) {
        let end = offset.checked_add(page).expect("a page");
        assert!(
            end <= blocks[header.block()].used_length,
            "a page outside its block"
        );
        assert!(offset.is_multiple_of(page));
    }
}

/// Encodes a decoded header again, with a checksum, and decodes the result. The headers must be equal. If a byte was
/// changed, decoding must fail.
fn written_again(
    header: &PacketHeader,
    layout: PacketLayout,
    blocks: &[RamBlockEntry],
    [at, bits]: [u8; 2],
) {
    let pages = header.normal().len() + header.zero().len();
    let with_payload = !header.normal().is_empty();
    let covered = with_payload && header.method() != Method::None;
    let fields = PacketFields {
        sync: header.sync(),
        packet_num: header.packet_num(),
        block: if pages > 0 {
            &blocks[header.block()].name
        } else {
            ""
        },
        normal: header.normal(),
        zero: header.zero(),
        payload_len: u32::try_from(header.payload_len()).expect("within the layout"),
        payload_crc: if covered { 0x1234_5678 } else { 0 },
    };
    let mut writer = PacketWriter::new(layout, header.method(), true);
    let mut bytes = writer.header(&fields).expect("a header").to_vec();
    let rules = PacketRules {
        layout,
        method: None,
        checksum_required: true,
    };
    let mut again = PacketHeader::new(layout);
    again
        .decode(&bytes, &rules, blocks)
        .expect("our own header");
    assert_eq!(again.sync(), header.sync());
    assert_eq!(again.packet_num(), header.packet_num());
    assert_eq!(
        (again.normal(), again.zero()),
        (header.normal(), header.zero())
    );
    assert_eq!(again.payload_len(), header.payload_len());
    if bits != 0 {
        let length = bytes.len();
        // Any byte except the payload's CRC, which only the payload can be compared with.
        let at = usize::from(at) % length;
        let crc_before = again.payload_crc();
        bytes[at] ^= bits;
        let changed = again.decode(&bytes, &rules, blocks);
        let only_the_payloads = changed.is_ok() && again.payload_crc() != crc_before;
        assert!(
            changed.is_err() || only_the_payloads,
            "byte {at} changed unseen"
        );
    }
}

/// Decodes a channel's opening packet. Encoding the result must give the same bytes.
pub fn initial_packet(data: &[u8]) {
    let Some(packet) = data.first_chunk::<INITIAL_PACKET_LEN>() else {
        return;
    };
    if let Ok(read) = InitialPacket::decode(packet) {
        let again = InitialPacket::decode(&read.encode()).expect("our own packet");
        assert_eq!(again, read);
    }
}
